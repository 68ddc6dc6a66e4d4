// Products of chunk_gradients, all of f16 operands with f32 sums.
#pragma once

#include "cuda/kernels/chunk_backward/gradient_stages.cuh"

namespace flashqla::cuda {

/// Sums of one value head over V: the warp's tokens by its quarter of K, and by its 32 tokens.
template <int kDimK>
struct HeadProducts {
  static constexpr int kCount = GradientShared<kDimK>::kColumns / 8;
  tile::Accumulator query[kCount], key[kCount], write[kCount];  // dO S^T, dV S^T, e dS^T
  tile::Accumulator pairs[4];                                   // dO e^T or dV e^T
  float state_dot;                                              // the lane's part of <S, dS>
};

/// What the warp's left operands are multiplied by in a tile of V: powers of both operands, divided by the largest such product
/// of the head's tiles. A lane has those of the tile of its number, as f16; log: of the largest.
struct Multipliers {
  std::uint32_t query_key, pairs, write;  // two of them; pairs: of both blocks of 16 tokens
  int query_log, key_log, pairs_log[2], write_log;
};
FLASHQLA_DEVICE Multipliers find_multipliers(const ValueHead& head, const GradientPlace& place) {
  const int t = tile::lane_id() % kMostTilesOfV;
  const auto of = [&](int kind, int part) -> int { return head.logs[kind + part][t]; };
  const int d_v = of(KeptLogs::kDV, place.tile), s = of(KeptLogs::kStates, place.group), left = place.gram() ? d_v : 0;
  const int j = 2 * place.column_half();
  const int logs[5] = {s, d_v + s, left + of(KeptLogs::kErrors, j), left + of(KeptLogs::kErrors, j + 1),
                       of(KeptLogs::kErrors, place.tile) + of(KeptLogs::kDStates, place.group)};
  int most[5];
  std::uint32_t powers[5];
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    most[i] = logs[i];
#pragma unroll
    for (int step = 8; step > 0; step /= 2) most[i] = max(most[i], __shfl_xor_sync(0xffffffffu, most[i], step));
    powers[i] = half_powers(logs[i] - most[i]);
  }
  const auto both = [](std::uint32_t x, std::uint32_t y) { return (x & 0xffffu) | (y & 0xffff0000u); };
  return {both(powers[0], powers[1]), both(powers[2], powers[3]), powers[4], most[0], most[1], {most[2], most[3]}, most[4]};
}

FLASHQLA_DEVICE tile::FragmentA times_power(const tile::FragmentA& a, std::uint32_t powers) {
  return {{ptx::multiply_f16_pairs(a.a[0], powers), ptx::multiply_f16_pairs(a.a[1], powers),
           ptx::multiply_f16_pairs(a.a[2], powers), ptx::multiply_f16_pairs(a.a[3], powers)}};
}
/// The lower or upper half of x in both halves.
FLASHQLA_DEVICE std::uint32_t both_halves(std::uint32_t x, int half) {
  return half == 0 ? x << 16 | (x & 0xffffu) : x >> 16 | (x & 0xffff0000u);
}

FLASHQLA_DEVICE tile::FragmentA stored_a(const uint4 (&block)[32]) {
  const uint4 a = block[tile::lane_id()];
  return {{a.x, a.y, a.z, a.w}};
}
FLASHQLA_DEVICE tile::FragmentB stored_b(const uint4 (&block)[32]) {
  const uint4 b = block[tile::lane_id()];
  return {{b.x, b.y, b.z, b.w}};
}
/// A stored left operand [n][k] as the right operand B[k][n].
FLASHQLA_DEVICE tile::FragmentB stored_as_b(const uint4 (&block)[32]) {
  const uint4 a = block[tile::lane_id()];
  return {{a.x, a.z, a.y, a.w}};
}
/// Rows of dO as f16, divided by their powers.
template <class Element>
FLASHQLA_DEVICE void divide_rows(tile::FragmentA& a, const float (&inverse)[2]) {
  if constexpr (!std::is_same_v<Element, ptx::F16>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = ptx::unpack_pair<Element>(a.a[i]);
      a.a[i] = ptx::pack_pair<ptx::F16>(x.x * inverse[i % 2], x.y * inverse[i % 2]);
    }
  }
}

FLASHQLA_DEVICE float dot_of_pairs(std::uint32_t x, std::uint32_t y) {
  const float2 a = ptx::unpack_pair<ptx::F16>(x), b = ptx::unpack_pair<ptx::F16>(y);
  return fmaf(a.x, b.x, a.y * b.y);
}

FLASHQLA_DEVICE std::uint32_t one_of(const std::uint32_t (&x)[4], int number) {
  const std::uint32_t low = number % 2 == 0 ? x[0] : x[1], high = number % 2 == 0 ? x[2] : x[3];
  return number < 2 ? low : high;
}

