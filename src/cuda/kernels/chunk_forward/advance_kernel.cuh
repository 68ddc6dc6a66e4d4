// The kernel around advance.cuh: work of a block, stages, states at both ends. Barriers: one of all threads a chunk (twice with
// one stage), and three of the warps of a team (four in precise chunks), each with the exchange
// that it orders.
#pragma once

#include "cuda/kernels/chunk_forward/advance.cuh"
#include "cuda/kernels/chunk_forward/kept.cuh"
#include "cuda/kernels/chunk_forward/stages.cuh"
#include "cuda/kernels/chunk_forward/tokens.cuh"

namespace flashqla::cuda {

/// S^T K^T and S^T Q^T (kQueries) of the warp's own tokens.
template <class Element, int kDimK, bool kQueries, int kTeamTiles, class Stage, class Team>
FLASHQLA_DEVICE void project_tokens(const Stage& stage, Team* exchange, const LanePlace& place,
                                    const StatePart<kDimK> (&state)[kTeamTiles], tile::Accumulator (&sk)[kTeamTiles][2],
                                    tile::Accumulator (&sq)[kTeamTiles][2]) {
  const auto wait = [&] { ptx::named_barrier(place.barrier(0), kTeamThreads); };  // the state, for the team
  if (*reinterpret_cast<const float*>(stage.unit + ChunkUnit::kPrecise) != 0.0f) {
    project<Element, kDimK, kTeamTiles, kQueries, true>(stage, exchange, place, state, wait, sk, sq);
    // All have read the rest: E may take its place.
    if constexpr (Team::kErrorsOverRest) ptx::named_barrier(place.barrier(1), kTeamThreads);
  } else {
    project<Element, kDimK, kTeamTiles, kQueries, false>(stage, exchange, place, state, wait, sk, sq);
  }
}

/// Of E in its products: cut off after TF32's, rounded to TF32, or for e all of them, as two TF32.
enum class Digits { cut, rounded, all };
/// The bounds of f16 tensors are a quarter of those of bf16; gradients show errors of e many times.
template <class Element, bool kForGradients>
inline constexpr Digits kDigitsOf = std::is_same_v<Element, ptx::F16> ? (kForGradients ? Digits::all : Digits::rounded)
                                                                      : (kForGradients ? Digits::rounded : Digits::cut);

/// Blocks with which E of a part's tokens is multiplied.
struct PartBlocks {
  tile::FragmentB solve, answers;
};

/// For the own tokens e += E solve^T and, with kAnswers, o += E answers^T (on the way back, kStep -1, e += E solve): from the own
/// E (`own`) and that of all parts that come before in the direction of time. `seen`: how large E is, for what follows. Returns
/// which of the team's tiles are to be walked token by token instead, a bit each.
template <class Element, int kStep, bool kAnswers, Digits kDigits, int kDimK, int kTeamTiles, class Team>
FLASHQLA_DEVICE unsigned solve_part(Team* exchange, const std::byte* unit, const Least& least, const LanePlace& place,
                                    const StatePart<kDimK> (&state)[kTeamTiles], const tile::Accumulator (&own)[kTeamTiles][2],
                                    const tile::Accumulator (&seen)[kTeamTiles][2], tile::Accumulator (&e)[kTeamTiles][2],
                                    tile::Accumulator (&o)[kTeamTiles][2]) {
  const auto load = [&](int part) -> PartBlocks {
    if constexpr (kStep < 0) return {load_block_turned(unit, ChunkUnit::kSolve, part, place.part), {}};
    PartBlocks blocks{load_block(unit, ChunkUnit::kSolve, place.part, part), {}};
    if constexpr (kAnswers) blocks.answers = load_block(unit, ChunkUnit::kAnswers, place.part, part);
    return blocks;
  };
  const auto add = [&](const PartBlocks& blocks, const tile::WideA(&errors)[kTeamTiles]) {
    const tile::WideB solve = tile::widen(blocks.solve);
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      tile::multiply(e[t][0], e[t][1], errors[t], solve);
      if constexpr (kDigits == Digits::all) tile::multiply(e[t][0], e[t][1], tile::rest_of_cut(errors[t]), solve);
    }
    if constexpr (kAnswers) {
      const tile::WideB answers = tile::widen(blocks.answers);
#pragma unroll
      for (int t = 0; t < kTeamTiles; ++t) tile::multiply(o[t][0], o[t][1], errors[t], answers);
    }
  };
  const PartBlocks own_blocks = load(place.part);
  tile::WideA errors[kTeamTiles];
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
    errors[t] = kDigits == Digits::rounded ? tile::to_wide_a(own[t]) : tile::wide_a(own[t]);
    store_errors(exchange[t].errors[place.part], errors[t]);
  }
  const bool watching = watched<Element>(least);
  if (watching) {
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      const int factors = kStep > 0 ? ChunkUnit::kWriteK : ChunkUnit::kReadK;
      const Reach reach = reach_of<Element>(unit, least, factors, place, seen[t], state[t]);
      if (tile::lane_id() == 0) exchange[t].reach[place.part] = {reach.tokens, reach.through, reach.state, 0.0f};
    }
  }
  add(own_blocks, errors);
  PartBlocks blocks[kTeam - 1];
