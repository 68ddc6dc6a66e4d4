// What f16 inputs need more digits of than kept states and rows have: sums over V in the gradients of the gates. A head's dg may
// be a few such sums, and by chance a small one of them; its bound is a quarter of that of bf16. So with f16 a block advances
// first and retreats afterwards (kKeepsRests): on the way back it has both sides of <S, dS> and k_t dS.e_t, S and e with what
// rounding left of them. That lies where dS and dV will; the lane that reads it is the one that wrote it and puts these there.
#pragma once

#include "cuda/kernels/chunk_backward/params.hpp"
#include "cuda/kernels/chunk_forward/kept.cuh"

namespace flashqla::cuda {

static_assert(kDots == kChunkTokens + kTeam);

FLASHQLA_DEVICE float* dots_of(const ChunkBackwardParams& p, std::int64_t unit, int tile_v) {
  return p.dots + (unit * (p.dim_v / 16) + tile_v) * kDots;
}

/// One pair of numbers: as they were kept, turned, and their rests.
FLASHQLA_DEVICE float2 kept_pair(std::uint32_t turned, std::uint32_t rests) {
  const float2 x = ptx::unpack_pair<ptx::F16>(ptx::movmatrix_trans(turned)), rest = ptx::unpack_pair<ptx::F16>(rests);
  return {fmaf(rest.x, 1.0f / kRestFactor, x.x), fmaf(rest.y, 1.0f / kRestFactor, x.y)};
}

FLASHQLA_DEVICE float power_of_log(std::int16_t log) { return __uint_as_float(static_cast<std::uint32_t>(log + 127) << 23); }

/// <S, dS> of the warp's part, dS after the chunk.
template <int kDimK>
FLASHQLA_DEVICE void dot_states(const ChunkBackwardParams& p, const AdvanceWork& work, std::int64_t chunk, const LanePlace& place,
                                const StatePart<kDimK>& part) {
  constexpr int kOwn = kDimK / 16 / kTeam;
  const int tiles_v = p.dim_v / 16, tiles_k = p.dim_k / 16, tile_v = work.first_v / kTileRows + place.tile;
  if (tile_v >= tiles_v) return;
  const std::int64_t unit = unit_number(p, work, chunk), first = unit * tiles_v + tile_v;
  float sum = 0.0f;
#pragma unroll
  for (int step = 0; step < kOwn; ++step) {
    const int tile_k = place.part * kOwn + step;
    if (tile_k >= tiles_k) break;
    const std::int64_t at = (first * tiles_k + tile_k) * 512 + tile::lane_id() * 16;
    const uint4 turned = *reinterpret_cast<const uint4*>(p.kept.states + at),
                rests = *reinterpret_cast<const uint4*>(p.kept.state_rests + at);
    const auto add = [&](std::uint32_t s, std::uint32_t rest, const float* d_s) {
      const float2 x = kept_pair(s, rest);
      sum = fmaf(x.x, d_s[0], fmaf(x.y, d_s[1], sum));
    };
    const float(&left)[4] = part.s[2 * step].c, (&right)[4] = part.s[2 * step + 1].c;
    add(turned.x, rests.x, left);
    add(turned.y, rests.y, left + 2);
    add(turned.z, rests.z, right);
    add(turned.w, rests.w, right + 2);
  }
  sum = block::warp_total(sum) * power_of_log(p.kept.state_powers[kTeam * first + place.part]);
  if (tile::lane_id() == 0) dots_of(p, unit, tile_v)[kChunkTokens + place.part] = sum;
}

/// A lane's e of the warp's tokens and rows of V, as it was kept.
struct KeptErrors {
  uint4 turned, rests;
  std::int16_t log;
};
FLASHQLA_DEVICE KeptErrors load_errors(const ChunkBackwardParams& p, const AdvanceWork& work, std::int64_t chunk,
                                       const LanePlace& place) {
  const int tiles_v = p.dim_v / 16, tile_v = work.first_v / kTileRows + place.tile, lane = tile::lane_id();
  if (tile_v >= tiles_v) return {};
  const std::int64_t block = (unit_number(p, work, chunk) * kTeam + place.part) * tiles_v + tile_v;
  return {*reinterpret_cast<const uint4*>(p.kept.rows + block * 512 + lane * 16),
          *reinterpret_cast<const uint4*>(p.kept.row_rests + block * 512 + lane * 16), p.kept.row_powers[block]};
}

/// k_t dS.e_t of the warp's tokens over its rows of V, without the key's factor; `projected` is dS^T K^T.
FLASHQLA_DEVICE void dot_rows(const ChunkBackwardParams& p, const AdvanceWork& work, std::int64_t chunk, const LanePlace& place,
                              const KeptErrors& errors, const tile::Accumulator (&projected)[2]) {
  const int tile_v = work.first_v / kTileRows + place.tile;
  if (tile_v >= p.dim_v / 16) return;
  const uint4 &turned = errors.turned, &rests = errors.rests;
  // Rows g and g + 8 of both accumulators; keep_rows has put the pairs in another order.
  const float2 e[2][2] = {{kept_pair(turned.x, rests.x), kept_pair(turned.z, rests.y)},
                          {kept_pair(turned.y, rests.z), kept_pair(turned.w, rests.w)}};
  const float power = power_of_log(errors.log);
  float sums[4];  // of the lane's tokens
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float(&x)[4] = projected[n].c;
    sums[2 * n] = fmaf(x[0] * power, e[n][0].x, x[2] * power * e[n][1].x);
    sums[2 * n + 1] = fmaf(x[1] * power, e[n][0].y, x[3] * power * e[n][1].y);
  }
#pragma unroll
  for (float& sum : sums) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  }
  if (place.row >= 2) return;
  float* const to = dots_of(p, unit_number(p, work, chunk), tile_v) + place.part * kPartTokens + 8 * place.row + place.column;
  *reinterpret_cast<float2*>(to) = place.row == 0 ? float2{sums[0], sums[1]} : float2{sums[2], sums[3]};
}

/// The sum over all of V of token `token`.
FLASHQLA_DEVICE float row_dot(const ChunkBackwardParams& p, std::int64_t unit, int token) {
  float sum = 0.0f;
#pragma unroll 4
  for (int tile_v = 0; tile_v < p.dim_v / 16; ++tile_v) sum += dots_of(p, unit, tile_v)[token];
  return sum;
}
/// <S, dS> over all of V, in all lanes of a warp.
FLASHQLA_DEVICE float state_dot(const ChunkBackwardParams& p, std::int64_t unit) {
  float sum = 0.0f;
  for (int at = tile::lane_id(); at < p.dim_v / 16 * kTeam; at += 32) {
    sum += dots_of(p, unit, at / kTeam)[kChunkTokens + at % kTeam];
  }
  return block::warp_total(sum);
}

}  // namespace flashqla::cuda
