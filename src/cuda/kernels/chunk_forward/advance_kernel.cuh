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
  using Rows = tile::SharedTile<kChunkTokens, kDimK>;
  const bool precise = *reinterpret_cast<const float*>(stage.unit + ChunkUnit::kPrecise) != 0.0f;
  const auto keys = own_tokens(Rows{ptx::shared_address(stage.keys)}, place),
             queries = own_tokens(Rows{ptx::shared_address(stage.queries)}, place);
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
    tile::clear(sk[t]);
    tile::clear(sq[t]);
    leave_state<Element, kDimK, false>(exchange[t].state, place, state[t]);
    if (precise) leave_state<Element, kDimK, true>(exchange[t].rest, place, state[t]);
  }
  const auto wait = [&] { ptx::named_barrier(place.barrier(0), kTeamThreads); };  // the state, for the team
  if (precise) {
    project<Element, kDimK, kTeamTiles, kQueries, true>(keys, queries, exchange, wait, sk, sq);
    // All have read the rest: E may take its place.
    if constexpr (Team::kErrorsOverRest) ptx::named_barrier(place.barrier(1), kTeamThreads);
  } else {
    project<Element, kDimK, kTeamTiles, kQueries, false>(keys, queries, exchange, wait, sk, sq);
  }
}

/// Solves for the own tokens: from E (`from`) of all parts that come before in the direction of time kStep, and the own, to `to`.
/// `scale`: above those of all of them, for what becomes a left operand. Returns which of the team's tiles are to be walked token
/// by token instead, a bit each.
template <class Element, int kStep, int kDimK, int kTeamTiles, class Team, class Block>
FLASHQLA_DEVICE unsigned solve_part(Team* exchange, const std::byte* unit, const LanePlace& place,
                                    const StatePart<kDimK> (&state)[kTeamTiles], const tile::Accumulator (&from)[kTeamTiles][2],
                                    const Block& block, tile::Accumulator (&to)[kTeamTiles][2], float (&scale)[kTeamTiles][2]) {
  const Least least = least_of(unit, kStep > 0 ? ChunkUnit::kLeastForth : ChunkUnit::kLeastBack);
  const bool watching = watched<Element>(least);
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
    float own[2];
    scales_of_rows(from[t], own);
    store_left(exchange[t].errors[place.part], pack_rows(own, from[t]));
    leave_scales(exchange[t].scales[place.part], own);
    if (watching) {
      const int factors = kStep > 0 ? ChunkUnit::kWriteK : ChunkUnit::kReadK;
      const Reach reach = reach_of<Element>(unit, least, factors, place, from[t], state[t]);
      if (tile::lane_id() == 0) exchange[t].reach[place.part] = {reach.tokens, reach.through, reach.state, 0.0f};
    }
    tile::clear(to[t]);
    scale[t][0] = scale[t][1] = 0.0f;
  }
  tile::FragmentB blocks[kTeam];
#pragma unroll
  for (int turn = 0; turn < kTeam; ++turn) {
    const int part = kStep > 0 ? turn : kTeam - 1 - turn;
    if (kStep > 0 ? part <= place.part : part >= place.part) blocks[turn] = block(part);
  }
  // E and scales, for the team; and all have read the state: updates may take its place.
  ptx::named_barrier(place.barrier(1), kTeamThreads);
#pragma unroll
  for (int turn = 0; turn < kTeam; ++turn) {
    const int part = kStep > 0 ? turn : kTeam - 1 - turn;
    if (kStep > 0 ? part > place.part : part < place.part) break;
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      float of_part[2];
      take_scales(exchange[t].scales[part], of_part);
      add_product(stored_left(exchange[t].errors[part]), blocks[turn], of_part, to[t]);
      for (int i = 0; i < 2; ++i) scale[t][i] = fmaxf(scale[t][i], of_part[i]);
    }
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
FLASHQLA_DEVICE void leave_updates(Exchange<kDimK>& exchange, const LanePlace& place, const std::byte* unit, int factors,
                                   float sign, const tile::Accumulator (&x)[2]) {
  tile::Accumulator update[2] = {x[0], x[1]};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 f = column_factors(unit, factors, 2 * place.part + half);
    scale_columns(update[half], {sign * f.x, sign * f.y});
  }
  const tile::FragmentA left = tile::to_a<Element>(update[0], update[1]);
  store_left(exchange.left[place.part], left);
  store_left(exchange.left_rest[place.part], tile::rest_of<Element>(update[0], update[1], left));
}

