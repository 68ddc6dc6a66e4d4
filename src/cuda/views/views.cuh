// Reading and writing through the views of views.hpp on the device.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx/shared.cuh"
#include "cuda/views/views.hpp"

namespace flashqla::cuda {

inline constexpr int kChunkTokens = 64;

/// Element `index` of an array of f32, bf16 or f16.
FLASHQLA_DEVICE float load_scalar(const void* data, DType dtype, std::int64_t index) {
  if (dtype == DType::f32) return static_cast<const float*>(data)[index];
  if (dtype == DType::bf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
  return __half2float(static_cast<const __half*>(data)[index]);
}
/// Calls body(elements) with the array as what it is an array of.
template <class Body>
FLASHQLA_DEVICE void with_elements(const void* data, DType dtype, const Body& body) {
  if (dtype == DType::f32) {
    body(static_cast<const float*>(data));
  } else if (dtype == DType::bf16) {
    body(static_cast<const __nv_bfloat16*>(data));
  } else {
    body(static_cast<const __half*>(data));
  }
}
FLASHQLA_DEVICE float to_float(float x) { return x; }
FLASHQLA_DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
FLASHQLA_DEVICE float to_float(__half x) { return __half2float(x); }

FLASHQLA_DEVICE void store_scalar(void* data, DType dtype, std::int64_t index, float value) {
  if (dtype == DType::f32) {
    static_cast<float*>(data)[index] = value;
  } else if (dtype == DType::bf16) {
    static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
  } else {
    static_cast<__half*>(data)[index] = __float2half_rn(value);
  }
}

FLASHQLA_DEVICE std::int64_t load_index(const IndexTensor& x, std::int64_t i, std::int64_t j = 0) {
  const std::int64_t at = i * x.stride_0 + j * x.stride_1;
  return x.dtype == DType::i64 ? static_cast<const std::int64_t*>(x.data)[at] : static_cast<const std::int32_t*>(x.data)[at];
}

FLASHQLA_DEVICE std::int64_t offset_of(const TokenTensor& x, std::int64_t batch, std::int64_t token, std::int64_t head) {
  return batch * x.stride_batch + token * x.stride_token + head * x.stride_head;
}

/// A sequence's rows.
struct SequenceRows {
  std::int64_t batch, begin, length;  // rows [begin, begin + length) of the batch entry
  std::int64_t first_chunk;           // among the chunks of all sequences
  int shift;

  FLASHQLA_DEVICE std::int64_t chunks() const { return length > 0 ? (shift + length + kChunkTokens - 1) / kChunkTokens : 0; }
  /// Position in the sequence of a chunk's first token, and its number of tokens.
  FLASHQLA_DEVICE std::int64_t position(std::int64_t chunk) const { return chunk == 0 ? 0 : chunk * kChunkTokens - shift; }
  FLASHQLA_DEVICE int tokens(std::int64_t chunk) const {
    const std::int64_t end = (chunk + 1) * kChunkTokens - shift;
    return static_cast<int>((end < length ? end : length) - position(chunk));
  }
};

FLASHQLA_DEVICE SequenceRows sequence_rows(const SequenceTable& table, std::int64_t n) {
  const int shift = table.shifts != nullptr ? table.shifts[n] : 0;
  if (table.offsets != nullptr) return {0, table.offsets[n], table.offsets[n + 1] - table.offsets[n], table.chunks[n], shift};
  const std::int64_t chunks = (table.tokens + kChunkTokens - 1) / kChunkTokens;
  return {n, 0, table.tokens, table.chunks != nullptr ? table.chunks[n] : n * chunks, shift};
}

/// Chunks of all sequences.
FLASHQLA_DEVICE std::int64_t chunk_count(const SequenceTable& table) {
  return table.chunks != nullptr ? table.chunks[table.count] : table.chunk_bound;
}

/// The sequence that a chunk, numbered among all, belongs to.
FLASHQLA_DEVICE std::int64_t sequence_of_chunk(const SequenceTable& table, std::int64_t chunk) {
  if (table.chunks == nullptr) {  // fewer than 2^31 chunks: the host has seen to it
    return static_cast<std::uint32_t>(chunk) / static_cast<std::uint32_t>((table.tokens + kChunkTokens - 1) / kChunkTokens);
  }
  std::int64_t low = 0, high = table.count;  // chunks[low] <= chunk < chunks[high]
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    if (table.chunks[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace flashqla::cuda
