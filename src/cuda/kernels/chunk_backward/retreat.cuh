// The part of chunk_backward that goes from chunk to chunk, backwards: the mirror image of advance_states, with the same division
// of work, units, roundings and exchanges (chunk_forward/{shared,advance}.cuh). With dS the gradient of the state after the
// chunk:
//
//   de^T = write_k o (dS^T K^T) + (rise o dO^T) scores         [V x 64]      dE^T = de^T solve        dV = strength o dE
//   dS^T = total dS^T - (read_k o dE^T) K + (read_q o dO^T) Q
//
// What scores and solve hold for a token, later tokens of its chunk contribute to, so that half 1 leaves de for half 0.
#pragma once

#include "cuda/kernels/chunk_backward/params.hpp"
#include "cuda/kernels/chunk_forward/advance_kernel.cuh"

namespace flashqla::cuda {

/// The block of a triangle as B[i][j].
FLASHQLA_DEVICE tile::FragmentB load_block_turned(const std::byte* unit, int triangle, int block_i, int block_j) {
  const tile::FragmentB b = load_block(unit, triangle, block_i, block_j);
  return {
      {ptx::movmatrix_trans(b.b[0]), ptx::movmatrix_trans(b.b[2]), ptx::movmatrix_trans(b.b[1]), ptx::movmatrix_trans(b.b[3])}};
}

/// c (4 accumulators, the own tokens) += other x triangle over the second half's tokens, times `ratio`; then += own x triangle.
FLASHQLA_DEVICE void multiply_triangle_turned(const std::byte* unit, int triangle, int half, const tile::FragmentA (&second)[2],
                                              const float (&ratio)[2], const tile::FragmentA (&own)[2],
                                              tile::Accumulator (&c)[4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) c[n] = {};
  if (half == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        tile::multiply<ptx::F16>(c[2 * j], c[2 * j + 1], second[i], load_block_turned(unit, triangle, 2 + i, j));
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) scale_rows(c[n], ratio);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      tile::multiply<ptx::F16>(c[2 * j], c[2 * j + 1], own[i], load_block_turned(unit, triangle, 2 * half + i, 2 * half + j));
    }
  }
}

/// dO^T of the warp's rows of V and half `half` of the tokens, times factors of the tokens.
template <class Element, int kSlab>
FLASHQLA_DEVICE void load_gradients(const tile::SharedTile<kChunkTokens, kSlab>& d_o, const std::byte* unit, int factors,
                                    const LanePlace& place, int half, tile::Accumulator (&x)[4]) {
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const tile::FragmentA d = tile::load_c_transposed(d_o, place.tile * kTileRows, half * kHalfTokens + 16 * t);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const float2 upper = ptx::unpack_pair<Element>(d.a[2 * side]), lower = ptx::unpack_pair<Element>(d.a[2 * side + 1]);
      x[2 * t + side] = {{upper.x, upper.y, lower.x, lower.y}};
      scale_columns(x[2 * t + side], column_factors(unit, factors, 4 * half + 2 * t + side));
    }
  }
}

/// (rise o dO^T) scores for the own tokens.
template <class Element, int kSlab>
FLASHQLA_DEVICE void take_scores(const tile::SharedTile<kChunkTokens, kSlab>& d_o, const std::byte* unit, const LanePlace& place,
                                 tile::Accumulator (&c)[4]) {
  tile::Accumulator x[4], late[4];
  float largest[2] = {0.0f, 0.0f};
  const float one[2] = {1.0f, 1.0f};
  load_gradients<Element>(d_o, unit, ChunkUnit::kRise, place, place.half, x);
  raise_to_rows(x, largest);
  tile::FragmentA own[2], second[2] = {};
  if (place.half == 0) {
    load_gradients<Element>(d_o, unit, ChunkUnit::kRise, place, 1, late);
    raise_to_rows(late, largest);
  }
  const float scale[2] = {block::power_above(largest[0]), block::power_above(largest[1])};
  if (place.half == 0) pack_errors(scale, late, second);
  pack_errors(scale, x, own);
  multiply_triangle_turned(unit, ChunkUnit::kScores, place.half, second, one, own, c);
#pragma unroll
  for (int n = 0; n < 4; ++n) scale_rows(c[n], scale);
}

