// Blocks that have a chunk and q/k head each, whatever they make of it.
#pragma once

#include "cuda/kernels/chunk_forward/params.hpp"
#include "cuda/views/views.cuh"

namespace flashqla::cuda {

/// The chunk of a block.
struct PreparedChunk {
  std::int64_t batch, token;  // of its first token
  std::int64_t index;         // among all chunks
  int tokens;
  std::int32_t head_qk;
};

/// The chunk and q/k head of the block; false past the last chunk, where only the number and the head are set.
FLASHQLA_DEVICE bool find_chunk(const ChunkForwardParams& p, PreparedChunk& chunk) {
  chunk.index = blockIdx.x / p.heads_qk;
  chunk.head_qk = static_cast<std::int32_t>(blockIdx.x % p.heads_qk);
  if (chunk.index >= chunk_count(p.sequences)) return false;
  const SequenceRows rows = sequence_rows(p.sequences, sequence_of_chunk(p.sequences, chunk.index));
  const std::int64_t number = chunk.index - rows.first_chunk;
  chunk.batch = rows.batch;
  chunk.token = rows.begin + rows.position(number);
  chunk.tokens = rows.tokens(number);
  return true;
}

/// Rows past the last offset belong to no sequence: o is zero there. Blocks past the last chunk take 64 of them each.
FLASHQLA_DEVICE void zero_slack(const ChunkForwardParams& p, std::int64_t idle, std::int32_t head_qk) {
  if (p.sequences.offsets == nullptr || p.o.data == nullptr) return;
  const std::int64_t first = p.sequences.offsets[p.sequences.count] + idle * kChunkTokens;
  const std::int64_t left = p.sequences.tokens - first, rows = left < kChunkTokens ? left : kChunkTokens;
  for (std::int64_t at = threadIdx.x; at < rows * p.group * p.dim_v; at += blockDim.x) {
    const std::int64_t v = at % p.dim_v, head = head_qk * p.group + at / p.dim_v % p.group, row = at / p.dim_v / p.group;
    store_scalar(p.o.data, p.o.dtype, offset_of(p.o, 0, first + row, head) + v, 0.0f);
  }
}

}  // namespace flashqla::cuda
