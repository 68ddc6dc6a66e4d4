// The kernel around advance.cuh: work of a block, stages, states at both ends. Barriers: one of all threads a chunk (twice with
// one stage), and three between the two warps of a pair, each with the exchange that it orders.
#pragma once

#include "cuda/kernels/chunk_forward/advance.cuh"
#include "cuda/kernels/chunk_forward/kept.cuh"
#include "cuda/kernels/chunk_forward/stages.cuh"
#include "cuda/kernels/chunk_forward/tokens.cuh"

namespace flashqla::cuda {

template <int kCount, int kMost>
FLASHQLA_DEVICE void load_fragments(const uint4 (&from)[kMost][32], tile::FragmentA (&f)[kCount]) {
  static_assert(kCount <= kMost, "the exchange has memory for K = 256");
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint4 a = from[i][tile::lane_id()];
    f[i] = {{a.x, a.y, a.z, a.w}};
  }
}

/// The warp's own updates for the other's, or back.
FLASHQLA_DEVICE void exchange_updates(Answer& answer, tile::FragmentA (&left)[2], tile::FragmentA (&rest)[2]) {
  const auto swap = [](uint4& stored, tile::FragmentA& f) {
    const uint4 own = {f.a[0], f.a[1], f.a[2], f.a[3]}, other = stored;
    stored = own;
    f = {{other.x, other.y, other.z, other.w}};
  };
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    swap(answer.left[t][tile::lane_id()], left[t]);
    swap(answer.rest[t][tile::lane_id()], rest[t]);
  }
}

/// The warp's errors as left operands, divided by its rows' scales, and those of the other half if that is kSender: it leaves
/// them with its scales. The receiver's scales are the larger ones; what comes from the sender takes `ratio` besides. The
/// receiver decides whether the chunk is to be walked token by token, which both find after the next barrier.
template <class Element, int kSender>
FLASHQLA_DEVICE void share_errors(Answer& to, Answer& from, const LanePlace& place, const Reach& reach, const float (&largest)[2],
                                  tile::Accumulator (&e)[4], float (&scale)[2], float (&ratio)[2], tile::FragmentA (&received)[2],
                                  tile::FragmentA (&own)[2]) {
  const int lane = tile::lane_id();
  for (int i = 0; i < 2; ++i) {
    scale[i] = block::power_above(largest[i]);
    ratio[i] = 1.0f;
  }
  __syncwarp();  // all lanes have read the other warp's state: its memory may be written
  if (place.half == kSender) {
    pack_errors(scale, e, own);
    for (int t = 0; t < 2; ++t) to.errors[t][lane] = {own[t].a[0], own[t].a[1], own[t].a[2], own[t].a[3]};
    if (lane % 4 == 0) to.scales[lane / 4] = {scale[0], scale[1]};
    if (watched<Element>(reach) && lane == 0) to.reach = {reach.tokens, reach.through, reach.state, 0.0f};
  }
  ptx::named_barrier(place.barrier(1), 64);  // errors and scales of the sender's tokens, for the other warp
  if (place.half != kSender) {
    for (int t = 0; t < 2; ++t) {
      const uint4 a = from.errors[t][lane];
      received[t] = {{a.x, a.y, a.z, a.w}};
    }
    const float2 scales = from.scales[lane / 4];
    const float sent[2] = {scales.x, scales.y};
    for (int i = 0; i < 2; ++i) {
      scale[i] = fmaxf(scale[i], sent[i]);
      ratio[i] = sent[i] * block::inverse_power(scale[i]);
    }
    pack_errors(scale, e, own);
    const bool lost = watched<Element>(reach) && is_lost<Element>(reach, from.reach);
    if (lane == 0) to.lost = from.lost = lost ? 1 : 0;
  }
}

