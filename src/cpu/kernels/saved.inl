// Leaving errors and states for chunk_backward (common/saved.hpp), in its panels: [panel of V][row][2 kWidth], a panel being a
// slab of the forward. Included inside an instruction set's namespace, after states.inl.
#pragma once

#include "cpu/kernels/states.inl"

/// Where the errors of a run of tokens of one value head go: `count` tokens make up the backward's chunk that holds them.
struct SavedErrors {
  float* chunk = nullptr;  // null: not wanted
  std::int64_t count = 0, first = 0;

  SavedErrors() = default;
  SavedErrors(const ChunkForwardArguments& arguments, std::int64_t sequence, std::int64_t position, std::int64_t head) {
    if (arguments.saved == nullptr) return;
    const SavedShape shape(arguments.inputs.problem);
    const Sequences& sequences = arguments.inputs.sequences;
    constexpr std::int64_t kChunk = SavedShape::kChunkTokens;
    const std::int64_t begin = position / kChunk * kChunk, left = sequences.length(sequence) - begin;
    const std::int64_t row = sequences.batch(sequence) * sequences.tokens + sequences.begin(sequence) + begin;
    count = left < kChunk ? left : kChunk;
    first = position - begin;
    chunk = arguments.saved + shape.errors_at(row, count, head);
  }

  /// Rows of the slab that starts at column `column` of V, from e [n][kVectors vectors].
  template <int kVectors>
  FLASHQLA_INLINE void store_slab(std::int64_t column, std::int64_t n, const float* e) const {
    if (chunk == nullptr) return;
    float* to = chunk + column * count + first * kSlabColumns;
    for (std::int64_t t = 0; t < n; ++t) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kSlabVectors; ++j) {
        store(to + t * kSlabColumns + j * kWidth, j < kVectors ? load(e + (t * kVectors + j) * kWidth) : zero());
      }
    }
  }
};

/// Zeros in the parts that nothing else writes.
inline void zero_unsaved(const ChunkForwardArguments& arguments) {
  const SavedShape shape(arguments.inputs.problem);
  const Sequences& sequences = arguments.inputs.sequences;
  const auto zero_range = [&](std::int64_t from, std::int64_t to) {
    __builtin_memset(arguments.saved + from, 0, static_cast<std::size_t>(to - from) * sizeof(float));
  };
  if (round_up(arguments.inputs.problem.dim_v, kSlabColumns) < shape.padded_v) zero_range(0, shape.elements());
  std::int64_t next = 0;
  for (std::int64_t n = 0; n < sequences.count; ++n) {
    const std::int64_t places = SavedShape::places_of(sequences.length(n));
    if (places == 0) continue;
    const std::int64_t first = (sequences.batch(n) * sequences.tokens + sequences.begin(n)) / SavedShape::kSegmentTokens;
    zero_range(shape.place_at(next), shape.place_at(first));
    next = first + places;
  }
  zero_range(shape.place_at(next), shape.place_at(shape.places()));
  if (sequences.packed()) zero_range(shape.errors_at(sequences.end(), 0, 0), shape.elements());
}

/// A head's state before the token at `position` of a sequence, where a segment begins; `state` in slabs of `range`.
inline void save_state(const ChunkForwardArguments& arguments, std::int64_t sequence, std::int64_t position, std::int64_t head,
                       const float* state, const SlabRange& range, std::int64_t padded_k) {
  const SavedShape shape(arguments.inputs.problem);
  const Sequences& sequences = arguments.inputs.sequences;
  const std::int64_t row = sequences.batch(sequence) * sequences.tokens + sequences.begin(sequence);
  const bool aligned = reinterpret_cast<std::uintptr_t>(arguments.saved) % 64 == 0;
  float* const to = arguments.saved + shape.state_at(row, position / SavedShape::kSegmentTokens, head);
  for (std::int64_t s = 0; s < range.slabs(); ++s) {
    const float* from = state + s * padded_k * kSlabColumns;
    float* panel = to + (range.begin + s * kSlabColumns) * shape.padded_k;
    const std::int64_t columns = range.columns(s);
    for (std::int64_t k = 0; k < shape.padded_k; ++k) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kSlabVectors; ++j) {
        const bool there = k < padded_k && j * kWidth < columns;
        const Vec vec = there ? load(from + k * columns + j * kWidth) : zero();
        aligned ? store_stream(panel + k * kSlabColumns + j * kWidth, vec) : store(panel + k * kSlabColumns + j * kWidth, vec);
      }
    }
  }
  finish_streams();
}
