// Starts the kernels of chunk_backward. Plain C++: the instances are behind it.
#pragma once

#include "cuda/kernels/chunk_backward/params.hpp"

namespace flashqla::cuda {

/// Tiles of V a block of states_both_ways has at most.
constexpr int most_state_tiles(std::int32_t padded_k) { return padded_k == 256 ? 2 : 4; }

// For bf16 and f16, and a padded K. Return a cudaError_t.
int start_states_bf16_64(const ChunkBackwardParams& params, int tiles, std::int64_t blocks, void* stream);
int start_states_bf16_128(const ChunkBackwardParams& params, int tiles, std::int64_t blocks, void* stream);
int start_states_bf16_256(const ChunkBackwardParams& params, int tiles, std::int64_t blocks, void* stream);
int start_states_f16_64(const ChunkBackwardParams& params, int tiles, std::int64_t blocks, void* stream);
int start_states_f16_128(const ChunkBackwardParams& params, int tiles, std::int64_t blocks, void* stream);
int start_states_f16_256(const ChunkBackwardParams& params, int tiles, std::int64_t blocks, void* stream);
/// `most_shared`: bytes of shared memory that a block may have.
int start_gradients_bf16(const ChunkBackwardParams& params, std::int32_t padded_k, std::int64_t blocks, std::size_t most_shared,
                         void* stream);
int start_gradients_f16(const ChunkBackwardParams& params, std::int32_t padded_k, std::int64_t blocks, std::size_t most_shared,
                        void* stream);

int start_states_f32(const ChunkBackwardParams& params, int tiles, std::int64_t blocks, void* stream);
int start_gradients_f32(const ChunkBackwardParams& params, std::int32_t padded_k, std::int64_t blocks, void* stream);

int start_head_sums(const ChunkBackwardParams& params, void* stream);

}  // namespace flashqla::cuda
