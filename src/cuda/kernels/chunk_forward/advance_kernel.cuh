// The kernel around advance.cuh: work of a block, stages, states at both ends. Barriers: one of all threads a chunk (twice with
// one stage), and three between the two warps of a pair, each with the exchange that it orders.
#pragma once

#include "cuda/kernels/chunk_forward/advance.cuh"
#include "cuda/tile/rows.cuh"

namespace flashqla::cuda {

/// o of a sequence that is padding.
template <int kSlab>
FLASHQLA_DEVICE void zero_output(const ChunkForwardParams& p, const AdvanceWork& work) {
  const int left = p.dim_v - work.first_v, columns = left < kSlab ? left : kSlab;
  for (std::int64_t at = threadIdx.x; at < work.rows.length * columns; at += blockDim.x) {
    const std::int64_t row = work.rows.begin + at / columns;
    static_cast<std::uint16_t*>(p.o.data)[offset_of(p.o, work.rows.batch, row, work.head) + work.first_v + at % columns] = 0;
  }
}

/// Copies of rows and units to the stages, chunk after chunk.
template <class Element, int kDimK, int kTiles>
struct StageLoader {
  using Shared = AdvanceShared<kDimK, kTiles>;
  static constexpr int kThreads = Shared::kThreads;
  tile::RowCursor<kThreads, kChunkTokens, kDimK> keys, queries;
  tile::RowCursor<kThreads, kChunkTokens, Shared::kSlab> values;
  bool direct;  // rows are aligned and there is no column past the end

  FLASHQLA_DEVICE StageLoader(const ChunkForwardParams& p, const AdvanceWork& work)
      : keys(first_of(p.k, work, work.head_qk, 0), p.k.stride_token),
        queries(first_of(p.q, work, work.head_qk, 0), p.q.stride_token),
        values(first_of(p.v, work, work.head, work.first_v), p.v.stride_token),
        direct(p.aligned != 0 && p.dim_k == kDimK && work.first_v + Shared::kSlab <= p.dim_v && work.rows.shift == 0) {}

  static FLASHQLA_DEVICE const Element* first_of(const TokenTensor& x, const AdvanceWork& work, std::int32_t head, int column) {
    return static_cast<const Element*>(x.data) + offset_of(x, work.rows.batch, work.rows.begin, head) + column;
  }

  /// Starts the copies of the next chunk. Without 16-byte alignment rows go through the registers.
  FLASHQLA_DEVICE void load(const ChunkForwardParams& p, const AdvanceWork& work, std::int64_t chunk,
                            typename Shared::Stage& stage) {
    const typename Shared::Rows key_tile{ptx::shared_address(stage.keys)}, query_tile{ptx::shared_address(stage.queries)};
    const typename Shared::Values value_tile{ptx::shared_address(stage.values)};
    if (direct && work.rows.tokens(chunk) == kChunkTokens) {
      keys.copy(key_tile);
      queries.copy(query_tile);
      values.copy(value_tile);
    } else {
      load_part(p, work, chunk, stage);
      keys.skip();
      queries.skip();
      values.skip();
    }
    const std::byte* unit = p.units + ((work.rows.first_chunk + chunk) * p.heads_v + work.head) * ChunkUnit::kBytes;
    const std::uint32_t to = ptx::shared_address(stage.unit);
#pragma unroll
    for (int i = 0; i < (ChunkUnit::kBytes / 16 + kThreads - 1) / kThreads; ++i) {
      const int at = (i * kThreads + static_cast<int>(threadIdx.x)) * 16;
      if (at < ChunkUnit::kBytes) ptx::cp_async_16(to + at, unit + at, 16);
    }
  }

