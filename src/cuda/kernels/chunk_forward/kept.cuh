// Writes what chunk_backward wants of a chunk (KeptChunks).
#pragma once

#include "cuda/block/gates.cuh"
#include "cuda/kernels/chunk_forward/states.cuh"

namespace flashqla::cuda {

FLASHQLA_DEVICE std::int16_t power_log(float power) {
  return static_cast<std::int16_t>(static_cast<int>(__float_as_uint(power) >> 23) - 127);
}

/// Number of the block's chunk and head in arrays [chunk][Hv].
FLASHQLA_DEVICE std::int64_t unit_number(const OperationParams& p, const AdvanceWork& work, std::int64_t chunk) {
  return (work.rows.first_chunk + chunk) * p.heads_v + work.head;
}

/// The warp's part of S^T.
template <int kDimK>
__device__ __noinline__ void keep_state(const KeptChunks& kept, const OperationParams& p, const AdvanceWork& work,
                                        std::int64_t chunk, StatePart<kDimK> part) {
  const LanePlace place = lane_place();
  const int tiles_v = p.dim_v / 16, tiles_k = p.dim_k / 16, tile_v = work.first_v / kTileRows + place.tile;
  float largest = 0.0f;
#pragma unroll
  for (const tile::Accumulator& s : part.s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(s.c[i]));
  }
  const float power = block::power_above(block::warp_largest(largest)), inverse = block::inverse_power(power);
  if (tile_v >= tiles_v) return;
  const std::int64_t first = unit_number(p, work, chunk) * tiles_v + tile_v;
  if (tile::lane_id() == 0) kept.state_powers[2 * first + place.half] = power_log(power);
#pragma unroll
  for (int step = 0; step < kDimK / 32; ++step) {
    const int tile_k = place.half * (kDimK / 32) + step;
    if (tile_k >= tiles_k) break;
    const float(&left)[4] = part.s[2 * step].c, (&right)[4] = part.s[2 * step + 1].c;
    const auto turned = [&](float low, float high) {
      return ptx::movmatrix_trans(ptx::pack_pair<ptx::F16>(low * inverse, high * inverse));
    };
    const uint4 fragment = {turned(left[0], left[1]), turned(left[2], left[3]), turned(right[0], right[1]),
                            turned(right[2], right[3])};
    *reinterpret_cast<uint4*>(kept.states + (first * tiles_k + tile_k) * 512 + tile::lane_id() * 16) = fragment;
  }
}

/// The warp's 16 rows of V by 32 tokens, as left operands [V x tokens] that have been divided by `scale`.
FLASHQLA_DEVICE void keep_rows(const KeptChunks& kept, const OperationParams& p, const AdvanceWork& work, std::int64_t chunk,
                               const LanePlace& place, const tile::FragmentA (&rows)[2], const float (&scale)[2]) {
  const int tiles_v = p.dim_v / 16, tile_v = work.first_v / kTileRows + place.tile, lane = tile::lane_id();
  if (tile_v >= tiles_v) return;
  const std::int64_t unit = unit_number(p, work, chunk);
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const std::uint32_t(&a)[4] = rows[t].a;
    const uint4 fragment = {ptx::movmatrix_trans(a[0]), ptx::movmatrix_trans(a[2]), ptx::movmatrix_trans(a[1]),
                            ptx::movmatrix_trans(a[3])};
    const std::int64_t block = (unit * 4 + 2 * place.half + t) * tiles_v + tile_v;
    *reinterpret_cast<uint4*>(kept.rows + block * 512 + lane * 16) = fragment;
  }
  if (lane % 4 != 0) return;
  std::int16_t* const powers = kept.row_powers + (unit * 2 + place.half) * p.dim_v + tile_v * kTileRows + lane / 4;
  powers[0] = power_log(scale[0]);
  powers[8] = power_log(scale[1]);
}

}  // namespace flashqla::cuda