#pragma unroll
  for (int turn = 0; turn < kTeam - 1; ++turn) {
    const int part = kStep > 0 ? turn : kTeam - 1 - turn;
    if (kStep > 0 ? part < place.part : part > place.part) blocks[turn] = load(part);
  }
  // E, for the team; and all have read the state: updates may take its place.
  ptx::named_barrier(place.barrier(1), kTeamThreads);
#pragma unroll
  for (int turn = 0; turn < kTeam - 1; ++turn) {
    const int part = kStep > 0 ? turn : kTeam - 1 - turn;
    if (kStep > 0 ? part >= place.part : part <= place.part) break;
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) errors[t] = stored_errors(exchange[t].errors[part]);
    add(blocks[turn], errors);
  }
  unsigned lost = 0;
  if (watching) {
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) lost |= is_lost<Element>(least, exchange[t].reach) ? 1u << t : 0u;
  }
  return lost;
}

/// Updates of S from the own tokens, for the team: x times factors of the tokens, in two parts.
template <class Element, int kDimK>
FLASHQLA_DEVICE Update leave_updates(Exchange<kDimK>& exchange, const LanePlace& place, const std::byte* unit, int factors,
                                     float sign, const tile::Accumulator (&x)[2]) {
  tile::Accumulator update[2] = {x[0], x[1]};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 f = column_factors(unit, factors, 2 * place.part + half);
    scale_columns(update[half], {sign * f.x, sign * f.y});
  }
  const tile::FragmentA left = tile::to_a<Element>(update[0], update[1]);
  const tile::FragmentA rest = tile::rest_of<Element>(update[0], update[1], left);
  store_left(exchange.left[place.part], left);
  store_left(exchange.left_rest[place.part], rest);
  return {left, rest};
}

/// O of the own tokens, which holds S^T Q^T, becomes read_q o that + rise o answers (what they make of E).
FLASHQLA_DEVICE void take_answers(const std::byte* unit, const LanePlace& place, const tile::Accumulator (&answers)[2],
                                  tile::Accumulator (&o)[2]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 read = column_factors(unit, ChunkUnit::kReadQ, 2 * place.part + n),
                 rise = column_factors(unit, ChunkUnit::kRise, 2 * place.part + n);
    scale_columns(o[n], read);
#pragma unroll
    for (int i = 0; i < 4; ++i) o[n].c[i] = fmaf(i % 2 == 0 ? rise.x : rise.y, answers[n].c[i], o[n].c[i]);
  }
}

/// Rows of keys or queries as right operands of updates.
template <int kDimK>
FLASHQLA_DEVICE QuarterAddresses<kDimK> quarter_addresses(const std::byte* rows, const LanePlace& place) {
  return {tile::SharedTile<kChunkTokens, kDimK>{ptx::shared_address(rows)}, place};
}

/// S^T (or its gradient) = total S^T + the own updates K.
template <class Element, int kDimK, int kTeamTiles, bool kAll, class Stage>
FLASHQLA_DEVICE void begin_update(const Stage& stage, const QuarterAddresses<kDimK>& keys, const LanePlace& place,
                                  TileSet<kAll> left_out, const Update (&own)[kTeamTiles],
                                  StatePart<kDimK> (&state)[kTeamTiles]) {
  const float total = *reinterpret_cast<const float*>(stage.unit + ChunkUnit::kTotal);
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
    if (left_out.has(t)) continue;
#pragma unroll
    for (tile::Accumulator& s : state[t].s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s.c[i] *= total;
    }
  }
  add_update<Element>(keys, place.part, left_out, own, state);
}

