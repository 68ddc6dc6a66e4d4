// Writes what chunk_backward wants of a chunk (KeptChunks).
#pragma once

#include <type_traits>

#include "cuda/block/gates.cuh"
#include "cuda/kernels/chunk_forward/states.cuh"

namespace flashqla::cuda {

FLASHQLA_DEVICE std::int16_t power_log(float power) {
  return static_cast<std::int16_t>(static_cast<int>(__float_as_uint(power) >> 23) - 127);
}

/// 2^log as two f16, log <= 0; 0 below their range.
FLASHQLA_DEVICE std::uint32_t half_powers(int log) {
  const int bits = log >= -14 ? (log + 15) << 10 : log >= -24 ? 1 << (log + 24) : 0;
  return static_cast<std::uint32_t>(bits) * 0x10001u;
}

/// Number of the block's chunk and head in arrays [chunk][Hv].
FLASHQLA_DEVICE std::int64_t unit_number(const OperationParams& p, const AdvanceWork& work, std::int64_t chunk) {
  return (work.rows.first_chunk + chunk) * p.heads_v + work.head;
}

/// Whether what rounding leaves of kept states and errors is kept, too: chunk_backward/dots.cuh says why.
template <class Element>
inline constexpr bool kKeepsRests = std::is_same_v<Element, ptx::F16>;

/// 2^11 times what rounding a pair of numbers to f16 left.
inline constexpr float kRestFactor = 0x1p11f;
FLASHQLA_DEVICE std::uint32_t rest_of_pair(float x, float y, std::uint32_t rounded) {
  const float2 r = ptx::unpack_pair<ptx::F16>(rounded);
  return ptx::pack_pair<ptx::F16>((x - r.x) * kRestFactor, (y - r.y) * kRestFactor);
}

/// The warp's part of S^T; kRests: with what rounding leaves.
template <bool kRests, int kDimK>
FLASHQLA_DEVICE void keep_state(const KeptChunks& kept, const OperationParams& p, const AdvanceWork& work, std::int64_t chunk,
                                const LanePlace& place, const StatePart<kDimK>& part) {
  constexpr int kOwn = kDimK / 16 / kTeam;
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
  if (tile::lane_id() == 0) kept.state_powers[kTeam * first + place.part] = power_log(power);
#pragma unroll
  for (int step = 0; step < kOwn; ++step) {
    const int tile_k = place.part * kOwn + step;
    if (tile_k >= tiles_k) break;
    const std::int64_t at = (first * tiles_k + tile_k) * 512 + tile::lane_id() * 16;
    std::uint32_t turned[4], rests[4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float* const two = part.s[2 * step + pair / 2].c + pair % 2 * 2;
      const float low = two[0] * inverse, high = two[1] * inverse;
      const std::uint32_t rounded = ptx::pack_pair<ptx::F16>(low, high);
      turned[pair] = ptx::movmatrix_trans(rounded);
      if constexpr (kRests) rests[pair] = rest_of_pair(low, high, rounded);
    }
    *reinterpret_cast<uint4*>(kept.states + at) = {turned[0], turned[1], turned[2], turned[3]};
    if constexpr (kRests) *reinterpret_cast<uint4*>(kept.state_rests + at) = {rests[0], rests[1], rests[2], rests[3]};
  }
}

/// Where kept rows come from. A chunk that was walked (tokens.cuh) may have tokens that are 2^100 of others: with bf16 inputs the
/// logarithm says that it was, and whether its 16 tokens are bf16 without a power. f16 has no room for gradients of such a range.
enum class RowsFrom : std::uint8_t { products, walk };
inline constexpr int kWalkedLog = 1024, kWideLog = 2 * kWalkedLog;
struct RowLog {
  int log;
  bool walked, wide;
};
FLASHQLA_DEVICE RowLog row_log(int log) {
  const bool walked = log > kWalkedLog / 2, wide = log > kWalkedLog * 3 / 2;
  return {log - (wide ? kWideLog : walked ? kWalkedLog : 0), walked, wide};
}
inline constexpr float kLeastOfTokens = 0x1p-12f;

/// The largest of the token that has least of 16, in 16 rows of V: those without anything do not count.
FLASHQLA_DEVICE float least_token(const tile::Accumulator (&x)[2]) {
  float least = 0x1.fffffep127f;
#pragma unroll
  for (int at = 0; at < 4; ++at) {
    const tile::Accumulator& half = x[at / 2];
    float largest = fmaxf(fabsf(half.c[at % 2]), fabsf(half.c[2 + at % 2]));
#pragma unroll
    for (int step = 4; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    if (largest > 0.0f) least = fminf(least, largest);
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) least = fminf(least, __shfl_xor_sync(0xffffffffu, least, step));
  return least;
}

/// The warp's 16 rows of V by 16 tokens. kRests: with what rounding leaves of them.
template <class Element, bool kRests, RowsFrom kFrom>
FLASHQLA_DEVICE void keep_rows(const KeptChunks& kept, const OperationParams& p, const AdvanceWork& work, std::int64_t chunk,
                               const LanePlace& place, const tile::Accumulator (&x)[2]) {
  constexpr bool kMayBeWide = kFrom == RowsFrom::walk && !std::is_same_v<Element, ptx::F16>;
  const int tiles_v = p.dim_v / 16, tile_v = work.first_v / kTileRows + place.tile, lane = tile::lane_id();
  float largest = 0.0f;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(x[n].c[i]));
  }
  float power = block::power_above(block::warp_largest_positive(largest));
  bool wide = false;
  if constexpr (kMayBeWide) {
    wide = least_token(x) < kLeastOfTokens * power;
    if (wide) power = 1.0f;
  }
  const float inverse = block::inverse_power(power);
  if (tile_v >= tiles_v) return;
  const std::int64_t block = (unit_number(p, work, chunk) * kTeam + place.part) * tiles_v + tile_v;
  std::uint32_t a[4], rests[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* const two = x[i / 2].c + i % 2 * 2;
    std::uint32_t rounded = ptx::pack_pair<ptx::F16>(two[0] * inverse, two[1] * inverse);
    if constexpr (kMayBeWide) {
      if (wide) rounded = ptx::pack_pair<Element>(two[0], two[1]);
    }
    a[i] = ptx::movmatrix_trans(rounded);
    if constexpr (kRests) rests[i] = rest_of_pair(two[0] * inverse, two[1] * inverse, rounded);
  }
  *reinterpret_cast<uint4*>(kept.rows + block * 512 + lane * 16) = {a[0], a[2], a[1], a[3]};
  if constexpr (kRests) {
    *reinterpret_cast<uint4*>(kept.row_rests + block * 512 + lane * 16) = {rests[0], rests[1], rests[2], rests[3]};
  }
  const int flag = kMayBeWide ? (wide ? kWideLog : kWalkedLog) : 0;
  if (lane == 0) kept.row_powers[block] = static_cast<std::int16_t>(power_log(power) + flag);
}

}  // namespace flashqla::cuda