/// O of the own tokens += scores e, from e of the tokens before and the own.
template <int kTeamTiles, bool kAll, class Team>
FLASHQLA_DEVICE void add_scores(const std::byte* unit, const Team* exchange, const LanePlace& place, TileSet<kAll> left_out,
                                tile::Accumulator (&o)[kTeamTiles][2]) {
  tile::Accumulator u[kTeamTiles][2];
  float scale[kTeamTiles][2];
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
    tile::clear(u[t]);
    scale[t][0] = scale[t][1] = 0.0f;
  }
#pragma unroll
  for (int part = 0; part < kTeam; ++part) {
    if (part > place.part) break;
    const tile::FragmentB b = load_block(unit, ChunkUnit::kScores, place.part, part);
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      if (left_out.has(t)) continue;
      float of_part[2];
      take_scales(exchange[t].scales[part], of_part);
      for (int i = 0; i < 2; ++i) scale[t][i] = fmaxf(scale[t][i], of_part[i]);
      add_product(stored_left(exchange[t].solved[part]), b, scale[t], u[t]);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 read = column_factors(unit, ChunkUnit::kReadQ, 2 * place.part + n),
                 rise = column_factors(unit, ChunkUnit::kRise, 2 * place.part + n);
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      scale_columns(o[t][n], read);
#pragma unroll
      for (int i = 0; i < 4; ++i) o[t][n].c[i] = fmaf(i % 2 == 0 ? rise.x : rise.y, u[t][n].c[i], o[t][n].c[i]);
    }
  }
}

/// S^T (or its gradient) = total S^T + updates K. Sums are made in the order of the tokens in all columns of K.
template <class Element, int kDimK, int kTeamTiles, bool kAll, class Stage, class Team>
FLASHQLA_DEVICE void update_with_keys(const Stage& stage, const LanePlace& place, const Team* exchange, TileSet<kAll> left_out,
                                      StatePart<kDimK> (&state)[kTeamTiles]) {
  using Rows = tile::SharedTile<kChunkTokens, kDimK>;
  const float total = *reinterpret_cast<const float*>(stage.unit + ChunkUnit::kTotal);
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
#pragma unroll
    for (tile::Accumulator& s : state[t].s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s.c[i] *= total;
    }
  }
  update_state<Element>(
      QuarterAddresses<kDimK>(Rows{ptx::shared_address(stage.keys)}, place), left_out,
      [&](int t, int part) { return stored_left(exchange[t].left[part]); },
      [&](int t, int part) { return stored_left(exchange[t].left_rest[part]); }, state);
}

/// What a chunk that was walked token by token stores.
template <bool kKeeps>
struct Advance {
  using Params = ChunkForwardParams;
  static constexpr bool kBack = false;
  template <class Element, int kSlab>
  static FLASHQLA_DEVICE float value(const Params&, const AdvanceWork&, std::int64_t, const std::byte* values, int token,
                                     int column) {
    const float2 pair = pair_of_row<Element, kSlab>(values, token, column / 2 * 2);
    return column % 2 == 0 ? pair.x : pair.y;
  }
  template <class Element>
  static FLASHQLA_DEVICE void finish(const Params& p, const AdvanceWork& work, std::int64_t chunk, const LanePlace& place,
                                     const std::byte*, std::byte* memory, tile::Accumulator (&e)[2], tile::Accumulator (&o)[2]) {
    if constexpr (kKeeps) {
      float scale[2];
      scales_of_rows(e, scale);
      keep_rows<kKeepsRests<Element>>(p.kept, p, work, chunk, place, pack_rows(scale, e), scale, e);
    } else {
      store_rows<Element>(p, work, p.o, place, chunk, memory, o);
    }
  }
};