/// S^T += the other parts' updates K.
template <class Element, int kDimK, int kTeamTiles, bool kAll, class Team>
FLASHQLA_DEVICE void finish_update(const QuarterAddresses<kDimK>& keys, const LanePlace& place, const Team* exchange,
                                   TileSet<kAll> left_out, StatePart<kDimK> (&state)[kTeamTiles]) {
  const auto take = [&](int t, int part) -> Update {
    return {stored_left(exchange[t].left[part]), stored_left(exchange[t].left_rest[part])};
  };
  add_updates<1, Element>(keys, place, left_out, take, state);
}

/// What a chunk that was walked token by token stores.
template <bool kKeeps>
struct Advance {
  using Params = ChunkForwardParams;
  static constexpr bool kBack = false;
  template <class Element>
  static FLASHQLA_DEVICE void finish(const Params& p, const AdvanceWork& work, std::int64_t chunk, const LanePlace& place,
                                     const std::byte*, std::byte* memory, tile::Accumulator (&e)[2], tile::Accumulator (&o)[2]) {
    if constexpr (kKeeps) {
      keep_rows<Element, kKeepsRests<Element>, RowsFrom::walk>(p.kept, p, work, chunk, place, e);
    } else {
      put_together<Element>(memory, place, o);
      store_piece<Element>(p, work, p.o, place, chunk, memory);
    }
  }
};

/// kKeeps: what chunk_backward wants is kept, in place of the outputs. load_next() starts the copies of the next chunk.
template <class Element, bool kKeeps, int kDimK, int kTeamTiles, class Shared, class LoadNext>
FLASHQLA_DEVICE void advance_chunk(const ChunkForwardParams& p, const AdvanceWork& work, std::int32_t chunk,
                                   const typename Shared::Stage& stage, Shared& shared, const LanePlace& place,
                                   const RowWriter<Element, 1>& writer, const LoadNext& load_next,
                                   StatePart<kDimK> (&state)[kTeamTiles]) {
  auto* const exchange = shared.exchange + place.tile;
  const typename Shared::Values values{ptx::shared_address(stage.values)};
  tile::Accumulator sk[kTeamTiles][2], o[kTeamTiles][2], e[kTeamTiles][2], answers[kTeamTiles][2];
  project_tokens<Element, kDimK, !kKeeps>(stage, exchange, place, state, sk, o);
  tile::FragmentA v[kTeamTiles];
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
    v[t] = tile::load_c_transposed(values, place.in_tile(t).tile * kTileRows, place.part * kPartTokens);
  }
  const Least least = least_of(stage.unit, ChunkUnit::kLeastForth);
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
    take_errors<Element>(v[t], stage.unit, place, sk[t]);
    tile::clear(e[t]);
    tile::clear(answers[t]);
  }
  const unsigned lost =
      solve_part<Element, 1, !kKeeps, kDigitsOf<Element, kKeeps>>(exchange, stage.unit, least, place, state, sk, sk, e, answers);
  load_next();  // by the warps that have had the least to do
  Update own[kTeamTiles];
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
    own[t] = leave_updates<Element, kDimK>(exchange[t], place, stage.unit, ChunkUnit::kWriteK, 1.0f, e[t]);
    if constexpr (!kKeeps) take_answers(stage.unit, place, answers[t], o[t]);
  }
  const auto keys = quarter_addresses<kDimK>(stage.keys, place);
  const auto finish = [&](auto left_out) {
    begin_update<Element>(stage, keys, place, left_out, own, state);
    ptx::named_barrier(place.barrier(2), kTeamThreads);  // updates, for the team; and all have read E: output may take its place
    finish_update<Element>(keys, place, exchange, left_out, state);
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      if (left_out.has(t)) continue;
      if constexpr (kKeeps) {
        keep_rows<Element, kKeepsRests<Element>, RowsFrom::products>(p.kept, p, work, chunk, place.in_tile(t), e[t]);
      } else {
        writer.store(p, work, p.o, place.in_tile(t), t, chunk, exchange[t].output[place.part], o[t]);
      }
    }
  };
  if (lost == 0) return finish(TileSet<true>{0});
  finish(TileSet<false>{lost});
  leave_lost(lost, exchange, place, state);
  walk_lost<Element, Shared::kSlab, Advance<kKeeps>>(p, work, chunk, stage, lost, exchange, place, state);
}

