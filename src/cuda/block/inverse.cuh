// (I + L)^-1 of a strictly lower triangular 64 x 64 matrix by a block of four warps, in 16 x 16 blocks:
//   T_ii by forward substitution in f32;  T_ij = T_ii sum_{j<=k<i} (-L_ik) T_kj for i > j, with f32 sums of products of f16, each
//   operand rounded or, of L and T_ii always, the sum of two.
// Warp w has row w of the blocks of L in its accumulators and solves for a column of the blocks of T, so that one barrier is
// needed in between. No power of L is ever formed: with repeated keys those grow like binomial coefficients and leave nothing of
// an f16.
#pragma once

#include "cuda/tile/fragments.cuh"

namespace flashqla::cuda::block {

inline constexpr int kInverseBlock = 16;
/// Of L and T_ii in the products that make other blocks. With one, keys that repeat and beta near 2 leave the inverse 1.6e-2 off.
inline constexpr int kInverseParts = 2;
inline constexpr int kInverseStride = 20;  // floats from row to row: 16-byte aligned, and rows fall on different banks

/// A left operand, 16 bytes a lane for each of its parts: rounded, and what the rounding left.
template <int kParts>
struct StoredParts {
  uint4 part[kParts][32];
};

/// What the warps of a block exchange for one matrix, beside their scratch.
struct InverseExchange {
  StoredParts<kInverseParts> minus_lower[6];  // -L_ij of i > j, numbered i (i - 1) / 2 + j
};

template <int kParts>
struct PartsA {
  tile::FragmentA part[kParts];
};
template <int kParts>
struct PartsB {
  tile::FragmentB part[kParts];
};

template <int kParts>
FLASHQLA_DEVICE PartsA<kParts> to_parts_a(const tile::Accumulator& left, const tile::Accumulator& right) {
  PartsA<kParts> parts;
  parts.part[0] = tile::to_a<ptx::F16>(left, right);
  if constexpr (kParts == 2) parts.part[1] = tile::rest_of<ptx::F16>(left, right, parts.part[0]);
  return parts;
}
template <int kParts>
FLASHQLA_DEVICE PartsB<kParts> to_parts_b(const tile::Accumulator& left, const tile::Accumulator& right) {
  const PartsA<kParts> a = to_parts_a<kParts>(left, right);
  PartsB<kParts> b;
#pragma unroll
  for (int i = 0; i < kParts; ++i) b.part[i] = tile::transposed(a.part[i]);
  return b;
}

/// c += a b, but for the product of the second parts.
template <int kPartsA, int kPartsB>
FLASHQLA_DEVICE void multiply(tile::Accumulator (&c)[2], const PartsA<kPartsA>& a, const PartsB<kPartsB>& b) {
  tile::multiply<ptx::F16>(c[0], c[1], a.part[0], b.part[0]);
  if constexpr (kPartsA == 2) tile::multiply<ptx::F16>(c[0], c[1], a.part[1], b.part[0]);
  if constexpr (kPartsB == 2) tile::multiply<ptx::F16>(c[0], c[1], a.part[0], b.part[1]);
}

/// What a warp has of kMatrices matrices (1 or 2) that are inverted together: its diagonal blocks. Others read T_ii.
template <int kMatrices>
struct InverseScratch {
  using Tile = tile::SharedTile<16, 16>;
  alignas(128) std::byte solved[kMatrices][kInverseParts][Tile::kBytes];  // T_ii in parts, transposed
  // L_ii, zero on the diagonal and above; four more, so that two matrices' rows fall on different banks.
  alignas(16) float lower[kMatrices][kInverseBlock * kInverseStride + 4];

  FLASHQLA_DEVICE Tile tile_of(int matrix, int part) const { return {ptx::shared_address(solved[matrix][part])}; }
};

template <int kParts>
FLASHQLA_DEVICE void store_parts(StoredParts<kParts>& to, const PartsA<kParts>& parts) {
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const std::uint32_t(&r)[4] = parts.part[i].a;
    to.part[i][tile::lane_id()] = {r[0], r[1], r[2], r[3]};
  }
}
template <int kParts>
FLASHQLA_DEVICE PartsA<kParts> load_parts(const StoredParts<kParts>& from) {
  PartsA<kParts> parts;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const uint4 r = from.part[i][tile::lane_id()];
    parts.part[i] = {{r.x, r.y, r.z, r.w}};
  }
  return parts;
}