/// dE of the own tokens from their de.
template <class Element, int kDimK>
FLASHQLA_DEVICE void solve_gradients(const std::byte* unit, Answer& to, Answer& from, const LanePlace& place,
                                     const StatePart<kDimK>& part, tile::Accumulator (&de)[4], tile::Accumulator (&d_e)[4]) {
  float largest[2] = {0.0f, 0.0f}, scale[2], ratio[2];
  raise_to_rows(de, largest);
  tile::FragmentA own[2], second[2] = {};
  const Reach reach = reach_of<Element>(unit, ChunkUnit::kLeastBack, ChunkUnit::kReadK, place, largest, de, part);
  share_errors<Element, 1>(to, from, place, reach, largest, de, scale, ratio, second, own);
  multiply_triangle_turned(unit, ChunkUnit::kSolve, place.half, second, ratio, own, d_e);
#pragma unroll
  for (int n = 0; n < 4; ++n) scale_rows(d_e[n], scale);
}

/// What the own tokens' dE change in dS, for both warps: -read_k o dE^T in two parts.
template <class Element>
FLASHQLA_DEVICE void leave_updates(const std::byte* unit, Answer& to, const LanePlace& place, const tile::Accumulator (&d_e)[4],
                                   tile::FragmentA (&left)[2], tile::FragmentA (&rest)[2]) {
  const int lane = tile::lane_id();
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    tile::Accumulator x[2] = {d_e[2 * t], d_e[2 * t + 1]};
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const float2 factors = column_factors(unit, ChunkUnit::kReadK, 4 * place.half + 2 * t + side);
      scale_columns(x[side], {-factors.x, -factors.y});
    }
    left[t] = tile::to_a<Element>(x[0], x[1]);
    rest[t] = tile::rest_of<Element>(x[0], x[1], left[t]);
    to.left[t][lane] = {left[t].a[0], left[t].a[1], left[t].a[2], left[t].a[3]};
    to.rest[t][lane] = {rest[t].a[0], rest[t].a[1], rest[t].a[2], rest[t].a[3]};
  }
}

/// dS^T += (read_q o dO^T) Q, in the order of the tokens.
template <class Element, int kDimK, int kTiles>
FLASHQLA_DEVICE void add_query_updates(const typename AdvanceShared<kDimK, kTiles>::Stage& stage, const LanePlace& place,
                                       StatePart<kDimK>& part) {
  using Shared = AdvanceShared<kDimK, kTiles>;
  const typename Shared::Rows queries{ptx::shared_address(stage.queries)};
  const typename Shared::Values d_o{ptx::shared_address(stage.values)};
  const tile::BlockAddresses<kChunkTokens, kDimK> addresses =
      tile::from_column(tile::addresses_b_transposed(queries), place.half * (kDimK / 2));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    tile::Accumulator x[4];
    load_gradients<Element>(d_o, stage.unit, ChunkUnit::kReadQ, place, half, x);
    tile::FragmentA left[2], rest[2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      left[t] = tile::to_a<Element>(x[2 * t], x[2 * t + 1]);
      rest[t] = tile::rest_of<Element>(x[2 * t], x[2 * t + 1], left[t]);
    }
    update_state<Element, kDimK>(addresses, half * kHalfTokens, left, rest, part);
  }
}

/// Transposed rows of the own tokens to a tensor of f32.
FLASHQLA_DEVICE void store_f32_rows(const ChunkBackwardParams& p, const AdvanceWork& work, const TokenTensor& out,
                                    const LanePlace& place, std::int64_t chunk, const tile::Accumulator (&x)[4]) {
  const int tokens = work.rows.tokens(chunk);
  const std::int64_t first = work.rows.begin + work.rows.position(chunk);
  for (int n = 0; n < 4; ++n) {
    for (int i = 0; i < 4; ++i) {
      const int token = place.half * kHalfTokens + 8 * n + place.column + i % 2;
      const int v = work.first_v + place.tile * kTileRows + place.row + i / 2 * 8;
      if (token >= tokens || v >= p.dim_v) continue;
      static_cast<float*>(out.data)[offset_of(out, work.rows.batch, first + token, work.head) + v] = x[n].c[i];
    }
  }
}

/// dE of the own tokens for the gradient products, and dV to the caller's rows. With growth dE is 2^h dV (HeadGates): what the
/// decays between tokens make of dV ranges less.
template <class Element>
FLASHQLA_DEVICE void store_value_gradients(const ChunkBackwardParams& p, const AdvanceWork& work, std::int64_t chunk,
                                           const LanePlace& place, const std::byte* unit, std::byte* memory,
                                           tile::Accumulator (&d_e)[4]) {
  float scale[2];
  tile::FragmentA rows[2];
  pack_rows(d_e, scale, rows);
  keep_rows(p.d_kept, p, work, chunk, place, rows, scale);
  if (p.d_v.data == nullptr) return;
#pragma unroll
  for (int n = 0; n < 4; ++n) scale_columns(d_e[n], column_factors(unit, ChunkUnit::kStrength, 4 * place.half + n));
  if (p.d_v.dtype == DType::f32) {
    store_f32_rows(p, work, p.d_v, place, chunk, d_e);
  } else {
    store_rows<Element>(p, work, p.d_v, place, chunk, memory, d_e);
  }
}