/// O of the warp's tokens += scores e, from e of the own tokens and (of half 1) those before, divided by `scale`.
FLASHQLA_DEVICE void add_scores(const std::byte* unit, const Answer& from, const LanePlace& place, const float (&scale)[2],
                                const float (&ratio)[2], const tile::FragmentA (&own)[2], tile::Accumulator (&o)[4]) {
  tile::FragmentA first[2] = {};
  if (place.half == 1) {
    for (int t = 0; t < 2; ++t) {
      const uint4 a = from.updates[t][tile::lane_id()];
      first[t] = {{a.x, a.y, a.z, a.w}};
    }
  }
  tile::Accumulator u[4];
  multiply_triangle(unit, ChunkUnit::kScores, place.half, first, ratio, own, u);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    scale_columns(o[n], column_factors(unit, ChunkUnit::kReadQ, 4 * place.half + n));
    scale_columns(u[n], column_factors(unit, ChunkUnit::kRise, 4 * place.half + n));
#pragma unroll
    for (int i = 0; i < 4; ++i) o[n].c[i] = fmaf(scale[i / 2], u[n].c[i], o[n].c[i]);
  }
}

/// e of the warp's tokens as left operands, divided by `scale`, and its updates for both warps. Ends with the barrier for these.
/// Returns whether the chunk is to be walked token by token instead.
template <class Element, bool kKeeps, int kDimK>
FLASHQLA_DEVICE bool solve_tokens(const std::byte* unit, Answer& to, Answer& from, const LanePlace& place,
                                  const StatePart<kDimK>& part, const float (&largest)[2], tile::Accumulator (&e)[4],
                                  float (&scale)[2], float (&ratio)[2], tile::FragmentA (&own)[2], tile::FragmentA (&left)[2],
                                  tile::FragmentA (&rest)[2]) {
  const int lane = tile::lane_id();
  tile::FragmentA first[2] = {};
  const Reach reach = reach_of<Element>(unit, ChunkUnit::kLeastForth, ChunkUnit::kWriteK, place, largest, e, part);
  share_errors<Element, 0>(to, from, place, reach, largest, e, scale, ratio, first, own);
  tile::Accumulator u[4];
  multiply_triangle(unit, ChunkUnit::kSolve, place.half, first, ratio, own, u);
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    own[t] = tile::to_a<ptx::F16>(u[2 * t], u[2 * t + 1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale_columns(u[2 * t + half], column_factors(unit, ChunkUnit::kWriteK, 4 * place.half + 2 * t + half));
      scale_rows(u[2 * t + half], scale);
    }
    left[t] = tile::to_a<Element>(u[2 * t], u[2 * t + 1]);
    rest[t] = tile::rest_of<Element>(u[2 * t], u[2 * t + 1], left[t]);
    to.left[t][lane] = {left[t].a[0], left[t].a[1], left[t].a[2], left[t].a[3]};
    to.rest[t][lane] = {rest[t].a[0], rest[t].a[1], rest[t].a[2], rest[t].a[3]};
    if (!kKeeps && place.half == 0) to.updates[t][lane] = {own[t].a[0], own[t].a[1], own[t].a[2], own[t].a[3]};
  }
  ptx::named_barrier(place.barrier(2), 64);  // updates, for the other warp
  return from.lost != 0;
}

/// S^T K^T and S^T Q^T (kQueries) of the warp's own tokens.
template <class Element, int kDimK, int kTiles, bool kQueries>
FLASHQLA_DEVICE void project_tokens(const typename AdvanceShared<kDimK, kTiles>::Stage& stage,
                                    Exchange<kDimK> (&exchange)[2 * kTiles], const LanePlace& place, const StatePart<kDimK>& part,
                                    tile::Accumulator (&sk)[4], tile::Accumulator (&sq)[4]) {
  using Rows = typename AdvanceShared<kDimK, kTiles>::Rows;
  const Rows keys{ptx::shared_address(stage.keys)}, queries{ptx::shared_address(stage.queries)};
  const bool precise = *reinterpret_cast<const float*>(stage.unit + ChunkUnit::kPrecise) != 0.0f;
  const int other = 1 - place.half;
  tile::FragmentA state[kDimK / 32];
  tile::clear(sk);
  if constexpr (kQueries) tile::clear(sq);
  leave_state<Element>(exchange[place.own()], part, state);
  project<Element>(own_tokens(keys, place, place.half), state, sk);
  if constexpr (kQueries) project<Element>(own_tokens(queries, place, place.half), state, sq);
  if (precise) {
    leave_rest<Element>(exchange[place.own()], part, state);
    project<Element>(own_tokens(keys, place, place.half), state, sk);
  }
  ptx::named_barrier(place.barrier(0), 64);  // the state, for the other warp
  load_fragments(exchange[place.other()].state, state);
  project<Element>(own_tokens(keys, place, other), state, sk);
  if constexpr (kQueries) project<Element>(own_tokens(queries, place, other), state, sq);
  if (precise) {
    load_fragments(exchange[place.other()].rest, state);
    project<Element>(own_tokens(keys, place, other), state, sk);
  }
}

