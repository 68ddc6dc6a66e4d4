// One head's state between the caller's memory (either layout, f32, bf16 or f16) and the form the chunk kernels work on: columns
// cut into slabs of kSlabVectors vectors, each slab f32 [padded K][its columns] and contiguous, so that it stays in the
// first-level cache. Rows from K on and columns from V on are zero. Included inside an instruction set's namespace, after
// rows.inl.
#pragma once

#include "cpu/kernels/rows.inl"

inline constexpr int kSlabVectors = 2;
inline constexpr std::int64_t kSlabColumns = kSlabVectors * kWidth;

/// Columns [begin, end) of V, cut into slabs; begin is a multiple of kSlabColumns.
struct SlabRange {
  std::int64_t begin, end;
  std::int64_t padded() const { return round_up(end - begin, kWidth); }
  std::int64_t slabs() const { return (end - begin + kSlabColumns - 1) / kSlabColumns; }
  /// Columns of slab s in scratch: kSlabColumns, or kWidth if no more are needed in the last.
  std::int64_t columns(std::int64_t s) const {
    const std::int64_t left = padded() - s * kSlabColumns;
    return left < kSlabColumns ? left : kSlabColumns;
  }
};

/// Slab s of a head's state starts at state + s * padded K * kSlabColumns.
inline void zero_state(float* state, const SlabRange& range, std::int64_t padded_k) {
  for (std::int64_t i = 0; i < range.padded() * padded_k; i += kWidth) store(state + i, zero());
}

/// Calls body(k, v, lanes, place) for each vector of a slab along V: row k, column v, its lanes inside V, its place in scratch.
template <class Body>
FLASHQLA_INLINE void for_slab_vectors(const SlabRange& range, std::int64_t rows, std::int64_t padded_k, Body body) {
  for (std::int64_t s = 0; s < range.slabs(); ++s) {
    const std::int64_t columns = range.columns(s);
    for (std::int64_t k = 0; k < rows; ++k) {
      for (std::int64_t c = 0; c < columns; c += kWidth) {
        const std::int64_t v = range.begin + s * kSlabColumns + c;
        body(k, v, lanes_left(range.end, v), (s * padded_k * kSlabColumns) + k * columns + c);
      }
    }
  }
}

/// Calls body(k, v, place, stride) for each kWidth x kWidth block: rows from k, columns from v, its first element and row stride
/// in scratch.
template <class Body>
FLASHQLA_INLINE void for_slab_blocks(const SlabRange& range, std::int64_t padded_k, Body body) {
  for (std::int64_t s = 0; s < range.slabs(); ++s) {
    const std::int64_t columns = range.columns(s);
    for (std::int64_t c = 0; c < columns; c += kWidth) {
      for (std::int64_t k = 0; k < padded_k; k += kWidth)
        body(k, range.begin + s * kSlabColumns + c, (s * padded_k * kSlabColumns) + k * columns + c, columns);
    }
  }
}

inline void load_state(const ConstStateView& view, std::int64_t row, std::int64_t head, std::int64_t dim_k, std::int64_t padded_k,
                       const SlabRange& range, float* state) {
  if (row < 0 || !view.present()) {
    zero_state(state, range, padded_k);
    return;
  }
  const std::byte* matrix = view.matrix(row, head);
  if (view.layout == StateLayout::key_value) {
    if (padded_k != dim_k) zero_state(state, range, padded_k);
    for_slab_vectors(range, dim_k, padded_k,
                     [&](std::int64_t k, std::int64_t v, int lanes, std::int64_t place) FLASHQLA_INLINE_LAMBDA {
                       store(state + place, load_any(matrix, view.dtype, k * view.stride_outer + v, lanes));
                     });
    return;
  }
  for_slab_blocks(
      range, padded_k, [&](std::int64_t k, std::int64_t v, std::int64_t place, std::int64_t stride) FLASHQLA_INLINE_LAMBDA {
        Vec block[kWidth];
        for (int i = 0; i < kWidth; ++i) {
          block[i] =
              v + i < range.end ? load_any(matrix, view.dtype, (v + i) * view.stride_outer + k, lanes_left(dim_k, k)) : zero();
        }
        transpose(block);
        for (int i = 0; i < kWidth; ++i) store(state + place + i * stride, block[i]);
      });
}

inline void store_state(const float* state, const SlabRange& range, std::int64_t dim_k, std::int64_t padded_k,
                        const MutableStateView& view, std::int64_t row, std::int64_t head) {
  if (row < 0 || !view.present()) return;
  std::byte* matrix = view.matrix(row, head);
  if (view.layout == StateLayout::key_value) {
    for_slab_vectors(range, dim_k, padded_k,
                     [&](std::int64_t k, std::int64_t v, int lanes, std::int64_t place) FLASHQLA_INLINE_LAMBDA {
                       store_any(matrix, view.dtype, k * view.stride_outer + v, lanes, load(state + place));
                     });
    return;
  }
  for_slab_blocks(range, padded_k,
                  [&](std::int64_t k, std::int64_t v, std::int64_t place, std::int64_t stride) FLASHQLA_INLINE_LAMBDA {
                    Vec block[kWidth];
                    for (int i = 0; i < kWidth; ++i) block[i] = load(state + place + i * stride);
                    transpose(block);
                    for (int i = 0; i < kWidth && v + i < range.end; ++i)
                      store_any(matrix, view.dtype, (v + i) * view.stride_outer + k, lanes_left(dim_k, k), block[i]);
                  });
}
