// What f16 inputs need more digits of than their kept rows and states have: sums over V of which the gradients of the gates
// consist. A head's dg may be a few such sums, and by chance a small one; its bound is a quarter of that of bf16. So with f16 a
// block advances first and retreats afterwards, and has both sides in f32 (KeptChunks::state_rests).
#pragma once

#include "cuda/kernels/chunk_backward/params.hpp"
#include "cuda/kernels/chunk_forward/kept.cuh"

namespace flashqla::cuda {

inline constexpr int kDots = kChunkTokens + 2;  // of 16 rows of V: a token's k dS.e, and <S, dS> of both halves of K

FLASHQLA_DEVICE float* dots_of(const ChunkBackwardParams& p, std::int64_t unit, int tile_v) {
  return p.dots + (unit * (p.dim_v / 16) + tile_v) * kDots;
}

/// The numbers of two accumulators that have been kept with their rests.
FLASHQLA_DEVICE void load_kept(const std::byte* rounded, const std::byte* rests, std::int64_t at, bool of_rows,
                               tile::Accumulator& left, tile::Accumulator& right) {
  const uint4 turned = *reinterpret_cast<const uint4*>(rounded + at), rest = *reinterpret_cast<const uint4*>(rests + at);
  const auto pair = [](std::uint32_t x, std::uint32_t y, float& first, float& second) {
    const float2 a = ptx::unpack_pair<ptx::F16>(ptx::movmatrix_trans(x)), b = ptx::unpack_pair<ptx::F16>(y);
    first = fmaf(b.x, 1.0f / kRestFactor, a.x);
    second = fmaf(b.y, 1.0f / kRestFactor, a.y);
  };
  pair(turned.x, rest.x, left.c[0], left.c[1]);
  pair(of_rows ? turned.z : turned.y, rest.y, left.c[2], left.c[3]);  // keep_rows, keep_state
  pair(of_rows ? turned.y : turned.z, rest.z, right.c[0], right.c[1]);
  pair(turned.w, rest.w, right.c[2], right.c[3]);
}

FLASHQLA_DEVICE float power_of_log(std::int16_t log) { return __uint_as_float(static_cast<std::uint32_t>(log + 127) << 23); }

/// <S, dS> of the warp's part, dS after the chunk.
template <int kDimK>
__device__ __noinline__ void dot_states(const ChunkBackwardParams& p, const AdvanceWork& work, std::int64_t chunk,
                                        StatePart<kDimK> part) {
  const LanePlace place = lane_place();
  const int tiles_v = p.dim_v / 16, tiles_k = p.dim_k / 16, tile_v = work.first_v / kTileRows + place.tile;
  if (tile_v >= tiles_v) return;
  const std::int64_t unit = unit_number(p, work, chunk), first = unit * tiles_v + tile_v;
  float sum = 0.0f;
#pragma unroll
  for (int step = 0; step < kDimK / 32; ++step) {
    const int tile_k = place.half * (kDimK / 32) + step;
    if (tile_k >= tiles_k) break;
    tile::Accumulator s[2];
    load_kept(p.kept.states, p.kept.state_rests, (first * tiles_k + tile_k) * 512 + tile::lane_id() * 16, false, s[0], s[1]);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(s[i / 4].c[i % 4], part.s[2 * step + i / 4].c[i % 4], sum);
  }
  sum = block::warp_total(sum);
  const float power = power_of_log(p.kept.state_powers[2 * first + place.half]);
  if (tile::lane_id() == 0) dots_of(p, unit, tile_v)[kChunkTokens + place.half] = sum * power;
}

/// k_t dS.e_t of the warp's tokens over its rows of V; `projected` is dS^T K^T.
FLASHQLA_DEVICE void dot_rows(const ChunkBackwardParams& p, const AdvanceWork& work, std::int64_t chunk, const LanePlace& place,
                              const tile::Accumulator (&projected)[4]) {
  const int tiles_v = p.dim_v / 16, tile_v = work.first_v / kTileRows + place.tile, lane = tile::lane_id();
  if (tile_v >= tiles_v) return;
  const std::int64_t unit = unit_number(p, work, chunk);
  const std::int16_t* const powers = p.kept.row_powers + (unit * 2 + place.half) * p.dim_v + tile_v * kTileRows + place.row;
  const float power[2] = {power_of_log(powers[0]), power_of_log(powers[8])};
  float sums[8];  // two tokens of each accumulator
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    tile::Accumulator e[2];
    const std::int64_t block = (unit * 4 + 2 * place.half + t) * tiles_v + tile_v;
    load_kept(p.kept.rows, p.kept.row_rests, block * 512 + lane * 16, true, e[0], e[1]);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float(&x)[4] = projected[2 * t + n].c, (&y)[4] = e[n].c;
      sums[4 * t + 2 * n] = power[0] * x[0] * y[0] + power[1] * x[2] * y[2];
      sums[4 * t + 2 * n + 1] = power[0] * x[1] * y[1] + power[1] * x[3] * y[3];
    }
  }
  int number = 0;  // which of them the lane ends with
#pragma unroll
  for (int half = 4, step = 16; half > 0; half /= 2, step /= 2) {
    const bool upper = (lane & step) != 0;
    if (upper) number += half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = upper ? sums[i + half] : sums[i], given = upper ? sums[i] : sums[i + half];
      sums[i] = kept + __shfl_xor_sync(0xffffffffu, given, step);
    }
  }
  const int token = place.half * kHalfTokens + 8 * (number / 2) + place.column + number % 2;
  dots_of(p, unit, tile_v)[token] = sums[0];
}

/// The sums over all of V: of token `token`, and of the states.
FLASHQLA_DEVICE float row_dot(const ChunkBackwardParams& p, std::int64_t unit, int token) {
  float sum = 0.0f;
  for (int tile_v = 0; tile_v < p.dim_v / 16; ++tile_v) sum += dots_of(p, unit, tile_v)[token];
  return sum;
}
FLASHQLA_DEVICE float state_dot(const ChunkBackwardParams& p, std::int64_t unit) {
  return row_dot(p, unit, kChunkTokens) + row_dot(p, unit, kChunkTokens + 1);
}

}  // namespace flashqla::cuda
