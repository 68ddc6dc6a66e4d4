// What blocks that go from chunk to chunk of f32 have: shared memory, the state from and to the caller's tensors, rows of tokens.
#pragma once

#include "cuda/kernels/chunk_forward/start.hpp"
#include "cuda/kernels/chunk_forward/work.cuh"
#include "cuda/tile/panel.cuh"

namespace flashqla::cuda {

/// Shared memory of a block, in floats: the state, two tiles of tokens by the slab, two stages.
template <int kSlab>
struct FloatAdvance {
  static constexpr int kThreads = 4 * kSlab, kGroups = kSlab / 4, kStride = kSlab + 4;
  static constexpr int kStage = 2 * tile::kPanelFloats;
  float *state, *left, *right, *stages;
  int panels;  // of K

  FLASHQLA_DEVICE FloatAdvance(std::byte* memory, int dim_k) : state(reinterpret_cast<float*>(memory)) {
    panels = (dim_k + tile::kPanelColumns - 1) / tile::kPanelColumns;
    left = state + panels * tile::kPanelColumns * kStride;
    right = left + kChunkTokens * kStride;
    stages = right + kChunkTokens * kStride;
  }
  /// The thread's columns of a panel's rows of the state.
  FLASHQLA_DEVICE const float* state_panel(int panel) const { return state + panel * tile::kPanelColumns * kStride + column(); }
  static FLASHQLA_DEVICE int row() { return static_cast<int>(threadIdx.x) / kGroups; }
  static FLASHQLA_DEVICE int column() { return static_cast<int>(threadIdx.x) % kGroups * 4; }
};

FLASHQLA_DEVICE tile::GlobalFloats token_rows(const ChunkForwardParams& p, const TokenTensor& x, const AdvanceWork& work,
                                              std::int64_t chunk) {
  const std::int64_t row = work.rows.begin + work.rows.position(chunk);
  return {static_cast<const float*>(x.data) + offset_of(x, work.rows.batch, row, work.head_qk), x.stride_token,
          work.rows.tokens(chunk), p.dim_k, p.aligned != 0};
}

FLASHQLA_DEVICE const float* float_unit(const ChunkForwardParams& p, const AdvanceWork& work, std::int64_t chunk) {
  return reinterpret_cast<const float*>(p.units) + ((work.rows.first_chunk + chunk) * p.heads_v + work.head) * FloatUnit::kFloats;
}

/// The block's part of a state that has `columns` of the padded K by kSlab elements, from or to the caller's tensor:
/// body(element, place in the tensor or -1).
template <int kSlab, class Body>
FLASHQLA_DEVICE void for_each_state(const ChunkForwardParams& p, const AdvanceWork& work, const FloatAdvance<kSlab>& shared,
                                    const StateTensor& x, std::int64_t row, const Body& body) {
  const int rows = shared.panels * tile::kPanelColumns;
  for (int at = static_cast<int>(threadIdx.x); at < rows * kSlab; at += FloatAdvance<kSlab>::kThreads) {
    const int k = x.value_first != 0 ? at % rows : at / kSlab, v = x.value_first != 0 ? at / rows : at % kSlab;
    const bool there = row >= 0 && row < x.rows && k < p.dim_k && work.first_v + v < p.dim_v;
    body(shared.state[k * FloatAdvance<kSlab>::kStride + v], there ? element_of(x, row, work.head, k, work.first_v + v) : -1);
  }
}
template <int kSlab>
__device__ __noinline__ void load_state(const ChunkForwardParams& p, const AdvanceWork& work, FloatAdvance<kSlab> shared,
                                        const StateTensor& from, std::int64_t row) {
  for_each_state<kSlab>(p, work, shared, from, row,
                        [&](float& x, std::int64_t place) { x = place >= 0 ? load_scalar(from.data, from.dtype, place) : 0.0f; });
}
template <int kSlab>
__device__ __noinline__ void store_state(const ChunkForwardParams& p, const AdvanceWork& work, FloatAdvance<kSlab> shared,
                                         const StateTensor& to, std::int64_t row) {
  if (row < 0 || row >= to.rows) return;
  __syncthreads();  // the state, from all threads: the row is the same for them
  for_each_state<kSlab>(p, work, shared, to, row, [&](float& x, std::int64_t place) {
    if (place >= 0) store_scalar(to.data, to.dtype, place, x);
  });
}

/// The thread's four columns of its tokens.
using TokenTile = float[4][4];

/// Of rows of f32 that may not be aligned; zeros past the ends.
template <int kSlab>
FLASHQLA_DEVICE void load_tokens(const ChunkForwardParams& p, const AdvanceWork& work, const TokenTensor& from,
                                 std::int64_t batch, std::int64_t row, int tokens, TokenTile& x) {
  using Shared = FloatAdvance<kSlab>;
  const int column = work.first_v + Shared::column();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = Shared::row() + 16 * i;
    const bool there = token < tokens && column < p.dim_v;
    const float* const source = static_cast<const float*>(from.data) + offset_of(from, batch, row + token, work.head) + column;
    if (there && p.aligned != 0) {
      const float4 y = tile::load_float4(source);
      x[i][0] = y.x, x[i][1] = y.y, x[i][2] = y.z, x[i][3] = y.w;
      continue;
    }
    for (int j = 0; j < 4; ++j) x[i][j] = there ? source[j] : 0.0f;
  }
}
template <int kSlab>
FLASHQLA_DEVICE void store_tokens(const ChunkForwardParams& p, const AdvanceWork& work, const TokenTensor& to, std::int64_t batch,
                                  std::int64_t row, int tokens, const TokenTile& x) {
  using Shared = FloatAdvance<kSlab>;
  const int column = work.first_v + Shared::column();
  if (column >= p.dim_v) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = Shared::row() + 16 * i;
    if (token >= tokens) continue;
    const std::int64_t at = offset_of(to, batch, row + token, work.head) + column;
    if (p.aligned != 0 && to.dtype == DType::f32) {
      tile::store_float4(static_cast<float*>(to.data) + at, x[i]);
      continue;
    }
    for (int j = 0; j < 4; ++j) store_scalar(to.data, to.dtype, at + j, x[i][j]);
  }
}
template <int kSlab>
FLASHQLA_DEVICE void leave_tokens(float* to, const TokenTile& x) {
  using Shared = FloatAdvance<kSlab>;
#pragma unroll
  for (int i = 0; i < 4; ++i) tile::store_float4(to + (Shared::row() + 16 * i) * Shared::kStride + Shared::column(), x[i]);
}

}  // namespace flashqla::cuda
