// advance_states of Hopper GPUs: K = 128, 16-bit inputs, WGMMA and the copy engine. The algebra, units and rounding of
// advance.cuh; a warpgroup has 64 rows of V of S^T and all tokens, each warp a tile of 16 rows, so that between the warps of a
// group nothing has to be exchanged:
//
//   E^T = strength o v^T - read_k o (S^T K^T)          [64 x 64]    e^T = E^T solve^T
//   O^T = read_q o (S^T Q^T) + rise o (E^T answers^T)               S^T = total S^T + (write_k o e^T) K
//
// What S^T of the next chunk waits for is done by the group; O^T by the output group (hopper_output.cuh), for which the group
// leaves S^T, rounded, and E^T: lane by lane, for what one lane of a group holds the same lane of the output group wants.
#pragma once

#include "cuda/block/gates.cuh"
#include "cuda/kernels/chunk_forward/hopper_stages.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace flashqla::cuda {

/// A product [64 x 64 tokens]: 8 accumulators of 8 columns each.
using GroupTokens = float[32];
/// The same, of the first 32 tokens and of the others.
struct TwoHalves {
  float early[16], late[16];
  FLASHQLA_DEVICE float operator[](int i) const { return i < 16 ? early[i] : late[i - 16]; }
  FLASHQLA_DEVICE void keep_in_place() {
    ptx::keep_in_place(early);
    ptx::keep_in_place(late);
  }
};

/// Two accumulators side by side are the left operand of 16 columns: all of them.
template <class Element, int kCount>
FLASHQLA_DEVICE void round_left(const float (&x)[kCount], std::uint32_t (&left)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) left[i] = ptx::pack_pair<Element>(x[2 * i], x[2 * i + 1]);
}
/// What rounding left, rounded in its turn.
template <class Element, int kCount>
FLASHQLA_DEVICE void round_rest(const float (&x)[kCount], const std::uint32_t (&left)[kCount / 2],
                                std::uint32_t (&rest)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const float2 rounded = ptx::unpack_pair<Element>(left[i]);
    rest[i] = ptx::pack_pair<Element>(x[2 * i] - rounded.x, x[2 * i + 1] - rounded.y);
  }
}

/// d = S^T times rows of k or q, a box for each half of K.
template <class Element>
FLASHQLA_DEVICE void multiply_rows(std::uint32_t rows, const std::uint32_t (&left)[32], GroupTokens& d) {
  const auto b = ptx::RightOperand::swizzled(rows);
  ptx::Wgmma<Element, 32, false, false>::multiply(d, left, b);
#pragma unroll
  for (int step = 1; step < 8; ++step) {
    ptx::Wgmma<Element, 32, true, false>::multiply(d, left + 4 * step, b + (step / 4 * kBoxBytes + step % 4 * 32));
  }
}
/// d += what rounding S^T left, times them. A quarter of K at a time: few registers are free. Waits for all products.
template <class Element>
FLASHQLA_DEVICE void add_rest_times_rows(std::uint32_t rows, const float (&s)[64], GroupTokens& d) {
  const auto b = ptx::RightOperand::swizzled(rows);
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = s[16 * quarter + i];
    std::uint32_t left[8], rest[8];
    round_left<Element>(x, left);
    round_rest<Element>(x, left, rest);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 2 * quarter; step < 2 * quarter + 2; ++step) {
      ptx::Wgmma<Element, 32, true, false>::multiply(d, rest + 4 * (step % 2), b + (step / 4 * kBoxBytes + step % 4 * 32));
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(d);
  }
}

