// (I + L)^-1 of a strictly lower triangular 64 x 64 matrix by a block of four warps, in 16 x 16 blocks:
//   T_ii by forward substitution in f32;  T_ij = T_ii sum_{j<=k<i} (-L_ik) T_kj for i > j, with f32 sums of products of f16, each
//   operand rounded or (kParts = 2) as the sum of two.
// Warp w has row w of the blocks of L in its accumulators and solves for column w of the blocks of T, so that one barrier is
// needed in between. No power of L is ever formed: with repeated keys those grow like binomial coefficients and leave nothing of
// an f16.
#pragma once

#include "cuda/tile/fragments.cuh"

namespace flashqla::cuda::block {

inline constexpr int kInverseBlock = 16;
inline constexpr int kInverseStride = 20;  // floats from row to row: 16-byte aligned, and rows fall on different banks

/// A left operand, 16 bytes a lane for each of its parts: rounded, and what the rounding left.
template <int kParts>
struct StoredParts {
  uint4 part[kParts][32];
};

/// What the warps of a block exchange for one matrix.
template <int kParts>
struct InverseExchange {
  StoredParts<kParts> minus_lower[6];  // -L_ij of i > j, numbered i (i - 1) / 2 + j
  StoredParts<kParts> diagonal[4];     // T_ii
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
template <int kParts>
FLASHQLA_DEVICE void multiply(tile::Accumulator (&c)[2], const PartsA<kParts>& a, const PartsB<kParts>& b) {
  tile::multiply<ptx::F16>(c[0], c[1], a.part[0], b.part[0]);
  if constexpr (kParts == 2) {
    tile::multiply<ptx::F16>(c[0], c[1], a.part[1], b.part[0]);
    tile::multiply<ptx::F16>(c[0], c[1], a.part[0], b.part[1]);
  }
}

/// A warp's own memory.
struct InverseScratch {
  alignas(128) std::byte tiles[2][tile::SharedTile<16, 16>::kBytes];  // T_ii in parts
  alignas(16) float lower[kInverseBlock * kInverseStride];            // L_ii, zero on the diagonal and above
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

/// T_ii of this warp's row of blocks from scratch.lower: into the exchange, as right operand, and rounded as the right operand
/// that is its transpose (B[k][n] = T[n][k]).
template <int kParts>
FLASHQLA_DEVICE void invert_diagonal(InverseScratch& scratch, InverseExchange<kParts>& exchange, PartsB<kParts>& plain,
                                     tile::FragmentB& transposed) {
  using Tile = tile::SharedTile<16, 16>;
  const int lane = tile::lane_id(), column = lane % 16, warp = static_cast<int>(threadIdx.x) / 32;
  __syncwarp();            // scratch.lower, from all lanes
  float x[kInverseBlock];  // both halves of the warp solve for the same columns
#pragma unroll
  for (int i = 0; i < kInverseBlock; ++i) {
    float sums[4] = {column == i ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};  // four chains of additions, not one
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 l = *reinterpret_cast<const float4*>(scratch.lower + i * kInverseStride + m);
      sums[0] = fmaf(-l.x, x[m], sums[0]);
      if (m + 1 < i) sums[1] = fmaf(-l.y, x[m + 1], sums[1]);
      if (m + 2 < i) sums[2] = fmaf(-l.z, x[m + 2], sums[2]);
      if (m + 3 < i) sums[3] = fmaf(-l.w, x[m + 3], sums[3]);
    }
    x[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
#pragma unroll
  for (int i = 0; i < kInverseBlock; ++i) {
    const int at = Tile::offset(i, column / 8) + column % 8 * 2;
    const ptx::F16 rounded = __float2half_rn(x[i]);
    if (lane < 16) {  // half of the warp writes one part, the other half the other
      *reinterpret_cast<ptx::F16*>(scratch.tiles[0] + at) = rounded;
    } else if (kParts == 2) {
      *reinterpret_cast<ptx::F16*>(scratch.tiles[1] + at) = __float2half_rn(x[i] - __half2float(rounded));
    }
  }
  __syncwarp();  // the tiles, for the fragments
  PartsA<kParts> own;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const Tile part{ptx::shared_address(scratch.tiles[i])};
    own.part[i] = tile::load_a(part, 0, 0);
    plain.part[i] = tile::load_b_transposed(part, 0, 0);
  }
  store_parts(exchange.diagonal[warp], own);
  transposed = tile::load_b(Tile{ptx::shared_address(scratch.tiles[0])}, 0, 0);
}

/// Blocks T_ij of this warp's column below the diagonal, after a barrier: store(i, T_ij) takes each as two accumulators.
template <int kParts, class Store>
FLASHQLA_DEVICE void solve_block_column(const InverseExchange<kParts>& exchange, const PartsB<kParts>& diagonal,
                                        const Store& store) {
  const int column = static_cast<int>(threadIdx.x) / 32;
  PartsB<kParts> solved[3];  // T_kj for k = j, j + 1, ...
  solved[0] = diagonal;
#pragma unroll
  for (int below = 1; below < 4; ++below) {
    const int i = column + below;
    if (i >= 4) break;
    tile::Accumulator sum[2], t[2];
    tile::clear(sum);
#pragma unroll
    for (int k = 0; k < below; ++k) {
      multiply(sum, load_parts(exchange.minus_lower[i * (i - 1) / 2 + column + k]), solved[k]);
    }
    tile::clear(t);
    multiply(t, load_parts(exchange.diagonal[i]), to_parts_b<kParts>(sum[0], sum[1]));
    store(i, t);
    if (below < 3) solved[below] = to_parts_b<kParts>(t[0], t[1]);
  }
}

}  // namespace flashqla::cuda::block
