// The operands of mma.sync m16n8k16 from shared tiles and from accumulators. Maps of lanes to elements: ptx/mma.cuh.
#pragma once

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashqla::cuda::tile {

/// C [16 x 8].
struct Accumulator {
  float c[4];
};

/// A [16 x 16].
struct FragmentA {
  std::uint32_t a[4];
};

/// B [16 x 16] as two B [16 x 8]: columns 0-7 in b[0], b[1], columns 8-15 in b[2], b[3].
struct FragmentB {
  std::uint32_t b[4];
};

FLASHQLA_DEVICE int lane_id() { return static_cast<int>(threadIdx.x % 32); }
/// Of the warp in its block, so that the compiler sees that its lanes share it.
FLASHQLA_DEVICE int warp_number() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0); }

template <int kCount>
FLASHQLA_DEVICE void clear(Accumulator (&c)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i].c[j] = 0.0f;
  }
}

/// c0 (columns 0-7), c1 (columns 8-15) += A B.
template <class Element>
FLASHQLA_DEVICE void multiply(Accumulator& c0, Accumulator& c1, const FragmentA& a, const FragmentB& b) {
  ptx::mma_m16n8k16<Element>(c0.c, a.a, b.b[0], b.b[1]);
  ptx::mma_m16n8k16<Element>(c1.c, a.a, b.b[2], b.b[3]);
}

/// A = rows [row, row + 16), columns [column, column + 16) of the tile.
template <int kRows, int kColumns>
FLASHQLA_DEVICE FragmentA load_a(const SharedTile<kRows, kColumns>& tile, int row, int column) {
  const int lane = lane_id();
  FragmentA f;
  ptx::ldmatrix_x4(f.a, tile.piece(row + lane % 16, column / kPieceElements + lane / 16));
  return f;
}

/// Which row and piece of a block of 16 x 16 a lane gives the address of, for load_b and load_b_transposed.
struct LanePiece {
  int row, piece;
};
FLASHQLA_DEVICE LanePiece lane_b() { return {lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2}; }
FLASHQLA_DEVICE LanePiece lane_b_transposed() { return {lane_id() % 16, lane_id() / 16}; }

/// B[k][n] = tile[n0 + n][k0 + k]: the tile's rows are the columns of B.
template <int kRows, int kColumns>
FLASHQLA_DEVICE FragmentB load_b(const SharedTile<kRows, kColumns>& tile, int n0, int k0) {
  const LanePiece at = lane_b();
  FragmentB f;
  ptx::ldmatrix_x4(f.b, tile.piece(n0 + at.row, k0 / kPieceElements + at.piece));
  return f;
}

/// B[k][n] = tile[k0 + k][n0 + n].
template <int kRows, int kColumns>
FLASHQLA_DEVICE FragmentB load_b_transposed(const SharedTile<kRows, kColumns>& tile, int k0, int n0) {
  const LanePiece at = lane_b_transposed();
  FragmentB f;
  ptx::ldmatrix_x4_trans(f.b, tile.piece(k0 + at.row, n0 / kPieceElements + at.piece));
  return f;
}

/// The addresses of a lane for load_b or load_b_transposed of any block of a tile: rows are permuted alike every eight rows and
/// eight pieces, so that four of them and constants are enough.
template <int kRows, int kColumns>
struct BlockAddresses {
  static_assert(kColumns >= 64, "rows of eight pieces at least");
  std::uint32_t at[4];

  /// `row`, `column`: multiples of 16, constants after unrolling.
  FLASHQLA_DEVICE std::uint32_t operator()(int row, int column) const {
    return at[column / 16 % 4] + row * SharedTile<kRows, kColumns>::kRowBytes + column / 64 * 128;
  }
};
template <int kRows, int kColumns>
FLASHQLA_DEVICE BlockAddresses<kRows, kColumns> block_addresses(const SharedTile<kRows, kColumns>& tile, const LanePiece& lane) {
  BlockAddresses<kRows, kColumns> addresses;
#pragma unroll
  for (int i = 0; i < 4; ++i) addresses.at[i] = tile.piece(lane.row, 2 * i + lane.piece);
  return addresses;
}
template <int kRows, int kColumns>
FLASHQLA_DEVICE BlockAddresses<kRows, kColumns> addresses_b(const SharedTile<kRows, kColumns>& tile) {
  return block_addresses(tile, lane_b());
}
template <int kRows, int kColumns>
FLASHQLA_DEVICE BlockAddresses<kRows, kColumns> addresses_b_transposed(const SharedTile<kRows, kColumns>& tile) {
  return block_addresses(tile, lane_b_transposed());
}
template <int kRows, int kColumns>
FLASHQLA_DEVICE FragmentB load_b(const BlockAddresses<kRows, kColumns>& addresses, int n0, int k0) {
  FragmentB f;
  ptx::ldmatrix_x4(f.b, addresses(n0, k0));
  return f;
}
template <int kRows, int kColumns>
FLASHQLA_DEVICE FragmentB load_b_transposed(const BlockAddresses<kRows, kColumns>& addresses, int k0, int n0) {
  FragmentB f;
  ptx::ldmatrix_x4_trans(f.b, addresses(k0, n0));
  return f;
}