/// d = E^T times a triangle's transpose: f16 pairs, answers.
FLASHQLA_DEVICE void multiply_triangle(std::uint32_t triangle, const std::uint32_t (&left)[16], TwoHalves& d) {
  const auto early = ptx::RightOperand::pieces(triangle, 128, 512),
             late = ptx::RightOperand::pieces(triangle + HopperTriangle::kEarlyBytes, 128, 1024);
  ptx::Wgmma<ptx::F16, 16, false, false>::multiply(d.early, left, early);
  ptx::Wgmma<ptx::F16, 16, false, false>::multiply(d.late, left, late);
  ptx::Wgmma<ptx::F16, 16, true, false>::multiply(d.early, left + 4, early + 256);
#pragma unroll
  for (int step = 1; step < 4; ++step)
    ptx::Wgmma<ptx::F16, 16, true, false>::multiply(d.late, left + 4 * step, late + step * 256);
}
/// The same with a wide triangle and E as accumulators c0, c2, c1, c3: what the first 32 tokens add to all of them,
FLASHQLA_DEVICE void multiply_wide(std::uint32_t triangle, const std::uint32_t* left, GroupTokens& d) {
  const auto b = ptx::RightOperand::pieces(triangle, 128, 1024);
  ptx::Wgmma<ptx::Tf32, 32, false, false>::multiply(d, left, b);
#pragma unroll
  for (int step = 1; step < 4; ++step) ptx::Wgmma<ptx::Tf32, 32, true, false>::multiply(d, left + 4 * step, b + step * 256);
}
/// and what the last 32 add to themselves.
FLASHQLA_DEVICE void multiply_wide_late(std::uint32_t triangle, const std::uint32_t* left, float (&d)[16]) {
  const auto b = ptx::RightOperand::pieces(triangle + HopperTriangle::kWideEarlyBytes, 128, 1024);
  ptx::Wgmma<ptx::Tf32, 16, false, false>::multiply(d, left + 16, b);
#pragma unroll
  for (int step = 1; step < 4; ++step) {
    ptx::Wgmma<ptx::Tf32, 16, true, false>::multiply(d, left + 16 + 4 * step, b + step * 256);
  }
}

/// S^T += updates of 32 tokens times rows of k, from those of the first of the tokens on.
template <class Element>
FLASHQLA_DEVICE void multiply_updates(std::uint32_t rows, const std::uint32_t (&left)[8], float (&s)[64]) {
  const auto b = ptx::RightOperand::swizzled_rows_of_k(rows, kBoxBytes);
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    ptx::Wgmma<Element, 64, true, true>::multiply(s, left + 4 * step, b + step * 16 * kBoxRowBytes);
  }
}

/// A lane's address of its row of four 8 x 8 matrices of a box [token][V]: of the warp's 16 columns, 16 tokens at a time.
/// Transposed they are an accumulator pair.
FLASHQLA_DEVICE std::uint32_t place_in_box(const GroupPlace& place) {
  const int row = place.lane % 8 + place.lane / 16 * 8, piece = 2 * place.warp + place.lane / 8 % 2;
  return static_cast<std::uint32_t>(row * kBoxRowBytes + (piece ^ row % 8) * 16);
}

/// Factors of the lane's two tokens among eight.
FLASHQLA_DEVICE float2 token_factors(const UnitFactors& factors, int offset, int n, const GroupPlace& place) {
  return factors.at<float2>(offset + (8 * n + place.pair) * 4);
}

/// Values of the warp's rows, in pairs of tokens. `values`: the lane's place in their box.
FLASHQLA_DEVICE void load_values(std::uint32_t values, std::uint32_t (&pairs)[16]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    std::uint32_t four[4];
    ptx::ldmatrix_x4_trans(four, values + static_cast<std::uint32_t>(step * 16 * kBoxRowBytes));
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[4 * step + i] = four[i];
  }
}

/// What a chunk's unit says of the whole chunk.
struct ChunkTotals {
  float total, precise, least_forth, least_of_state, growth;
};
FLASHQLA_DEVICE ChunkTotals chunk_totals(const UnitFactors& factors) {
  static_assert(ChunkUnit::kTotal % 16 == 0 && ChunkUnit::kPrecise == ChunkUnit::kTotal + 4);
  static_assert(ChunkUnit::kLeastForth == ChunkUnit::kTotal + 8 && ChunkUnit::kGrowth == ChunkUnit::kLeastOfState + 4);
  const auto& x = factors.at<float4>(ChunkUnit::kTotal);
  const auto& y = factors.at<float2>(ChunkUnit::kLeastOfState);
  return {x.x, x.y, x.z, y.x, y.y};
}

}  // namespace flashqla::cuda
