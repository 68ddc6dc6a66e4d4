// Products of chunk_gradients, all of f16 operands with f32 sums.
#pragma once

#include "cuda/kernels/chunk_backward/gradient_rows.cuh"

namespace flashqla::cuda {

/// Sums of one value head over V: the warp's tokens by its quarter of K, and by its 32 tokens.
template <int kDimK>
struct HeadProducts {
  static constexpr int kCount = GradientShared<kDimK>::kColumns / 8;
  tile::Accumulator query[kCount], key[kCount], write[kCount];  // dO S^T, dV S^T, e dS^T
  tile::Accumulator pairs[4];                                   // dO e^T or dV e^T
  float state_dot;                                              // the lane's part of <S, dS>
};

/// Columns of a left operand times the multipliers of a kind.
FLASHQLA_DEVICE tile::FragmentA times_columns(const tile::FragmentA& a, const std::uint16_t* multipliers) {
  const std::uint32_t low = *reinterpret_cast<const std::uint32_t*>(multipliers),
                      high = *reinterpret_cast<const std::uint32_t*>(multipliers + 8);
  return {{ptx::multiply_f16_pairs(a.a[0], low), ptx::multiply_f16_pairs(a.a[1], low), ptx::multiply_f16_pairs(a.a[2], high),
           ptx::multiply_f16_pairs(a.a[3], high)}};
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

/// Adds the slab of V in stage `number` to the sums: `columns` of V from `first_v` on, whole tiles.
template <class Element, int kDimK>
FLASHQLA_DEVICE void multiply_slab(const GradientShared<kDimK>& shared, int number, int first_v, int columns,
                                   const GradientPlace& place, const float (&inverse)[2], HeadProducts<kDimK>& sums) {
  using Shared = GradientShared<kDimK>;
  const typename Shared::Stage& stage = shared.stages[number];
  const typename Shared::Slab d_o{ptx::shared_address(stage.d_o)};
  const int ih = place.row_half(), kh = place.half_of_k(), jh = place.column_half();
#pragma unroll 1
  for (int t = 0; t < Shared::kSlabTiles && 16 * t < columns; ++t) {
    const int of_v = first_v / 16 + t;
    const auto multipliers = [&](int kind) { return &shared.multipliers[number][kind][16 * t + place.pair]; };
    tile::FragmentA a_o = tile::load_a(d_o, 16 * place.tile, 16 * t);
    divide_rows<Element>(a_o, inverse);
    const tile::FragmentA a_v = stored_a(stage.d_v[place.tile][t]);
    if (place.has_pairs()) {
      const tile::FragmentA left = place.gram() ? times_columns(a_v, multipliers(Multiplier::kGram + 2 * ih + jh))
                                                : times_columns(a_o, multipliers(Multiplier::kScores + jh));
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        if (2 * jh + block > place.tile) break;
        tile::multiply<ptx::F16>(sums.pairs[2 * block], sums.pairs[2 * block + 1], left,
                                 stored_as_b(stage.errors[2 * jh + block][t]));
      }
    }
    const tile::FragmentA query = times_columns(a_o, multipliers(Multiplier::kState + kh)),
                          key = times_columns(a_v, multipliers(Multiplier::kValues + 2 * ih + kh)),
                          write = times_columns(stored_a(stage.errors[place.tile][t]),
                                                multipliers(Multiplier::kErrors + 2 * ih + kh));
    float dot = 0.0f;
#pragma unroll
    for (int block = 0; block < Shared::kColumns / 16; ++block) {
      const int of_k = place.group * (Shared::kColumns / 16) + block;
      const tile::FragmentB s = stored_b(stage.states[t][of_k]), d_s = stored_b(stage.d_states[t][of_k]);
      tile::multiply<ptx::F16>(sums.query[2 * block], sums.query[2 * block + 1], query, s);
      tile::multiply<ptx::F16>(sums.key[2 * block], sums.key[2 * block + 1], key, s);
      tile::multiply<ptx::F16>(sums.write[2 * block], sums.write[2 * block + 1], write, d_s);
      if (of_v % kTokenTiles != place.tile) continue;  // the warps of a quarter of K share the columns of V
#pragma unroll
      for (int i = 0; i < 4; ++i) dot += dot_of_pairs(s.b[i], d_s.b[i]);
    }
    sums.state_dot += times(dot, two_powers(shared.state_logs[kh][of_v] + shared.state_logs[2 + kh][of_v]));
  }
}

/// Q K^T or K K^T of the warp's tokens and its 32 columns, without factors.
template <int kDimK>
FLASHQLA_DEVICE void multiply_rows(const GradientShared<kDimK>& shared, const GradientPlace& place, tile::Accumulator (&c)[4]) {
  using Rows = typename GradientShared<kDimK>::Rows;
  const Rows keys{ptx::shared_address(shared.rows[0])}, left{ptx::shared_address(shared.rows[place.gram() ? 0 : 1])};
  tile::clear(c);
  if (!place.has_pairs()) return;
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
