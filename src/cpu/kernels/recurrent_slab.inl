// The two sweeps of a recurrent step over a slab of the state. Included inside an instruction set's namespace, after rows.inl.
//
// A slab lies as the caller's state does: key_value has a row for each k (row = columns of V), value_key a row for each column of
// V (row = all of K). The sweeps read and write f32, bf16 or f16 and compute in f32. Sums run over k in an order that depends on
// the layout and on K alone: one k after another for each column (key_value), or lane by lane and then across the lanes
// (value_key).

/// How rows lie in memory.
struct F32Rows {
  using Element = float;
  static FLASHQLA_INLINE Vec read(const float* p) { return load(p); }
  static FLASHQLA_INLINE void write(float* p, Vec a) { store(p, a); }
};
struct Bf16Rows {
  using Element = std::uint16_t;
  static FLASHQLA_INLINE Vec read(const std::uint16_t* p) { return load_bf16(p); }
  static FLASHQLA_INLINE void write(std::uint16_t* p, Vec a) { store_bf16(p, a); }
};
struct F16Rows {
  using Element = std::uint16_t;
  static FLASHQLA_INLINE Vec read(const std::uint16_t* p) { return load_f16(p); }
  static FLASHQLA_INLINE void write(std::uint16_t* p, Vec a) { store_f16(p, a); }
};

/// Rows of a slab; `stride` in elements.
struct SlabRows {
  std::byte* data;
  DType dtype;
  std::int64_t stride;
};

/// Rows and row length of a slab as the caller has it, and as the sweeps take it.
struct SlabShape {
  StateLayout layout;
  std::int64_t rows, width;
  std::int64_t padded_rows, padded_width;

  /// Whether the sweeps may work on the caller's memory.
  bool exact() const { return rows == padded_rows && width == padded_width; }
};

inline constexpr int kDotRows = kWidth / 2;  // rows of a value_key slab at a time: with k and q, kWidth sums
inline constexpr int kColumnVectors =
    kRegisters / 4;  // vectors of columns of a key_value slab at a time: half the registers hold sums
inline constexpr int kRowsAtOnce =
    8;  // rows of a key_value slab before the next columns: keeps the accesses to memory nearly in order

/// Distance of the prefetches in the first sweep. States mostly come from memory; further ahead than half a page was slower
/// (Xeon, 2 KB best of 1 to 64).
inline constexpr std::int64_t kAheadBytes = 2048;
enum class Source { memory, cache };

inline SlabShape slab_shape(StateLayout layout, std::int64_t dim_k, std::int64_t columns) {
  if (layout == StateLayout::key_value) return {layout, dim_k, columns, dim_k, round_up(columns, kWidth)};
  return {layout, columns, dim_k, round_up(columns, kDotRows), round_up(dim_k, kWidth)};
}

/// Caller's memory to padded f32 rows, zeros in the padding.
inline void load_slab(const SlabShape& shape, const SlabRows& from, const SlabRows& to) {
  for (std::int64_t r = 0; r < shape.padded_rows; ++r) {
    float* row = reinterpret_cast<float*>(to.data) + r * to.stride;
    if (r < shape.rows) {
      load_row(from.data + r * from.stride * element_bytes(from.dtype), from.dtype, shape.width, shape.padded_width, row);
    } else {
      for (std::int64_t i = 0; i < shape.padded_width; i += kWidth) store(row + i, zero());
    }
  }
}

/// f32 or any other rows to the caller's memory, rounded to its dtype.
inline void store_slab(const SlabShape& shape, const SlabRows& from, const SlabRows& to) {
  for (std::int64_t r = 0; r < shape.rows; ++r) {
    const std::byte* from_row = from.data + r * from.stride * element_bytes(from.dtype);
    std::byte* to_row = to.data + r * to.stride * element_bytes(to.dtype);
    for (std::int64_t i = 0; i < shape.width; i += kWidth) {
      const int n = lanes_left(shape.width, i);
      store_any(to_row, to.dtype, i, n, load_any(from_row, from.dtype, i, n));
    }
  }
}

template <int kNumber>
struct VectorCount {
  static constexpr int kValue = kNumber;
};

/// Calls f(first column, VectorCount) so that blocks of kColumnVectors vectors and a smaller last one cover all columns.
template <class Function>
FLASHQLA_INLINE void for_column_blocks(std::int64_t padded_width, Function f) {
  std::int64_t c = 0;
  for (; c + kColumnVectors * kWidth <= padded_width; c += kColumnVectors * kWidth) f(c, VectorCount<kColumnVectors>{});
  if (kColumnVectors > 4 && c + 4 * kWidth <= padded_width) {
    f(c, VectorCount<4>{});
    c += 4 * kWidth;
  }
  for (; c + 2 * kWidth <= padded_width; c += 2 * kWidth) f(c, VectorCount<2>{});
  if (c < padded_width) f(c, VectorCount<1>{});
}