/// The transposed block C[m][n] = tile[n0 + n][m0 + m], 16 x 16, as pairs in the order of two accumulators: r[0] and r[1] are the
/// pairs (c0, c1) and (c2, c3) of columns 0-7, r[2] and r[3] of columns 8-15.
template <int kRows, int kColumns>
FLASHQLA_DEVICE FragmentA load_c_transposed(const SharedTile<kRows, kColumns>& tile, int m0, int n0) {
  const int lane = lane_id();
  FragmentA f;
  ptx::ldmatrix_x4_trans(f.a, tile.piece(n0 + lane % 8 + lane / 16 * 8, m0 / kPieceElements + lane / 8 % 2));
  return f;
}

/// Two accumulators side by side, rounded, as A.
template <class Element>
FLASHQLA_DEVICE FragmentA to_a(const Accumulator& left, const Accumulator& right) {
  return {{ptx::pack_pair<Element>(left.c[0], left.c[1]), ptx::pack_pair<Element>(left.c[2], left.c[3]),
           ptx::pack_pair<Element>(right.c[0], right.c[1]), ptx::pack_pair<Element>(right.c[2], right.c[3])}};
}

/// What rounding them to `rounded` left, rounded in its turn.
template <class Element>
FLASHQLA_DEVICE FragmentA rest_of(const Accumulator& left, const Accumulator& right, const FragmentA& rounded) {
  FragmentA rest;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* const c = (i < 2 ? left.c : right.c) + i % 2 * 2;
    const float2 x = ptx::unpack_pair<Element>(rounded.a[i]);
    rest.a[i] = ptx::pack_pair<Element>(c[0] - x.x, c[1] - x.y);
  }
  return rest;
}

/// A as B: B[k][n] = A[k][n].
FLASHQLA_DEVICE FragmentB transposed(const FragmentA& a) {
  return {
      {ptx::movmatrix_trans(a.a[0]), ptx::movmatrix_trans(a.a[1]), ptx::movmatrix_trans(a.a[2]), ptx::movmatrix_trans(a.a[3])}};
}

/// Two accumulators side by side, rounded, as the B whose columns are their rows: B[k][n] = C[n][k].
template <class Element>
FLASHQLA_DEVICE FragmentB to_b_transposed(const Accumulator& left, const Accumulator& right) {
  return {{ptx::pack_pair<Element>(left.c[0], left.c[1]), ptx::pack_pair<Element>(right.c[0], right.c[1]),
           ptx::pack_pair<Element>(left.c[2], left.c[3]), ptx::pack_pair<Element>(right.c[2], right.c[3])}};
}

/// The same operands in TF32: f32 of which a product takes 11 digits, with the range of f32.
struct WideA {
  float a[2][4];  // of two accumulators side by side c0, c2, c1, c3: columns 2 t and 2 t + 1 are the hardware's t and t + 4
};
struct WideB {
  float2 b[4];  // FragmentB's pairs
};

/// Of numbers that are TF32.
FLASHQLA_DEVICE WideA wide_a(const Accumulator (&x)[2]) {
  WideA a;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a.a[n][i % 2 * 2 + i / 2] = x[n].c[i];
  }
  return a;
}
/// Of any, rounded.
FLASHQLA_DEVICE WideA to_wide_a(const Accumulator (&x)[2]) {
  WideA a = wide_a(x);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (float& element : a.a[n]) element = ptx::round_tf32(element);
  }
  return a;
}
/// What a product leaves out of A's digits.
FLASHQLA_DEVICE WideA rest_of_cut(const WideA& a) {
  WideA rest;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) rest.a[n][i] = a.a[n][i] - __uint_as_float(__float_as_uint(a.a[n][i]) & 0xffffe000u);
  }
  return rest;
}

/// Exact.
FLASHQLA_DEVICE WideB widen(const FragmentB& b) {
  return {{ptx::unpack_pair<ptx::F16>(b.b[0]), ptx::unpack_pair<ptx::F16>(b.b[1]), ptx::unpack_pair<ptx::F16>(b.b[2]),
           ptx::unpack_pair<ptx::F16>(b.b[3])}};
}

/// c0 (columns 0-7), c1 (columns 8-15) += A B.
FLASHQLA_DEVICE void multiply(Accumulator& c0, Accumulator& c1, const WideA& a, const WideB& b) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    ptx::mma_m16n8k8_tf32(c0.c, a.a[n], b.b[n].x, b.b[n].y);
    ptx::mma_m16n8k8_tf32(c1.c, a.a[n], b.b[2 + n].x, b.b[2 + n].y);
  }
}

}  // namespace flashqla::cuda::tile