/// T_ii of this warp's row of blocks from scratch.lower, to scratch.solved. A lane has a column: with two matrices each half of
/// the warp solves for one, else both for the same.
template <int kMatrices>
FLASHQLA_DEVICE void invert_diagonal(InverseScratch<kMatrices>& scratch) {
  using Tile = tile::SharedTile<16, 16>;
  const int column = tile::lane_id() % 16, matrix = kMatrices == 2 ? tile::lane_id() / 16 : 0;
  const float* const lower = scratch.lower[matrix];
  __syncwarp();  // scratch.lower, from all lanes
  float x[kInverseBlock];
#pragma unroll
  for (int i = 0; i < kInverseBlock; ++i) {
    float sums[4] = {column == i ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};  // four chains of additions, not one
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 l = *reinterpret_cast<const float4*>(lower + i * kInverseStride + m);
      sums[0] = fmaf(-l.x, x[m], sums[0]);
      if (m + 1 < i) sums[1] = fmaf(-l.y, x[m + 1], sums[1]);
      if (m + 2 < i) sums[2] = fmaf(-l.z, x[m + 2], sums[2]);
      if (m + 3 < i) sums[3] = fmaf(-l.w, x[m + 3], sums[3]);
    }
    x[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    std::uint32_t pairs[kInverseParts][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float first = x[8 * piece + 2 * i], second = x[8 * piece + 2 * i + 1];
      pairs[0][i] = ptx::pack_pair<ptx::F16>(first, second);
      const float2 rounded = ptx::unpack_pair<ptx::F16>(pairs[0][i]);
      pairs[1][i] = ptx::pack_pair<ptx::F16>(first - rounded.x, second - rounded.y);
    }
#pragma unroll
    for (int part = 0; part < kInverseParts; ++part) {
      const std::uint32_t(&p)[4] = pairs[part];
      *reinterpret_cast<uint4*>(scratch.solved[matrix][part] + Tile::offset(column, piece)) = {p[0], p[1], p[2], p[3]};
    }
  }
  __syncwarp();  // T_ii, for the warp's own fragments
}

/// T_ii as left operand (of any warp, after a barrier), as right operand, and, its first part, as the right operand that is its
/// transpose (B[k][n] = T[n][k]).
template <int kMatrices>
FLASHQLA_DEVICE PartsA<kInverseParts> diagonal_left(const InverseScratch<kMatrices>& scratch, int matrix) {
  PartsA<kInverseParts> a;
#pragma unroll
  for (int i = 0; i < kInverseParts; ++i) a.part[i] = tile::load_c_transposed(scratch.tile_of(matrix, i), 0, 0);
  return a;
}
template <int kPartsB, int kMatrices>
FLASHQLA_DEVICE PartsB<kPartsB> diagonal_right(const InverseScratch<kMatrices>& scratch, int matrix) {
  static_assert(kPartsB <= kInverseParts);
  PartsB<kPartsB> b;
#pragma unroll
  for (int i = 0; i < kPartsB; ++i) b.part[i] = tile::load_b(scratch.tile_of(matrix, i), 0, 0);
  return b;
}
template <int kMatrices>
FLASHQLA_DEVICE tile::FragmentB diagonal_transposed(const InverseScratch<kMatrices>& scratch, int matrix) {
  return tile::load_b_transposed(scratch.tile_of(matrix, 0), 0, 0);
}

/// Blocks T_ij of column j on and below the diagonal, after a barrier: column[m] = T_(j+m)j. `scratch`: of all warps.
/// store(i, T_ij) takes those below as two accumulators.
template <int kPartsB, int kMatrices, class Store>
FLASHQLA_DEVICE void solve_block_column(const InverseExchange& exchange, const InverseScratch<kMatrices>* scratch, int matrix,
                                        int j, const Store& store, PartsB<kPartsB> (&column)[4]) {
  column[0] = diagonal_right<kPartsB>(scratch[j], matrix);
#pragma unroll
  for (int below = 1; below < 4; ++below) {
    const int i = j + below;
    if (i >= 4) break;
    tile::Accumulator sum[2], t[2];
    tile::clear(sum);
#pragma unroll
    for (int k = 0; k < below; ++k) {
      multiply(sum, load_parts(exchange.minus_lower[i * (i - 1) / 2 + j + k]), column[k]);
    }
    tile::clear(t);
    multiply(t, diagonal_left(scratch[i], matrix), to_parts_b<kPartsB>(sum[0], sum[1]));
    store(i, t);
    column[below] = to_parts_b<kPartsB>(t[0], t[1]);
  }
}

}  // namespace flashqla::cuda::block
