#include "cuda/kernels/chunk_forward/setup.hpp"

#include <string>

#include "flashqla/error.hpp"

namespace flashqla::cuda {

std::int64_t chunk_bound(const Problem& p, StoredStates stored) {
  if (!needs_table(p, stored)) return p.sequences() * ((p.tokens + kTokensPerChunk - 1) / kTokensPerChunk);
  const std::int64_t whole = p.packed ? p.tokens / kTokensPerChunk : p.sequences() * (p.tokens / kTokensPerChunk);
  return whole + 2 * p.sequences() + 1;  // a sequence with a prefix may begin and end inside a chunk
}

SequenceTable sequence_table(const Problem& p, StoredStates stored, const ScheduleArrays& arrays) {
  SequenceTable table;
  table.count = static_cast<std::int32_t>(p.sequences());
  table.tokens = p.tokens;
  table.chunk_bound = chunk_bound(p, stored);
  if (!needs_table(p, stored)) return table;
  table.offsets = p.packed ? arrays.offsets : nullptr;
  table.shifts = arrays.shifts;
  table.chunks = arrays.chunks;
  table.order = arrays.order;
  return table;
}

namespace {

/// Shared memory of a block that advances states; f32 has two stages whatever it is.
std::size_t shared_bytes(const Problem& p, std::int32_t padded_k, const AdvanceShape& shape, bool both_ways) {
  if (p.dtype != DType::f32) return advance_shared_bytes(padded_k, shape, both_ways);
  return advance_shared_bytes_f32(static_cast<std::int32_t>(p.dim_k), shape.tiles);
}

}  // namespace

std::int64_t advance_blocks(const Problem& p, const AdvanceShape& shape) {
  const std::int64_t slab = 16 * shape.tiles;
  return p.sequences() * p.heads_v * ((p.dim_v + slab - 1) / slab);
}

AdvanceShape advance_shape(const Problem& p, std::int32_t padded_k, const DeviceProperties& device, const ShapeLimits& limits,
                           const char* operation) {
  for (const int stages : {2, 1}) {
    for (const int tiles : {4, 2, 1}) {
      if (tiles > limits.most_tiles) continue;
      const AdvanceShape shape{tiles, stages};
      const bool fits = shared_bytes(p, padded_k, shape, limits.ways > 1) <= static_cast<std::size_t>(device.block_shared_bytes);
      // Half as many columns would be more blocks than multiprocessors.
      const bool enough = 2 * limits.together * advance_blocks(p, shape) > device.multiprocessors || tiles == 1;
      if (fits && enough && p.dim_v > 8 * tiles) return shape;
    }
  }
  throw Unsupported(operation + std::string(": ") + std::to_string(device.block_shared_bytes) +
                    " bytes of shared memory a block are too few for K = " + std::to_string(p.dim_k));
}

}  // namespace flashqla::cuda