  static __device__ __noinline__ void load_part(const ChunkForwardParams& p, const AdvanceWork& work, std::int64_t chunk,
                                                typename Shared::Stage& stage) {
    const std::int64_t token = work.rows.begin + work.rows.position(chunk);
    const int tokens = work.rows.tokens(chunk), columns_v = p.dim_v - work.first_v;
    const auto rows_of = [&](const TokenTensor& x, std::int32_t head, int first, int columns) {
      return tile::GlobalRows{static_cast<const Element*>(x.data) + offset_of(x, work.rows.batch, token, head) + first,
                              x.stride_token, tokens, columns};
    };
    const tile::GlobalRows key_rows = rows_of(p.k, work.head_qk, 0, p.dim_k), query_rows = rows_of(p.q, work.head_qk, 0, p.dim_k),
                           value_rows = rows_of(p.v, work.head, work.first_v, columns_v);
    if (p.aligned != 0) {
      tile::copy_rows_async<kThreads>(typename Shared::Rows{ptx::shared_address(stage.keys)}, key_rows);
      tile::copy_rows_async<kThreads>(typename Shared::Rows{ptx::shared_address(stage.queries)}, query_rows);
      tile::copy_rows_async<kThreads>(typename Shared::Values{ptx::shared_address(stage.values)}, value_rows);
    } else {
      tile::copy_rows<kThreads, kChunkTokens, kDimK>(stage.keys, key_rows);
      tile::copy_rows<kThreads, kChunkTokens, kDimK>(stage.queries, query_rows);
      tile::copy_rows<kThreads, kChunkTokens, Shared::kSlab>(stage.values, value_rows);
    }
  }
};

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

/// U and O of the warp's tokens, and its updates for both warps.
template <class Element>
FLASHQLA_DEVICE void solve_tokens(const std::byte* unit, Answer& to, const Answer& from, const LanePlace& place,
                                  const float (&largest)[2], tile::Accumulator (&e)[4], tile::Accumulator (&o)[4],
                                  tile::FragmentA (&left)[2], tile::FragmentA (&rest)[2]) {
  const int lane = tile::lane_id();
  float scale[2] = {block::power_above(largest[0]), block::power_above(largest[1])}, first_scale[2] = {1.0f, 1.0f},
        ratio[2] = {1.0f, 1.0f};
  tile::FragmentA first[2] = {}, own[2];
  __syncwarp();  // all lanes have read the other warp's state: its memory may be written
  if (place.half == 0) {
    pack_errors(scale, e, own);
    for (int t = 0; t < 2; ++t) to.errors[t][lane] = {own[t].a[0], own[t].a[1], own[t].a[2], own[t].a[3]};
    if (lane % 4 == 0) to.scales[lane / 4] = {scale[0], scale[1]};
  }
  ptx::named_barrier(place.barrier(1), 64);  // errors and scales of the first tokens, for the other warp
  if (place.half == 1) {
    for (int t = 0; t < 2; ++t) {
      const uint4 a = from.errors[t][lane];
      first[t] = {{a.x, a.y, a.z, a.w}};
    }
    const float2 scales = from.scales[lane / 4];
    first_scale[0] = scales.x;
    first_scale[1] = scales.y;
    for (int i = 0; i < 2; ++i) {
      scale[i] = fmaxf(scale[i], first_scale[i]);
      ratio[i] = first_scale[i] * block::inverse_power(scale[i]);
    }
    pack_errors(scale, e, own);
  }
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
    if (place.half == 0) to.updates[t][lane] = {own[t].a[0], own[t].a[1], own[t].a[2], own[t].a[3]};
  }
  ptx::named_barrier(place.barrier(2), 64);  // updates, for the other warp
  if (place.half == 1) {
    for (int t = 0; t < 2; ++t) {
      const uint4 a = from.updates[t][lane];
      first[t] = {{a.x, a.y, a.z, a.w}};
    }
  }
  multiply_triangle(unit, ChunkUnit::kScores, place.half, first, ratio, own, u);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    scale_columns(o[n], column_factors(unit, ChunkUnit::kReadQ, 4 * place.half + n));
    scale_columns(u[n], column_factors(unit, ChunkUnit::kRise, 4 * place.half + n));
#pragma unroll
    for (int i = 0; i < 4; ++i) o[n].c[i] = fmaf(scale[i / 2], u[n].c[i], o[n].c[i]);
  }
}

/// S^T K^T and S^T Q^T of the warp's own tokens.
template <class Element, int kDimK, int kTiles>
FLASHQLA_DEVICE void project_tokens(const typename AdvanceShared<kDimK, kTiles>::Stage& stage,
                                    Exchange<kDimK> (&exchange)[2 * kTiles], const LanePlace& place, const StatePart<kDimK>& part,
                                    tile::Accumulator (&sk)[4], tile::Accumulator (&sq)[4]) {
  using Rows = typename AdvanceShared<kDimK, kTiles>::Rows;
  const Rows keys{ptx::shared_address(stage.keys)}, queries{ptx::shared_address(stage.queries)};
  const bool precise = *reinterpret_cast<const float*>(stage.unit + ChunkUnit::kPrecise) != 0.0f;
  const int other = 1 - place.half;
  tile::FragmentA state[kDimK / 32];
  tile::clear(sk);
  tile::clear(sq);
  leave_state<Element>(exchange[place.own()], part, state);
  project<Element>(own_tokens(keys, place, place.half), state, sk);
  project<Element>(own_tokens(queries, place, place.half), state, sq);
  if (precise) {
    leave_rest<Element>(exchange[place.own()], part, state);
    project<Element>(own_tokens(keys, place, place.half), state, sk);
  }
  ptx::named_barrier(place.barrier(0), 64);  // the state, for the other warp
  load_fragments(exchange[place.other()].state, state);
  project<Element>(own_tokens(keys, place, other), state, sk);
  project<Element>(own_tokens(queries, place, other), state, sq);
  if (precise) {
    load_fragments(exchange[place.other()].rest, state);
    project<Element>(own_tokens(keys, place, other), state, sk);
  }
}