/// Adds tile `t` of V to the sums. `inverse`: of the powers of the lane's rows of dO.
template <class Element, int kDimK>
FLASHQLA_DEVICE void multiply_tile(const typename GradientShared<kDimK>::Stage& stage, const GradientPlace& place,
                                   const float (&inverse)[2], const Multipliers& multipliers, const ValueHead& head, int t,
                                   HeadProducts<kDimK>& sums) {
  using Shared = GradientShared<kDimK>;
  const std::uint32_t query_key = __shfl_sync(0xffffffffu, multipliers.query_key, t),
                      pairs = __shfl_sync(0xffffffffu, multipliers.pairs, t),
                      write_power = __shfl_sync(0xffffffffu, multipliers.write, t);
  tile::FragmentA a_o = tile::load_a(typename Shared::Slab{ptx::shared_address(stage.d_o)}, 16 * place.tile, 0);
  divide_rows<Element>(a_o, inverse);
  const tile::FragmentA a_v = stored_a(stage.d_v[place.tile]), a_e = stored_a(stage.errors[place.tile]);
  const tile::FragmentA& left = place.gram() ? a_v : a_o;
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    if (block >= place.pair_blocks()) break;
    tile::multiply<ptx::F16>(sums.pairs[2 * block], sums.pairs[2 * block + 1], times_power(left, both_halves(pairs, block)),
                             stored_as_b(stage.errors[2 * place.column_half() + block]));
  }
  const tile::FragmentA query = times_power(a_o, both_halves(query_key, 0)), key = times_power(a_v, both_halves(query_key, 1)),
                        write = times_power(a_e, write_power);
  // The warps of a quarter of K share the elements of S and dS: a quarter of each lane's for a warp.
  constexpr int kBlocks = Shared::kColumns / 16;
  std::uint32_t own_s[kBlocks], own_d_s[kBlocks];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const int of_k = place.group * kBlocks + block;
    const tile::FragmentB s = stored_b(stage.states[0][of_k]), d_s = stored_b(stage.states[1][of_k]);
    tile::multiply<ptx::F16>(sums.query[2 * block], sums.query[2 * block + 1], query, s);
    tile::multiply<ptx::F16>(sums.key[2 * block], sums.key[2 * block + 1], key, s);
    tile::multiply<ptx::F16>(sums.write[2 * block], sums.write[2 * block + 1], write, d_s);
    if constexpr (!kKeepsRests<Element>) {
      own_s[block] = one_of(s.b, place.tile);
      own_d_s[block] = one_of(d_s.b, place.tile);
    }
  }
  if constexpr (!kKeepsRests<Element>) {  // else the way back has left <S, dS>
    float dot = 0.0f;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) dot += dot_of_pairs(own_s[block], own_d_s[block]);
    const int log = head.logs[KeptLogs::kStates + place.group][t] + head.logs[KeptLogs::kDStates + place.group][t];
    sums.state_dot += times(dot, two_powers(log));
  }
}

/// Q K^T or K K^T of the warp's tokens and its 32 columns, without factors.
template <int kDimK>
FLASHQLA_DEVICE void multiply_rows(const GradientShared<kDimK>& shared, const GradientPlace& place, tile::Accumulator (&c)[4]) {
  using Rows = typename GradientShared<kDimK>::Rows;
  const Rows keys{ptx::shared_address(shared.rows[0])}, left{ptx::shared_address(shared.rows[place.gram() ? 0 : 1])};
  tile::clear(c);
  if (place.pair_blocks() <= 0) return;
#pragma unroll 2
  for (int k = 0; k < kDimK; k += 16) {
    const tile::FragmentA a = tile::load_a(left, 16 * place.tile, k);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int of_j = 2 * place.column_half() + block;
      if (of_j > place.tile) break;
      tile::multiply<ptx::F16>(c[2 * block], c[2 * block + 1], a, tile::load_b(keys, 16 * of_j, k));
    }
  }
}

FLASHQLA_DEVICE int triangle_block(int i, int j) { return i * (i + 1) / 2 + j; }

/// c (the warp's quarter of K) += rows `tile` of the triangle times the rows up to them, or (kColumnsOfIt, of a turned one) its
/// columns `tile` times the rows from them on.
template <int kDimK, bool kColumnsOfIt>
FLASHQLA_DEVICE void multiply_triangle_rows(const uint4 (&triangle)[10][32], const std::byte* rows, const GradientPlace& place,
                                            tile::Accumulator (&c)[HeadProducts<kDimK>::kCount]) {
  using Shared = GradientShared<kDimK>;
  const typename Shared::Rows right{ptx::shared_address(rows)};
#pragma unroll 1
  for (int other = kColumnsOfIt ? place.tile : 0; other < (kColumnsOfIt ? kTokenTiles : place.tile + 1); ++other) {
    const int number = kColumnsOfIt ? triangle_block(other, place.tile) : triangle_block(place.tile, other);
    const tile::FragmentA a = stored_a(triangle[number]);
#pragma unroll
    for (int block = 0; block < Shared::kColumns / 16; ++block) {
      const tile::FragmentB b = tile::load_b_transposed(right, 16 * other, place.group * Shared::kColumns + 16 * block);
      tile::multiply<ptx::F16>(c[2 * block], c[2 * block + 1], a, b);
    }
  }
}

}  // namespace flashqla::cuda
