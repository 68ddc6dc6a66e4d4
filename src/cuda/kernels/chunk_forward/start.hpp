// Starts the kernels of chunk_forward. Plain C++: the instances are behind it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/chunk_forward/params.hpp"

namespace flashqla::cuda {

/// How a block that advances states is made: columns of V in tiles of 16 (1, 2 or 4), and stages of rows (1 or 2).
struct AdvanceShape {
  int tiles, stages;
};

/// Its shared memory (AdvanceShared). `both_ways`: of states_both_ways.
constexpr std::size_t advance_shared_bytes(std::int32_t padded_k, const AdvanceShape& shape, bool both_ways) {
  constexpr std::size_t kUnit = (ChunkUnit::kBytes + 127) / 128 * 128;
  const std::size_t exchange = (padded_k == 256 ? 16384 : 8192) + 64 + (both_ways ? 4096 : 0);
  const std::size_t exchanges = (static_cast<std::size_t>(shape.tiles) * exchange + 127) / 128 * 128;
  const std::size_t row = kTokensPerChunk * 2, slab = static_cast<std::size_t>(shape.tiles) * 16;
  const std::size_t stage = 2 * row * static_cast<std::size_t>(padded_k) + row * slab + kUnit;
  return exchanges + static_cast<std::size_t>(shape.stages) * stage;
}

/// The same for f32 (FloatAdvance), which always has two stages.
constexpr std::size_t advance_shared_bytes_f32(std::int32_t dim_k, int tiles) {
  constexpr std::size_t kStages = 2 * 2 * 64 * 36;
  const auto rows = static_cast<std::size_t>((dim_k + 31) / 32 * 32 + 2 * kTokensPerChunk),
             slab = static_cast<std::size_t>(tiles) * 16;
  return (rows * (slab + 4) + kStages) * sizeof(float);
}

// The same for bf16 and f16. Return a cudaError_t.
int start_prepare_bf16(const ChunkForwardParams& params, std::int32_t padded_k, std::int64_t blocks, void* stream);
int start_prepare_f16(const ChunkForwardParams& params, std::int32_t padded_k, std::int64_t blocks, void* stream);
int start_extras_bf16(const ChunkForwardParams& params, std::int32_t padded_k, std::int64_t blocks, void* stream);
int start_extras_f16(const ChunkForwardParams& params, std::int32_t padded_k, std::int64_t blocks, void* stream);
int start_advance_bf16(const ChunkForwardParams& params, std::int32_t padded_k, int tiles, std::int64_t blocks, void* stream);
int start_advance_f16(const ChunkForwardParams& params, std::int32_t padded_k, int tiles, std::int64_t blocks, void* stream);

// advance_states_hopper: a block has 64 columns of V and so many bytes of shared memory, two neighbours are a cluster.
inline constexpr int kHopperSharedBytes = 214016;
int start_advance_hopper_bf16(const ChunkForwardParams& params, const ChunkForwardMaps& maps, std::int64_t blocks, void* stream);
int start_advance_hopper_f16(const ChunkForwardParams& params, const ChunkForwardMaps& maps, std::int64_t blocks, void* stream);
/// Whether this library has code for the current device's copy engine and WGMMA.
bool has_hopper_code();

// For f32, any K.
int start_prepare_f32(const ChunkForwardParams& params, std::int64_t blocks, void* stream);
int start_extras_f32(const ChunkForwardParams& params, std::int64_t blocks, void* stream);
int start_advance_f32(const ChunkForwardParams& params, int tiles, std::int64_t blocks, void* stream);

}  // namespace flashqla::cuda