/// S^T (or its gradient) = total S^T + updates K, from the own tokens' updates and those that the other warp has left. In the
/// order of the tokens, whichever warp has them: sums are made alike in all columns of K.
template <class Element, int kDimK, int kTiles>
FLASHQLA_DEVICE void update_with_keys(const typename AdvanceShared<kDimK, kTiles>::Stage& stage, const LanePlace& place,
                                      Answer& own, tile::FragmentA (&left)[2], tile::FragmentA (&rest)[2],
                                      StatePart<kDimK>& part) {
  const typename AdvanceShared<kDimK, kTiles>::Rows keys{ptx::shared_address(stage.keys)};
  const float total = *reinterpret_cast<const float*>(stage.unit + ChunkUnit::kTotal);
#pragma unroll
  for (tile::Accumulator& s : part.s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s.c[i] *= total;
  }
  const tile::BlockAddresses<kChunkTokens, kDimK> addresses =
      tile::from_column(tile::addresses_b_transposed(keys), place.half * (kDimK / 2));
  if (place.half == 1) exchange_updates(own, left, rest);
  update_state<Element, kDimK>(addresses, 0, left, rest, part);
  exchange_updates(own, left, rest);
  update_state<Element, kDimK>(addresses, kHalfTokens, left, rest, part);
}

/// What a chunk that was walked token by token stores.
template <bool kKeeps>
struct Advance {
  using Params = ChunkForwardParams;
  static constexpr bool kBack = false;
  template <class Element>
  static FLASHQLA_DEVICE void finish(const Params& p, const AdvanceWork& work, std::int64_t chunk, const LanePlace& place,
                                     const std::byte*, std::byte* memory, tile::Accumulator (&e)[4], tile::Accumulator (&o)[4]) {
    if constexpr (kKeeps) {
      float scale[2];
      tile::FragmentA rows[2];
      pack_rows(e, scale, rows);
      keep_rows(p.kept, p, work, chunk, place, rows, scale);
    } else {
      store_rows<Element>(p, work, p.o, place, chunk, memory, o);
    }
  }
};

/// kKeeps: what chunk_backward wants is kept, in place of the outputs.
template <class Element, int kDimK, int kTiles, bool kKeeps>
FLASHQLA_DEVICE void advance_chunk(const ChunkForwardParams& p, const AdvanceWork& work, std::int64_t chunk,
                                   const typename AdvanceShared<kDimK, kTiles>::Stage& stage,
                                   Exchange<kDimK> (&exchange)[2 * kTiles], StatePart<kDimK>& part) {
  using Shared = AdvanceShared<kDimK, kTiles>;
  const LanePlace place = lane_place();
  const typename Shared::Values values{ptx::shared_address(stage.values)};
  tile::Accumulator sk[4], o[4];
  project_tokens<Element, kDimK, kTiles, !kKeeps>(stage, exchange, place, part, sk, o);
  float largest[2], scale[2], ratio[2];
  take_errors<Element, Shared::kSlab>(values, stage.unit, place, sk, largest);
  tile::FragmentA e[2], left[2], rest[2];
  Answer& own = exchange[place.own()].answer;
  Answer& other = exchange[place.other()].answer;
  if (solve_tokens<Element, kKeeps>(stage.unit, other, own, place, part, largest, sk, scale, ratio, e, left, rest)) {
    return walk_chunk<Element, kDimK, kTiles, Advance<kKeeps>>(p, work, chunk, stage, exchange, part);
  }
  if constexpr (kKeeps) {
    keep_rows(p.kept, p, work, chunk, place, e, scale);
  } else {
    add_scores(stage.unit, own, place, scale, ratio, e, o);
  }

  update_with_keys<Element, kDimK, kTiles>(stage, place, own, left, rest, part);
  if constexpr (!kKeeps) store_rows<Element>(p, work, p.o, place, chunk, exchange[place.own()].output, o);
}