/// What a chunk that was walked token by token stores.
struct Retreat {
  using Params = ChunkBackwardParams;
  static constexpr bool kBack = true;
  template <class Element>
  static FLASHQLA_DEVICE void finish(const Params& p, const AdvanceWork& work, std::int64_t chunk, const LanePlace& place,
                                     const std::byte* unit, std::byte* memory, tile::Accumulator (&d_e)[4],
                                     const tile::Accumulator (&)[4]) {
    store_value_gradients<Element>(p, work, chunk, place, unit, memory, d_e);
  }
};

template <class Element, int kDimK, int kTiles>
FLASHQLA_DEVICE void retreat_chunk(const ChunkBackwardParams& p, const AdvanceWork& work, std::int64_t chunk,
                                   const typename AdvanceShared<kDimK, kTiles>::Stage& stage,
                                   Exchange<kDimK> (&exchange)[2 * kTiles], StatePart<kDimK>& part) {
  using Shared = AdvanceShared<kDimK, kTiles>;
  const LanePlace place = lane_place();
  const typename Shared::Values d_o{ptx::shared_address(stage.values)};
  tile::Accumulator de[4], d_e[4];
  project_tokens<Element, kDimK, kTiles, false>(stage, exchange, place, part, de, d_e);
  take_scores<Element, Shared::kSlab>(d_o, stage.unit, place, d_e);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    scale_columns(de[n], column_factors(stage.unit, ChunkUnit::kWriteK, 4 * place.half + n));
#pragma unroll
    for (int i = 0; i < 4; ++i) de[n].c[i] += d_e[n].c[i];
  }
  Answer& to = exchange[place.other()].answer;
  Answer& own = exchange[place.own()].answer;
  solve_gradients<Element>(stage.unit, to, own, place, part, de, d_e);
  tile::FragmentA left[2], rest[2];
  leave_updates<Element>(stage.unit, to, place, d_e, left, rest);
  ptx::named_barrier(place.barrier(2), 64);  // updates, for the other warp
  if (own.lost != 0) {
    return walk_chunk<Element, kDimK, kTiles, Retreat>(p, work, chunk, stage, exchange, part);
  }
  update_with_keys<Element, kDimK, kTiles>(stage, place, own, left, rest, part);
  add_query_updates<Element, kDimK, kTiles>(stage, place, part);
  store_value_gradients<Element>(p, work, chunk, place, stage.unit, exchange[place.own()].output, d_e);
}

template <class Element, int kDimK, int kTiles>
FLASHQLA_DEVICE void retreat_sequence(const ChunkBackwardParams& p, const AdvanceWork& work,
                                      AdvanceShared<kDimK, kTiles>& shared) {
  using Stage = typename AdvanceShared<kDimK, kTiles>::Stage;
  StatePart<kDimK> part;
  load_state<kDimK>(p, work, p.d_final_state, p.d_final_state.data != nullptr ? work.sequence : -1, part);
  walk_chunks<Element, kDimK, kTiles, -1>(p, work, p.d_o, shared, [&](std::int64_t chunk, const Stage& stage) {
    keep_state<kDimK>(p.d_kept, p, work, chunk, part);
    retreat_chunk<Element, kDimK, kTiles>(p, work, chunk, stage, shared.exchange, part);
  });
  if (p.d_initial_state.data != nullptr) store_state<kDimK>(p, work, p.d_initial_state, work.sequence, part);
}

/// Blocks with even numbers advance states, those with odd ones retreat: neither needs the other's.
template <class Element, int kDimK, int kTiles>
__global__ void __launch_bounds__(kTiles * 64) states_both_ways(const __grid_constant__ ChunkBackwardParams p) {
  using Shared = AdvanceShared<kDimK, kTiles>;
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  const AdvanceWork work = advance_work<Shared::kSlab>(p, blockIdx.x / 2);
  if (blockIdx.x % 2 == 0) {
    const std::int64_t read = p.initial_state.data != nullptr ? work.sequence : -1;
    advance_sequence<Element, kDimK, kTiles, true>(p, work, read, -1, shared);
  } else {
    retreat_sequence<Element, kDimK, kTiles>(p, work, shared);
  }
}

}  // namespace flashqla::cuda