/// kKeeps: what chunk_backward wants is kept, in place of the outputs.
template <class Element, bool kKeeps, int kDimK, int kTeamTiles, class Shared>
FLASHQLA_DEVICE void advance_chunk(const ChunkForwardParams& p, const AdvanceWork& work, std::int64_t chunk,
                                   const typename Shared::Stage& stage, Shared& shared, const LanePlace& place,
                                   StatePart<kDimK> (&state)[kTeamTiles]) {
  auto* const exchange = shared.exchange + place.tile;
  const typename Shared::Values values{ptx::shared_address(stage.values)};
  tile::Accumulator sk[kTeamTiles][2], o[kTeamTiles][2], e[kTeamTiles][2];
  project_tokens<Element, kDimK, !kKeeps>(stage, exchange, place, state, sk, o);
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) take_errors<Element>(values, stage.unit, place.in_tile(t), sk[t]);
  float scale[kTeamTiles][2];
  const auto solve = [&](int part) { return load_block(stage.unit, ChunkUnit::kSolve, place.part, part); };
  const unsigned lost = solve_part<Element, 1>(exchange, stage.unit, place, state, sk, solve, e, scale);
  tile::FragmentA solved[kTeamTiles];
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
    solved[t] = pack_rows(scale[t], e[t]);
    leave_updates<Element, kDimK>(exchange[t], place, stage.unit, ChunkUnit::kWriteK, 1.0f, e[t]);
    if constexpr (!kKeeps) store_left(exchange[t].solved[place.part], solved[t]);
  }
  ptx::named_barrier(place.barrier(2), kTeamThreads);  // updates and e, for the team
  const auto finish = [&](auto left_out) {
    if constexpr (!kKeeps) add_scores(stage.unit, exchange, place, left_out, o);
    update_with_keys<Element>(stage, place, exchange, left_out, state);
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      if (left_out.has(t)) continue;
      if constexpr (kKeeps) {
        keep_rows<kKeepsRests<Element>>(p.kept, p, work, chunk, place.in_tile(t), solved[t], scale[t], e[t]);
      } else {
        store_rows<Element>(p, work, p.o, place.in_tile(t), chunk, exchange[t].output[place.part], o[t]);
      }
    }
  };
  if (lost == 0) return finish(TileSet<true>{0});
  leave_lost(lost, exchange, place, state);
  finish(TileSet<false>{lost});
  walk_lost<Element, Shared::kSlab, Advance<kKeeps>>(p, work, chunk, stage, lost, exchange, place, state);
}

/// Calls body(chunk, stage) for every chunk of the sequence, first to last (kStep 1) or last to first (-1), with the rows of the
/// next one on their way.
template <class Element, int kStep, class Shared, class Body>
FLASHQLA_DEVICE void walk_chunks(const ChunkForwardParams& p, const AdvanceWork& work, const TokenTensor& values, Shared& shared,
                                 const Body& body) {
  constexpr int kThreads = Shared::kThreads;
  const std::int64_t chunks = work.rows.chunks();
  const auto chunk_of = [&](std::int64_t turn) { return kStep > 0 ? turn : chunks - 1 - turn; };
  const int stages = p.stages;
  StageLoader<Element, Shared, kStep> loader(p, work, values, chunk_of(0), shared);
  if (chunks > 0) loader.load(p, work, values, chunk_of(0), shared, 0);
  ptx::cp_async_commit();
  int number = 0;  // of this chunk's stage
  for (std::int64_t turn = 0; turn < chunks; ++turn) {
    ptx::cp_async_wait<0>();
    // This chunk's stage is full, from all threads; and all have left the other stage, which is filled next.
    ptx::named_barrier(0, kThreads);
    if (stages > 1 && turn + 1 < chunks) loader.load(p, work, values, chunk_of(turn + 1), shared, 1 - number);
    ptx::cp_async_commit();
    body(chunk_of(turn), shared.stages[number]);
    if (stages > 1) {
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
  walk_chunks<Element, 1>(p, work, p.v, shared, [&](std::int64_t chunk, const Stage& stage) {
    if constexpr (kKeeps) {
#pragma unroll
      for (int t = 0; t < kTeamTiles; ++t) {
        keep_state<kKeepsRests<Element>>(p.kept, p, work, chunk, place.in_tile(t), state[t]);
      }
    } else {
      stored.before(p, save);
    }
    advance_chunk<Element, kKeeps>(p, work, chunk, stage, shared, place, state);
    if constexpr (!kKeeps) stored.after(p, work, chunk, save);
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