template <class Element, int kDimK, int kTiles>
FLASHQLA_DEVICE void advance_chunk(const ChunkForwardParams& p, const AdvanceWork& work, std::int64_t chunk,
                                   const typename AdvanceShared<kDimK, kTiles>::Stage& stage,
                                   Exchange<kDimK> (&exchange)[2 * kTiles], StatePart<kDimK>& part) {
  using Shared = AdvanceShared<kDimK, kTiles>;
  const LanePlace place = lane_place();
  const typename Shared::Rows keys{ptx::shared_address(stage.keys)};
  const typename Shared::Values values{ptx::shared_address(stage.values)};
  tile::Accumulator sk[4], o[4];
  project_tokens<Element, kDimK, kTiles>(stage, exchange, place, part, sk, o);
  float largest[2];
  take_errors<Element, Shared::kSlab>(values, stage.unit, place, sk, largest);
  tile::FragmentA left[2], rest[2];
  solve_tokens<Element>(stage.unit, exchange[place.other()].answer, exchange[place.own()].answer, place, largest, sk, o, left,
                        rest);

  const float total = *reinterpret_cast<const float*>(stage.unit + ChunkUnit::kTotal);
#pragma unroll
  for (tile::Accumulator& s : part.s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s.c[i] *= total;
  }
  const tile::BlockAddresses<kChunkTokens, kDimK> addresses =
      tile::from_column(tile::addresses_b_transposed(keys), place.half * (kDimK / 2));
  // In the order of the tokens, whichever warp has them: sums are made alike in all columns of K.
  if (place.half == 1) exchange_updates(exchange[place.own()].answer, left, rest);
  update_state<Element, kDimK>(addresses, 0, left, rest, part);
  exchange_updates(exchange[place.own()].answer, left, rest);
  update_state<Element, kDimK>(addresses, kHalfTokens, left, rest, part);
  store_output<Element>(p, work, place, chunk, exchange[place.own()].output, o);
}

template <class Element, int kDimK, int kTiles>
FLASHQLA_DEVICE void advance_sequence(const ChunkForwardParams& p, const AdvanceWork& work, std::int64_t read, std::int64_t write,
                                      AdvanceShared<kDimK, kTiles>& shared) {
  StatePart<kDimK> part;
  load_state<kDimK>(p, work, read, part);
  StateStore<kDimK> stored(p, work);
  const std::int64_t chunks = work.rows.chunks();
  constexpr int kThreads = AdvanceShared<kDimK, kTiles>::kThreads;
  const int stages = p.stages;
  StageLoader<Element, kDimK, kTiles> loader(p, work);
  if (chunks > 0) loader.load(p, work, 0, shared.stages[0]);
  ptx::cp_async_commit();
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    ptx::cp_async_wait<0>();
    // This chunk's stage is full, from all threads; and all have left the other stage, which is filled next.
    ptx::named_barrier(0, kThreads);
    if (stages > 1 && chunk + 1 < chunks) loader.load(p, work, chunk + 1, shared.stages[(chunk + 1) % 2]);
    ptx::cp_async_commit();
    stored.before(p, work, part);
    advance_chunk<Element, kDimK, kTiles>(p, work, chunk, shared.stages[stages > 1 ? chunk % 2 : 0], shared.exchange, part);
    if (stages == 1) {
      ptx::named_barrier(0, kThreads);  // all have left the only stage
      if (chunk + 1 < chunks) loader.load(p, work, chunk + 1, shared.stages[0]);
      ptx::cp_async_commit();
    }
    const bool whole = (work.rows.shift + work.rows.position(chunk) + work.rows.tokens(chunk)) % kChunkTokens == 0;
    stored.after(p, work, whole, part);
  }
  store_state<kDimK>(p, work, p.final_state, write, part);
}

template <class Element, int kDimK, int kTiles>
__global__ void __launch_bounds__(kTiles * 64) advance_states(const __grid_constant__ ChunkForwardParams p) {
  using Shared = AdvanceShared<kDimK, kTiles>;
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  const std::int64_t slabs = (p.dim_v + Shared::kSlab - 1) / Shared::kSlab, index = blockIdx.x;
  AdvanceWork work;
  work.first_v = static_cast<int>(index % slabs) * Shared::kSlab;
  work.head = static_cast<std::int32_t>(index / slabs % p.heads_v);
  work.head_qk = work.head / p.group;
  const std::int64_t turn = index / slabs / p.heads_v;
  work.sequence = p.sequences.order != nullptr ? p.sequences.order[turn] : turn;
  work.rows = sequence_rows(p.sequences, work.sequence);
  std::int64_t read = -1, write = -1;
  if (p.initial_state.data != nullptr) read = p.read.data != nullptr ? load_index(p.read, work.sequence) : work.sequence;
  if (p.final_state.data != nullptr) write = p.write.data != nullptr ? load_index(p.write, work.sequence) : work.sequence;
  if (p.read.data != nullptr && p.write.data != nullptr && read < 0 && write < 0) return zero_output<Shared::kSlab>(p, work);
  advance_sequence<Element, kDimK, kTiles>(p, work, read, write, shared);
}

}  // namespace flashqla::cuda