/// Calls body(chunk, stage, load_next) for every chunk of the sequence, first to last (kStep 1) or last to first (-1); body calls
/// load_next() once.
template <class Element, int kStep, class Shared, class Body>
FLASHQLA_DEVICE void walk_chunks(const ChunkForwardParams& p, const AdvanceWork& work, const LanePlace& place,
                                 const TokenTensor& values, Shared& shared, const Body& body) {
  constexpr int kThreads = Shared::kThreads;
  const auto chunks = static_cast<std::int32_t>(work.rows.chunks());
  const auto chunk_of = [&](std::int32_t turn) { return kStep > 0 ? turn : chunks - 1 - turn; };
  const bool two_stages = p.stages > 1;
  StageLoader<Element, Shared, kStep> loader(p, work, place, values, chunk_of(0), shared);
  if (chunks > 0) loader.load(p, work, values, chunk_of(0), shared, 0);
  ptx::cp_async_commit();
  int number = 0;  // of this chunk's stage
  for (std::int32_t turn = 0; turn < chunks; ++turn) {
    ptx::cp_async_wait<0>();
    // This chunk's stage is full, from all threads; and all have left the other stage, which is filled next.
    ptx::named_barrier(0, kThreads);
    body(chunk_of(turn), shared.stages[number], [&] {
      if (two_stages && turn + 1 < chunks) loader.load(p, work, values, chunk_of(turn + 1), shared, 1 - number);
      ptx::cp_async_commit();
    });
    if (two_stages) {
      number = 1 - number;
    } else {
      ptx::named_barrier(0, kThreads);  // all have left the only stage
      if (turn + 1 < chunks) loader.load(p, work, values, chunk_of(turn + 1), shared, 0);
      ptx::cp_async_commit();
    }
  }
}

template <class Element, int kDimK, bool kKeeps, class Shared>
FLASHQLA_DEVICE void advance_sequence(const ChunkForwardParams& p, const AdvanceWork& work, std::int64_t read, std::int64_t write,
                                      Shared& shared) {
  using Stage = typename Shared::Stage;
  constexpr int kTeamTiles = Shared::kTeamTiles;
  const LanePlace place = lane_place<kTeamTiles>();
  StatePart<kDimK> state[kTeamTiles];
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) load_state<kDimK>(p, work, place.in_tile(t), p.initial_state, read, state[t]);
  StateStore stored(p, work);
  const auto save = [&](const StateTensor& to, std::int64_t row) {
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) store_state<kDimK>(p, work, place.in_tile(t), to, row, state[t]);
  };
  RowWriter<Element, 1> writer(p, work, p.o, place, 0, Shared::kSlab);
  walk_chunks<Element, 1>(p, work, place, p.v, shared, [&](std::int32_t chunk, const Stage& stage, const auto& load_next) {
    if constexpr (kKeeps) {
#pragma unroll
      for (int t = 0; t < kTeamTiles; ++t) {
        keep_state<kKeepsRests<Element>>(p.kept, p, work, chunk, place.in_tile(t), state[t]);
      }
    } else {
      stored.before(p, save);
    }
    advance_chunk<Element, kKeeps>(p, work, chunk, stage, shared, place, writer, load_next, state);
    if constexpr (!kKeeps) {
      writer.move();
      stored.after(p, work, chunk, save);
    }
  });
  if constexpr (!kKeeps) save(p.final_state, write);
}

template <class Element, int kDimK, int kTiles>
__global__ void __launch_bounds__(AdvanceShared<kDimK, kTiles>::kThreads)
    advance_states(const __grid_constant__ ChunkForwardParams p) {
  using Shared = AdvanceShared<kDimK, kTiles>;
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  const AdvanceWork work = advance_work<Shared::kSlab>(p, blockIdx.x);
  const StateRows rows = state_rows(p, work);
  if (rows.padding) return zero_output<Shared::kSlab>(p, work);
  advance_sequence<Element, kDimK, false>(p, work, rows.read, rows.write, shared);
}

}  // namespace flashqla::cuda
