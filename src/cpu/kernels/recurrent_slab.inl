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
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t stride = 0;
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
inline constexpr int kKeyRows = 8;           // rows of a key_value slab at a time, two vectors of columns after another

/// Distance of the prefetches in the first sweep, which goes over eight rows (of 512 bytes, say) side by side. States mostly come
/// from memory; a little more than the block at hand was best of 1 to 16 KB (Xeon, 2026: decode 1.08 and 1.22 times the time of
/// an in-place pass; at 2 KB 1.23 and 1.25).
inline constexpr std::int64_t kAheadBytes = 5120;
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

/// sum_k += k S and sum_q += q S over n rows, for kVectors vectors of columns.
template <class Rows, Source kSource, int kVectors>
FLASHQLA_INLINE void sum_columns(const typename Rows::Element* rows, std::int64_t stride, std::int64_t n, const float* k,
                                 const float* q, float* sum_k, float* sum_q) {
  Vec from_k[kVectors], from_q[kVectors];
  FLASHQLA_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    from_k[j] = load(sum_k + j * kWidth);
    from_q[j] = load(sum_q + j * kWidth);
  }
  FLASHQLA_UNROLL
  for (std::int64_t i = 0; i < n; ++i) {
    const typename Rows::Element* row = rows + i * stride;
    if (kSource == Source::memory) {
      constexpr auto kBytes = static_cast<std::int64_t>(kVectors * kWidth * sizeof(*row));
      FLASHQLA_UNROLL
      for (std::int64_t line = 0; line < kBytes; line += 64)
        __builtin_prefetch(reinterpret_cast<const std::byte*>(row) + kAheadBytes + line);
    }
    const Vec k_i = set1(k[i]), q_i = set1(q[i]);
    FLASHQLA_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const Vec s = in_register(Rows::read(row + j * kWidth));
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

/// The same for all columns. n is at most kKeyRows; the caller passes that as a constant where it can.
template <class Rows, Source kSource>
FLASHQLA_INLINE void sum_all_columns(const typename Rows::Element* rows, std::int64_t stride, std::int64_t n, std::int64_t width,
                                     const float* k, const float* q, float* sum_k, float* sum_q) {
  std::int64_t c = 0;
  for (; c + 2 * kWidth <= width; c += 2 * kWidth) sum_columns<Rows, kSource, 2>(rows + c, stride, n, k, q, sum_k + c, sum_q + c);
  if (c < width) sum_columns<Rows, kSource, 1>(rows + c, stride, n, k, q, sum_k + c, sum_q + c);
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
      const Vec s = in_register(Rows::read(rows + j * stride + i));
      sums[j] = fmadd(k_i, s, sums[j]);
      sums[kDotRows + j] = fmadd(q_i, s, sums[kDotRows + j]);
    }
  }
  store_halves(sum_k, sum_q, sum_each(sums));
}

/// One token of one slab: what the step reads and writes besides the state.
struct TokenStep {
  const float *k, *q;
  float decay, beta, scale, k_dot_q;
  const std::byte* v;  // the token's row of the head
  std::byte* o;
  DType v_dtype, o_dtype;
  std::int64_t column, columns;  // of the row: the slab's part
  float *sum_k, *sum_q, *e;      // [columns, padded to kWidth]
};

/// Between the sweeps: e and o of columns [begin, end) of the slab.
FLASHQLA_INLINE void finish_columns(const TokenStep& step, std::int64_t begin, std::int64_t end) {
  const Vec decay = set1(step.decay), beta = set1(step.beta);
  const Vec state_part = set1(step.scale * step.decay), new_part = set1(step.scale * step.k_dot_q);
  for (std::int64_t c = begin; c < end; c += kWidth) {
    const int n = lanes_left(end, c);
    const Vec e = mul(beta, fnmadd(decay, load(step.sum_k + c), load_any(step.v, step.v_dtype, step.column + c, n)));
    store(step.e + c, e);
    store_any(step.o, step.o_dtype, step.column + c, n, fmadd(new_part, e, mul(state_part, load(step.sum_q + c))));
  }
}

/// The second sweep: to = decay * from + across^T along for n rows, the last first, since it was used last. `to` may be `from`.
template <class FromRows, class ToRows>
FLASHQLA_INLINE void update_rows(const typename FromRows::Element* from, std::int64_t from_stride, typename ToRows::Element* to,
                                 std::int64_t to_stride, std::int64_t n, std::int64_t width, const float* along,
                                 const float* across, float decay) {
  const Vec decay_all = set1(decay);
  for (std::int64_t r = n - 1; r >= 0; --r) {
    const auto* from_row = from + r * from_stride;
    auto* to_row = to + r * to_stride;
    const Vec row_factor = set1(across[r]);
    const auto update = [&](std::int64_t i) FLASHQLA_INLINE_LAMBDA {
      ToRows::write(to_row + i, fmadd(load(along + i), row_factor, mul(decay_all, FromRows::read(from_row + i))));
    };
    std::int64_t i = 0;
    for (; i + 4 * kWidth <= width; i += 4 * kWidth) {
      FLASHQLA_UNROLL
      for (int j = 0; j < 4; ++j) update(i + j * kWidth);
    }
    for (; i < width; i += kWidth) update(i);
  }
}

/// Both sweeps with what lies between. Null `to`: the new state is not wanted. A value_key slab is done kWidth rows at a time, so
/// that the second sweep finds them in the first-level cache.
template <class FromRows, class ToRows, Source kSource>
inline void step_slab(const SlabShape& shape, const SlabRows& from, const SlabRows& to, const TokenStep& step) {
  const auto* from_data = reinterpret_cast<const typename FromRows::Element*>(from.data);
  auto* to_data = reinterpret_cast<typename ToRows::Element*>(to.data);
  const std::int64_t rows = shape.padded_rows, width = shape.padded_width;
  if (shape.layout == StateLayout::key_value) {
    for (std::int64_t c = 0; c < width; c += kWidth) {
      store(step.sum_k + c, zero());
      store(step.sum_q + c, zero());
    }
    std::int64_t i = 0;
    for (; i + kKeyRows <= rows; i += kKeyRows)
      sum_all_columns<FromRows, kSource>(from_data + i * from.stride, from.stride, kKeyRows, width, step.k + i, step.q + i,
                                         step.sum_k, step.sum_q);
    if (i < rows)
      sum_all_columns<FromRows, kSource>(from_data + i * from.stride, from.stride, rows - i, width, step.k + i, step.q + i,
                                         step.sum_k, step.sum_q);
    finish_columns(step, 0, step.columns);
    if (to_data != nullptr)
      update_rows<FromRows, ToRows>(from_data, from.stride, to_data, to.stride, rows, width, step.e, step.k, step.decay);
    return;
  }
  for (std::int64_t r = 0; r < rows; r += kWidth) {
    const std::int64_t n = rows - r < kWidth ? rows - r : kWidth;
    const auto* from_rows = from_data + r * from.stride;
    for (std::int64_t i = 0; i < n; i += kDotRows)
      sum_rows<FromRows, kSource>(from_rows + i * from.stride, from.stride, width, step.k, step.q, step.sum_k + r + i,
                                  step.sum_q + r + i);
    finish_columns(step, r, step.columns - r < n ? step.columns : r + n);
    if (to_data != nullptr)
      update_rows<FromRows, ToRows>(from_rows, from.stride, to_data + r * to.stride, to.stride, n, width, step.k, step.e + r,
                                    step.decay);
  }
}