/// sum_k += k S and sum_q += q S over n rows, for kVectors vectors of columns; the sums start from zero if `first`.
template <class Rows, Source kSource, int kVectors>
FLASHQLA_INLINE void sum_columns(const typename Rows::Element* rows, std::int64_t stride, std::int64_t n, const float* k,
                                 const float* q, float* sum_k, float* sum_q) {
  Vec from_k[kVectors], from_q[kVectors];
  FLASHQLA_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    from_k[j] = load(sum_k + j * kWidth);
    from_q[j] = load(sum_q + j * kWidth);
  }
  for (std::int64_t i = 0; i < n; ++i, rows += stride) {
    if (kSource == Source::memory) {
      constexpr std::int64_t kBytes = kVectors * kWidth * static_cast<std::int64_t>(sizeof(*rows));
      FLASHQLA_UNROLL
      for (std::int64_t line = 0; line < kBytes; line += 64)
        __builtin_prefetch(reinterpret_cast<const std::byte*>(rows) + kAheadBytes + line);
    }
    const Vec k_i = set1(k[i]), q_i = set1(q[i]);
    FLASHQLA_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const Vec s = Rows::read(rows + j * kWidth);
      from_k[j] = fmadd(k_i, s, from_k[j]);
      from_q[j] = fmadd(q_i, s, from_q[j]);
    }
  }
  FLASHQLA_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    store(sum_k + j * kWidth, from_k[j]);
    store(sum_q + j * kWidth, from_q[j]);
  }
}

/// sum_k = k S and sum_q = q S of kDotRows rows of a value_key slab.
template <class Rows, Source kSource>
FLASHQLA_INLINE void sum_rows(const typename Rows::Element* rows, std::int64_t stride, std::int64_t width, const float* k,
                              const float* q, float* sum_k, float* sum_q) {
  Vec sums[kWidth];  // k S of kDotRows rows, then q S
  FLASHQLA_UNROLL
  for (int j = 0; j < kWidth; ++j) sums[j] = zero();
  constexpr auto kLine = static_cast<std::int64_t>(64 / sizeof(*rows));
  for (std::int64_t i = 0; i < width; i += kWidth) {
    if (kSource == Source::memory && i % kLine == 0) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kDotRows; ++j)
        __builtin_prefetch(reinterpret_cast<const std::byte*>(rows + j * stride + i) + kAheadBytes);
    }
    const Vec k_i = load(k + i), q_i = load(q + i);
    FLASHQLA_UNROLL
    for (int j = 0; j < kDotRows; ++j) {
      const Vec s = Rows::read(rows + j * stride + i);
      sums[j] = fmadd(k_i, s, sums[j]);
      sums[kDotRows + j] = fmadd(q_i, s, sums[kDotRows + j]);
    }
  }
  store_halves(sum_k, sum_q, sum_each(sums));
}

/// The first sweep: sum_k = k S and sum_q = q S for every column.
template <class Rows, Source kSource>
inline void sweep_sums(const SlabShape& shape, const SlabRows& slab, const float* k, const float* q, float* sum_k, float* sum_q) {
  const auto* data = reinterpret_cast<const typename Rows::Element*>(slab.data);
  if (shape.layout == StateLayout::value_key) {
    for (std::int64_t r = 0; r < shape.padded_rows; r += kDotRows)
      sum_rows<Rows, kSource>(data + r * slab.stride, slab.stride, shape.padded_width, k, q, sum_k + r, sum_q + r);
    return;
  }
  for (std::int64_t c = 0; c < shape.padded_width; c += kWidth) {
    store(sum_k + c, zero());
    store(sum_q + c, zero());
  }
  for (std::int64_t i = 0; i < shape.rows; i += kRowsAtOnce) {
    const std::int64_t n = shape.rows - i < kRowsAtOnce ? shape.rows - i : kRowsAtOnce;
    for_column_blocks(shape.padded_width, [&](std::int64_t c, auto count) FLASHQLA_INLINE_LAMBDA {
      sum_columns<Rows, kSource, decltype(count)::kValue>(data + i * slab.stride + c, slab.stride, n, k + i, q + i, sum_k + c,
                                                          sum_q + c);
    });
  }
}

/// The second sweep: to = decay * from + k^T e, last row first, since it was used last. `to` may be `from`.
template <class FromRows, class ToRows>
inline void sweep_update(const SlabShape& shape, const SlabRows& from, const SlabRows& to, const float* k, const float* e,
                         float decay) {
  const auto* from_data = reinterpret_cast<const typename FromRows::Element*>(from.data);
  auto* to_data = reinterpret_cast<typename ToRows::Element*>(to.data);
  // Along a row: the factor that changes, and the one that stays.
  const bool key_rows = shape.layout == StateLayout::key_value;
  const float *along = key_rows ? e : k, *across = key_rows ? k : e;
  const Vec decay_all = set1(decay);
  for (std::int64_t r = shape.padded_rows - 1; r >= 0; --r) {
    const auto* from_row = from_data + r * from.stride;
    auto* to_row = to_data + r * to.stride;
    const Vec row_factor = set1(across[r]);
    for (std::int64_t i = 0; i < shape.padded_width; i += kWidth)
      ToRows::write(to_row + i, fmadd(load(along + i), row_factor, mul(decay_all, FromRows::read(from_row + i))));
  }
}
