// Panels of f32 in shared memory, 64 rows of 32 columns, and products of a thread's own small tile from them with plain FMA. A
// row is 36 floats: neighbouring rows begin four banks apart, so that eight of them are read 16 bytes each at once.
#pragma once

#include "cuda/ptx/cp_async.cuh"

namespace flashqla::cuda::tile {

inline constexpr int kPanelRows = 64, kPanelColumns = 32;
inline constexpr int kPanelStride = kPanelColumns + 4;
inline constexpr int kPanelFloats = kPanelRows * kPanelStride;

/// Where rows of f32 lie in global memory.
struct GlobalFloats {
  const float* first;
  std::int64_t stride;
  int rows, columns;  // that exist; a panel has zeros past them
  bool aligned;       // rows begin at multiples of 16 bytes
};

/// Starts the copy of a panel, from column `column` on, with all `kThreads` threads of the block: the caller commits, waits and
/// has a barrier. Rows that are not aligned go through the registers.
template <int kThreads>
FLASHQLA_DEVICE void copy_panel(float* to, const GlobalFloats& from, int column) {
  constexpr int kPieces = kPanelColumns / 4, kStep = kThreads / kPieces;
  static_assert(kThreads % kPieces == 0 && kPanelRows % kStep == 0, "every thread copies as many pieces as any other");
  const int first = static_cast<int>(threadIdx.x) / kPieces, piece = static_cast<int>(threadIdx.x) % kPieces * 4;
  const int rows = column + piece < from.columns ? from.rows : 0;
  const float* source = from.first + (first * from.stride + column + piece);
  float* const place = to + first * kPanelStride + piece;
  if (!from.aligned) {
#pragma unroll 1
    for (int row = 0; row < kPanelRows; row += kStep) {
      for (int j = 0; j < 4; ++j) place[row * kPanelStride + j] = first + row < rows ? source[row * from.stride + j] : 0.0f;
    }
    return;
  }
  const std::uint32_t address = ptx::shared_address(place);
#pragma unroll
  for (int row = 0; row < kPanelRows; row += kStep) {
    const bool there = first + row < rows;
    ptx::cp_async_16_or_zeros(address + row * kPanelStride * 4, there ? source : from.first, there);
    source += kStep * from.stride;
  }
}

/// Lower triangles of 64 x 64 floats in global memory: rows one after another, each as far as the 16 x 16 block on the diagonal.
FLASHQLA_DEVICE constexpr int triangle_row(int i) { return 128 * (i / 16) * (i / 16 + 1) + i % 16 * 16 * (i / 16 + 1); }

/// Starts the copy of such a triangle to two panels, zeros above the blocks.
template <int kThreads>
FLASHQLA_DEVICE void copy_triangle(float* to, const float* from) {
  const std::uint32_t address = ptx::shared_address(to);
#pragma unroll
  for (int i = 0; i < kPanelRows * 16 / kThreads; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x), row = at / 16, column = at % 16 * 4;
    const int place = column / kPanelColumns * kPanelFloats + row * kPanelStride + column % kPanelColumns;
    const bool there = column / 16 <= row / 16;
    ptx::cp_async_16_or_zeros(address + place * 4, there ? from + triangle_row(row) + column : from, there);
  }
}

/// Narrow panels: 64 rows of 16 columns. Rows are 20 floats, so that eight of them are read 16 bytes each at once; neighbouring
/// panels begin 16 banks apart.
inline constexpr int kSliceColumns = 16, kSliceStride = 20;
inline constexpr int kSliceFloats = kPanelRows * kSliceStride + 16;

/// As copy_panel, by 256 threads.
FLASHQLA_DEVICE void copy_slice(float* to, const GlobalFloats& from, int column) {
  const int row = static_cast<int>(threadIdx.x) / 4, piece = static_cast<int>(threadIdx.x) % 4 * 4;
  const bool there = row < from.rows && column + piece < from.columns;
  const float* const source = there ? from.first + (row * from.stride + column + piece) : from.first;
  float* const place = to + row * kSliceStride + piece;
  if (from.aligned) {
    ptx::cp_async_16_or_zeros(ptx::shared_address(place), source, there);
  } else {
    for (int j = 0; j < 4; ++j) place[j] = there ? source[j] : 0.0f;
  }
}

FLASHQLA_DEVICE float4 load_float4(const float* from) { return *reinterpret_cast<const float4*>(from); }
FLASHQLA_DEVICE void store_float4(float* to, const float (&x)[4]) {
  *reinterpret_cast<float4*>(to) = float4{x[0], x[1], x[2], x[3]};
}

template <int kRows, int kColumns>
FLASHQLA_DEVICE void clear(float (&c)[kRows][kColumns]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) c[i][j] = 0.0f;
  }
}

/// c[j] += a x[j] for a row of four.
FLASHQLA_DEVICE void add_times(float (&c)[4], float a, const float4& x) {
  c[0] = fmaf(a, x.x, c[0]);
  c[1] = fmaf(a, x.y, c[1]);
  c[2] = fmaf(a, x.z, c[2]);
  c[3] = fmaf(a, x.w, c[3]);
}