/// Calls body(chunk, stage) for every chunk of the sequence, first to last (kStep 1) or last to first (-1), with the rows of the
/// next one on their way.
template <class Element, int kDimK, int kTiles, int kStep, class Body>
FLASHQLA_DEVICE void walk_chunks(const ChunkForwardParams& p, const AdvanceWork& work, const TokenTensor& values,
                                 AdvanceShared<kDimK, kTiles>& shared, const Body& body) {
  constexpr int kThreads = AdvanceShared<kDimK, kTiles>::kThreads;
  const std::int64_t chunks = work.rows.chunks();
  const auto chunk_of = [&](std::int64_t turn) { return kStep > 0 ? turn : chunks - 1 - turn; };
  const int stages = p.stages;
  StageLoader<Element, kDimK, kTiles, kStep> loader(p, work, values, chunk_of(0));
  if (chunks > 0) loader.load(p, work, values, chunk_of(0), shared.stages[0]);
  ptx::cp_async_commit();
  for (std::int64_t turn = 0; turn < chunks; ++turn) {
    ptx::cp_async_wait<0>();
    // This chunk's stage is full, from all threads; and all have left the other stage, which is filled next.
    ptx::named_barrier(0, kThreads);
    if (stages > 1 && turn + 1 < chunks) loader.load(p, work, values, chunk_of(turn + 1), shared.stages[(turn + 1) % 2]);
    ptx::cp_async_commit();
    body(chunk_of(turn), shared.stages[stages > 1 ? turn % 2 : 0]);
    if (stages == 1) {
      ptx::named_barrier(0, kThreads);  // all have left the only stage
      if (turn + 1 < chunks) loader.load(p, work, values, chunk_of(turn + 1), shared.stages[0]);
      ptx::cp_async_commit();
    }
  }
}

template <class Element, int kDimK, int kTiles, bool kKeeps>
FLASHQLA_DEVICE void advance_sequence(const ChunkForwardParams& p, const AdvanceWork& work, std::int64_t read, std::int64_t write,
                                      AdvanceShared<kDimK, kTiles>& shared) {
  using Stage = typename AdvanceShared<kDimK, kTiles>::Stage;
  StatePart<kDimK> part;
  load_state<kDimK>(p, work, p.initial_state, read, part);
  StateStore stored(p, work);
  const auto save = [&](const StateTensor& to, std::int64_t row) { store_state<kDimK>(p, work, to, row, part); };
  walk_chunks<Element, kDimK, kTiles, 1>(p, work, p.v, shared, [&](std::int64_t chunk, const Stage& stage) {
    if constexpr (kKeeps) {
      keep_state<kDimK>(p.kept, p, work, chunk, part);
    } else {
      stored.before(p, save);
    }
    advance_chunk<Element, kDimK, kTiles, kKeeps>(p, work, chunk, stage, shared.exchange, part);
    if constexpr (!kKeeps) stored.after(p, work, chunk, save);
  });
  if constexpr (!kKeeps) store_state<kDimK>(p, work, p.final_state, write, part);
}

template <class Element, int kDimK, int kTiles>
__global__ void __launch_bounds__(kTiles * 64) advance_states(const __grid_constant__ ChunkForwardParams p) {
  using Shared = AdvanceShared<kDimK, kTiles>;
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  const AdvanceWork work = advance_work<Shared::kSlab>(p, blockIdx.x);
  const StateRows rows = state_rows(p, work);
  if (rows.padding) return zero_output<Shared::kSlab>(p, work);
  advance_sequence<Element, kDimK, kTiles, false>(p, work, rows.read, rows.write, shared);
}

}  // namespace flashqla::cuda
