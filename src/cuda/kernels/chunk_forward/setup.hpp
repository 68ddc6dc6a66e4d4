// What the host works out alike for chunk_forward and chunk_backward.
#pragma once

#include "common/arguments.hpp"
#include "cuda/host/device.hpp"
#include "cuda/kernels/chunk_forward/start.hpp"
#include "cuda/kernels/schedule/schedule.hpp"

namespace flashqla::cuda {

/// Whether sequences need a table on the device.
inline bool needs_table(const Problem& p, StoredStates stored) { return p.packed || stored == StoredStates::every; }

/// No fewer chunks than the sequences of the problem can have; exact without a table. Packed, with one besides for the rows past
/// the last offset (prepare_kernel.cuh).
std::int64_t chunk_bound(const Problem& problem, StoredStates stored);

SequenceTable sequence_table(const Problem& problem, StoredStates stored, const ScheduleArrays& arrays);

/// Whether every row begins at a multiple of 16 bytes.
template <class Byte>
bool rows_aligned(const TokenView<Byte>& x, const Problem& p, std::int64_t heads) {
  const std::int64_t elements = 16 / element_bytes(p.dtype);
  const auto multiple = [&](std::int64_t size, std::int64_t stride) { return size <= 1 || stride % elements == 0; };
  return reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 && multiple(p.tokens, x.stride_token) &&
         multiple(heads, x.stride_head) && multiple(p.batch, x.stride_batch);
}

/// Starts what comes before prepare_chunks, and returns what that and the kernels after it receive, but for fields of the latter
/// alone.
ChunkForwardParams begin_chunk_forward(const ChunkForwardArguments& arguments, std::byte* workspace, Stream stream);
/// Starts prepare_chunks.
void start_prepare(const Problem& problem, const ChunkForwardParams& params, Stream stream);

struct ShapeLimits {
  int ways;        // 1: forth; 2: forth and back
  int together;    // times advance_blocks
  int most_tiles;  // 1, 2 or 4
};
/// Bytes of one chunk's and value head's unit (ChunkUnit, FloatUnit).
inline std::int64_t unit_bytes(DType dtype) { return dtype == DType::f32 ? FloatUnit::kFloats * 4 : ChunkUnit::kBytes; }

/// As many columns of V a block as leave every multiprocessor one, as far as its shared memory goes. Throws Unsupported, in the
/// name of `operation`, where that is too little.
AdvanceShape advance_shape(const Problem& problem, std::int32_t padded_k, const DeviceProperties& device,
                           const ShapeLimits& limits, const char* operation);
std::int64_t advance_blocks(const Problem& problem, const AdvanceShape& shape);

}  // namespace flashqla::cuda