/// c[i][j] += sum over k < kDepth of a[i * kStepA + k] b[k * stride_b + j], for i from kFirst on.
template <int kDepth, int kStepA, int kFirst = 0, int kRows>
FLASHQLA_DEVICE void multiply_rows(float (&c)[kRows][4], const float* a, const float* b, int stride_b) {
#pragma unroll 2
  for (int k = 0; k < kDepth; k += 4) {
    float4 left[kRows];
#pragma unroll
    for (int i = kFirst; i < kRows; ++i) left[i] = load_float4(a + i * kStepA + k);
    const float4 right[4] = {load_float4(b + k * stride_b), load_float4(b + (k + 1) * stride_b),
                             load_float4(b + (k + 2) * stride_b), load_float4(b + (k + 3) * stride_b)};
#pragma unroll
    for (int i = kFirst; i < kRows; ++i) {
      add_times(c[i], left[i].x, right[0]);
      add_times(c[i], left[i].y, right[1]);
      add_times(c[i], left[i].z, right[2]);
      add_times(c[i], left[i].w, right[3]);
    }
  }
}

/// c[i][j] += sum over k < 64 of a[i][k] b[k][j] for a lower triangle in two panels: rows 16 i of the thread's own.
FLASHQLA_DEVICE void multiply_lower(float (&c)[4][4], const float* a, const float* b, int stride_b) {
  constexpr int kStep = 16 * kPanelStride;
  multiply_rows<16, kStep, 0>(c, a, b, stride_b);
  multiply_rows<16, kStep, 1>(c, a + 16, b + 16 * stride_b, stride_b);
  multiply_rows<16, kStep, 2>(c, a + kPanelFloats, b + 32 * stride_b, stride_b);
  multiply_rows<16, kStep, 3>(c, a + kPanelFloats + 16, b + 48 * stride_b, stride_b);
}

/// The part of 16 rows of multiply_lower_transposed: of the first kCount of the thread's columns of the triangle.
template <int kCount>
FLASHQLA_DEVICE void multiply_block_transposed(float (&c)[4][4], const float* a, const float* b, int stride_b) {
#pragma unroll 4
  for (int k = 0; k < 16; ++k) {
    const float4 right = load_float4(b + k * stride_b);
#pragma unroll
    for (int i = 0; i < kCount; ++i) add_times(c[i], a[i / 2 * kPanelFloats + k * kPanelStride + i % 2 * 16], right);
  }
}
/// c[i][j] += sum over k < 64 of a[k][16 i] b[k][j] for a lower triangle in two panels.
FLASHQLA_DEVICE void multiply_lower_transposed(float (&c)[4][4], const float* a, const float* b, int stride_b) {
  multiply_block_transposed<1>(c, a, b, stride_b);
  multiply_block_transposed<2>(c, a + 16 * kPanelStride, b + 16 * stride_b, stride_b);
  multiply_block_transposed<3>(c, a + 32 * kPanelStride, b + 32 * stride_b, stride_b);
  multiply_block_transposed<4>(c, a + 48 * kPanelStride, b + 48 * stride_b, stride_b);
}

/// c[i][j] += sum over k < kDepth of a[i * kStepA + i / 4 * kSkipA + k] b[j * kStepB + k]; only j <= i with kLower.
template <int kDepth, int kStepA, int kStepB, bool kLower, int kSkipA = 0, int kRows, int kColumns>
FLASHQLA_DEVICE void multiply_dots(float (&c)[kRows][kColumns], const float* a, const float* b) {
#pragma unroll 2
  for (int k = 0; k < kDepth; k += 4) {
    float4 left[kRows], right[kColumns];
#pragma unroll
    for (int i = 0; i < kRows; ++i) left[i] = load_float4(a + i * kStepA + i / 4 * kSkipA + k);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) right[j] = load_float4(b + j * kStepB + k);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (kLower && j > i) continue;
        c[i][j] = fmaf(left[i].x, right[j].x, c[i][j]);
        c[i][j] = fmaf(left[i].y, right[j].y, c[i][j]);
        c[i][j] = fmaf(left[i].z, right[j].z, c[i][j]);
        c[i][j] = fmaf(left[i].w, right[j].w, c[i][j]);
      }
    }
  }
}

/// c[i][j] += sum over t < kDepth of a[t * stride_a + i] b[t * stride_b + j].
template <int kDepth>
FLASHQLA_DEVICE void multiply_columns(float (&c)[4][4], const float* a, int stride_a, const float* b, int stride_b) {
#pragma unroll 4
  for (int t = 0; t < kDepth; ++t) {
    const float4 left = load_float4(a + t * stride_a), right = load_float4(b + t * stride_b);
    add_times(c[0], left.x, right);
    add_times(c[1], left.y, right);
    add_times(c[2], left.z, right);
    add_times(c[3], left.w, right);
  }
}

}  // namespace flashqla::cuda::tile
