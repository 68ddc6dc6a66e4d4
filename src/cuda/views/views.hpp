// Tensors and sequences as kernels receive them: plain data, strides in elements. The host fills them in from the checked
// arguments (src/cuda/host), views.cuh reads and writes through them.
#pragma once

#include <cstdint>

#include "flashqla/problem.hpp"
#include "flashqla/types.hpp"

namespace flashqla::cuda {

/// [B,T,H,D] with a contiguous last dimension, or [B,T,H]. Null: absent.
struct TokenTensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t stride_batch = 0, stride_token = 0, stride_head = 0;
};

/// [H]. Null: absent.
struct HeadTensor {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t stride = 0;
};

/// [rows,Hv,K,V], or [rows,Hv,V,K] with `value_first`. Null: absent.
struct StateTensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int32_t value_first = 0;
  std::int64_t rows = 0;
  std::int64_t stride_row = 0, stride_head = 0, stride_outer = 0;  // outer: the dimension before the last
};

/// Indices in one or two dimensions. Null: absent.
struct IndexTensor {
  const void* data = nullptr;
  DType dtype = DType::i64;
  std::int64_t stride_0 = 0, stride_1 = 0;
  std::int64_t size_0 = 0, size_1 = 0;
};

/// What every operation has; the params of its kernels begin with it.
struct OperationParams {
  std::int32_t heads_qk, heads_v, group;  // group = heads_v / heads_qk
  std::int32_t dim_k, dim_v;
  float scale;
  float l2norm_eps;  // negative: no normalisation
  Gate gate;
  Beta beta_kind;
  TokenTensor q, k, v, o, g, beta;
  HeadTensor a_log, dt_bias;
};

/// What a kernel knows of the sequences. Sequences are cut into chunks of 64 tokens, counted from a sequence's start or, with a
/// shift, from `shift` tokens before it. The arrays are made on the device by kernels/schedule; without cu_seqlens and shifts
/// there are none, since every sequence is a batch entry of `tokens`.
struct SequenceTable {
  std::int32_t count = 0;
  std::int64_t tokens = 0;                // T
  std::int64_t chunk_bound = 0;           // no fewer chunks than there are
  const std::int64_t* offsets = nullptr;  // [count + 1]: first rows, never decreasing, inside [0, T]
  const std::int32_t* shifts = nullptr;   // [count]: 0 to 63; null: all 0
  const std::int64_t* chunks = nullptr;   // [count + 1]: chunks of all sequences before this one
  const std::int32_t* order = nullptr;    // [count]: longest first, roughly; null: as numbered
};

}  // namespace flashqla::cuda
