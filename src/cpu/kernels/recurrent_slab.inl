// The two sweeps of a recurrent step over a slab of the state. Included inside an instruction set's namespace, after rows.inl.
//
// A slab lies as the caller's state does: key_value has a row for each k (row = columns of V), value_key a row for each column of
// V (row = all of K). The sweeps read and write f32, bf16 or f16 and compute in f32. Sums run over k in an order that depends on
// the layout and on K alone: one k after another for each column (key_value), or lane by lane and then across the lanes
// (value_key).

/// How rows lie in memory. "two": vectors that lie one after the other.
struct F32Rows {
  using Element = float;
  static FLASHQLA_INLINE Vec read(const float* p) { return load(p); }
  static FLASHQLA_INLINE void write(float* p, Vec a) { store(p, a); }
  static FLASHQLA_INLINE void read_two(const float* p, Vec& a, Vec& b) {
    a = load(p);
    b = load(p + kWidth);
  }
  static FLASHQLA_INLINE void write_two(float* p, Vec a, Vec b) {
    store(p, a);
    store(p + kWidth, b);
  }
};
struct Bf16Rows {
  using Element = std::uint16_t;
  static FLASHQLA_INLINE Vec read(const std::uint16_t* p) { return load_bf16(p); }
  static FLASHQLA_INLINE void write(std::uint16_t* p, Vec a) { store_bf16(p, a); }
  static FLASHQLA_INLINE void read_two(const std::uint16_t* p, Vec& a, Vec& b) { load_bf16_two(p, a, b); }
  static FLASHQLA_INLINE void write_two(std::uint16_t* p, Vec a, Vec b) { store_bf16_two(p, a, b); }
};
struct F16Rows {
  using Element = std::uint16_t;
  static FLASHQLA_INLINE Vec read(const std::uint16_t* p) { return load_f16(p); }
  static FLASHQLA_INLINE void write(std::uint16_t* p, Vec a) { store_f16(p, a); }
  static FLASHQLA_INLINE void read_two(const std::uint16_t* p, Vec& a, Vec& b) {
    a = load_f16(p);
    b = load_f16(p + kWidth);
  }
  static FLASHQLA_INLINE void write_two(std::uint16_t* p, Vec a, Vec b) {
    store_f16(p, a);
    store_f16(p + kWidth, b);
  }
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

/// How the sweeps go over a slab. No bit of a result depends on it.
enum class Walk {
  side_by_side,      // several rows at a time; the second sweep starts with the last row
  side_by_side_far,  // the same, with prefetches: the slab is in memory
  in_order,          // as the rows lie in memory, which is all that the hardware's prefetching needs
};

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
template <class Rows, Walk kWalk, int kVectors>
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
    if (kWalk == Walk::side_by_side_far) {
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

/// The same for all columns, kVectors vectors after another. The caller passes n as a constant where it can.
template <class Rows, Walk kWalk, int kVectors>
FLASHQLA_INLINE void sum_all_columns(const typename Rows::Element* rows, std::int64_t stride, std::int64_t n, std::int64_t width,
                                     const float* k, const float* q, float* sum_k, float* sum_q) {
  std::int64_t c = 0;
  for (; c + kVectors * kWidth <= width; c += kVectors * kWidth)
    sum_columns<Rows, kWalk, kVectors>(rows + c, stride, n, k, q, sum_k + c, sum_q + c);
  for (; c < width; c += kWidth) sum_columns<Rows, kWalk, 1>(rows + c, stride, n, k, q, sum_k + c, sum_q + c);
}

/// sum_k = k S and sum_q = q S of a key_value slab, one row after another, for a width of kVectors vectors: the sums stay in
/// registers.
template <class Rows, int kVectors>
FLASHQLA_INLINE void sum_whole_rows(const typename Rows::Element* rows, std::int64_t stride, std::int64_t n, const float* k,
                                    const float* q, float* sum_k, float* sum_q) {
  Vec from_k[kVectors], from_q[kVectors];
  FLASHQLA_UNROLL
  for (int j = 0; j < kVectors; ++j) from_k[j] = from_q[j] = zero();
  FLASHQLA_NO_UNROLL
  for (std::int64_t i = 0; i < n; ++i, rows += stride) {
    const Vec k_i = set1(k[i]), q_i = set1(q[i]);
    FLASHQLA_UNROLL
    for (int j = 0; j < kVectors; j += 2) {
      Vec s[2];
      Rows::read_two(rows + j * kWidth, s[0], s[1]);
      FLASHQLA_UNROLL
      for (int l = 0; l < 2; ++l) {
        s[l] = in_register(s[l]);
        from_k[j + l] = fmadd(k_i, s[l], from_k[j + l]);
        from_q[j + l] = fmadd(q_i, s[l], from_q[j + l]);
      }
    }
  }
  FLASHQLA_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    store(sum_k + j * kWidth, from_k[j]);
    store(sum_q + j * kWidth, from_q[j]);
  }
}

/// The same for any width, in any walk.
template <class Rows, Walk kWalk>
FLASHQLA_INLINE void sum_slab_columns(const typename Rows::Element* rows, std::int64_t stride, std::int64_t n, std::int64_t width,
                                      const float* k, const float* q, float* sum_k, float* sum_q) {
  constexpr bool kInOrder = kWalk == Walk::in_order;
  if (kInOrder && kRegisters >= 32 && width == 8 * kWidth) return sum_whole_rows<Rows, 8>(rows, stride, n, k, q, sum_k, sum_q);
  if (kInOrder && width == 4 * kWidth) return sum_whole_rows<Rows, 4>(rows, stride, n, k, q, sum_k, sum_q);
  for (std::int64_t c = 0; c < width; c += kWidth) {
    store(sum_k + c, zero());
    store(sum_q + c, zero());
  }
  constexpr int kRows = kInOrder ? 1 : kKeyRows, kVectors = kInOrder ? 4 : 2;
  std::int64_t i = 0;
  for (; i + kRows <= n; i += kRows)
    sum_all_columns<Rows, kWalk, kVectors>(rows + i * stride, stride, kRows, width, k + i, q + i, sum_k, sum_q);
  if (i < n) sum_all_columns<Rows, kWalk, kVectors>(rows + i * stride, stride, n - i, width, k + i, q + i, sum_k, sum_q);
}

/// sums[j] = k S and sums[kDotRows + j] = q S of kDotRows rows, side by side.
template <class Rows, Walk kWalk>
FLASHQLA_INLINE void dot_side_by_side(const typename Rows::Element* rows, std::int64_t stride, std::int64_t width, const float* k,
                                      const float* q, Vec (&sums)[kWidth]) {
  constexpr auto kLine = static_cast<std::int64_t>(64 / sizeof(*rows));
  FLASHQLA_UNROLL
  for (int j = 0; j < kWidth; ++j) sums[j] = zero();
  for (std::int64_t i = 0; i < width; i += kWidth) {
    if (kWalk == Walk::side_by_side_far && i % kLine == 0) {
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
}

/// The same, one row after another, for rows of kVectors vectors: k and q stay in registers.
template <class Rows, int kVectors>
FLASHQLA_INLINE void dot_whole_rows(const typename Rows::Element* rows, std::int64_t stride, const float* k, const float* q,
                                    Vec (&sums)[kWidth]) {
  Vec all_k[kVectors], all_q[kVectors];
  FLASHQLA_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    all_k[i] = in_register(load(k + i * kWidth));
    all_q[i] = in_register(load(q + i * kWidth));
  }
  FLASHQLA_NO_UNROLL
  for (int j = 0; j < kDotRows; ++j, rows += stride) {
    Vec from_k = zero(), from_q = zero();
    FLASHQLA_UNROLL
    for (int i = 0; i < kVectors; i += 2) {
      Vec s[2];
      Rows::read_two(rows + i * kWidth, s[0], s[1]);
      FLASHQLA_UNROLL
      for (int l = 0; l < 2; ++l) {
        s[l] = in_register(s[l]);
        from_k = fmadd(all_k[i + l], s[l], from_k);
        from_q = fmadd(all_q[i + l], s[l], from_q);
      }
    }
    sums[j] = from_k;
    sums[kDotRows + j] = from_q;
  }
}

/// The same for any width.
template <class Rows>
FLASHQLA_INLINE void dot_in_order(const typename Rows::Element* rows, std::int64_t stride, std::int64_t width, const float* k,
                                  const float* q, Vec (&sums)[kWidth]) {
  FLASHQLA_NO_UNROLL
  for (int j = 0; j < kDotRows; ++j, rows += stride) {
    Vec from_k = zero(), from_q = zero();
    for (std::int64_t i = 0; i < width; i += kWidth) {
      const Vec s = in_register(Rows::read(rows + i));
      from_k = fmadd(load(k + i), s, from_k);
      from_q = fmadd(load(q + i), s, from_q);
    }
    sums[j] = from_k;
    sums[kDotRows + j] = from_q;
  }
}

/// sum_k = k S and sum_q = q S of kDotRows rows of a value_key slab.
template <class Rows, Walk kWalk>
FLASHQLA_INLINE void sum_rows(const typename Rows::Element* rows, std::int64_t stride, std::int64_t width, const float* k,
                              const float* q, float* sum_k, float* sum_q) {
  Vec sums[kWidth];  // k S of kDotRows rows, then q S
  if constexpr (kWalk != Walk::in_order) {
    dot_side_by_side<Rows, kWalk>(rows, stride, width, k, q, sums);
  } else if (kRegisters >= 32 && width == 8 * kWidth) {
    dot_whole_rows<Rows, 8>(rows, stride, k, q, sums);
  } else {
    dot_in_order<Rows>(rows, stride, width, k, q, sums);
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
  const std::byte* next;         // the state that will be read after this one, from its first byte; may be null
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

/// The second sweep: to = decay * from + across^T along for n rows. `to` may be `from`. Side by side the last row comes first,
/// since it was used last; in order the first, and the beginning of `next` is asked for meanwhile: a byte for each number, a
/// quarter of an f32 slab (EPYC Zen 4: nothing to all of it tried), half of a 16-bit one. kVectors: vectors of a row, or 0 for
/// any width.
template <class FromRows, class ToRows, Walk kWalk, int kVectors>
FLASHQLA_INLINE void update_rows_of(const typename FromRows::Element* from, std::int64_t from_stride,
                                    typename ToRows::Element* to, std::int64_t to_stride, std::int64_t n, std::int64_t width,
                                    const float* along, const float* across, float decay, const std::byte* next) {
  constexpr int kAtOnce = kVectors == 0 ? 4 : kVectors;
  const std::int64_t next_bytes = round_up(width, 64);
  const Vec decay_all = set1(decay);
  Vec along_all[kAtOnce];
  FLASHQLA_UNROLL
  for (int j = 0; j < kVectors; ++j) along_all[j] = load(along + j * kWidth);
  FLASHQLA_NO_UNROLL
  for (std::int64_t done = 0; done < n; ++done) {
    const std::int64_t r = kWalk == Walk::in_order ? done : n - 1 - done;
    const auto* from_row = from + r * from_stride;
    auto* to_row = to + r * to_stride;
    const Vec factor = set1(across[r]);
    if (kWalk == Walk::in_order && next != nullptr)
      for (std::int64_t line = 0; line < next_bytes; line += 64) prefetch_far(next + r * next_bytes + line);
    const auto updated = [&](Vec old, Vec along_i) FLASHQLA_INLINE_LAMBDA { return fmadd(along_i, factor, mul(decay_all, old)); };
    std::int64_t i = 0;
    for (; i + kAtOnce * kWidth <= width; i += kAtOnce * kWidth) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kAtOnce; j += 2) {
        Vec a, b;
        FromRows::read_two(from_row + i + j * kWidth, a, b);
        const Vec along_a = kVectors != 0 ? along_all[j] : load(along + i + j * kWidth);
        const Vec along_b = kVectors != 0 ? along_all[j + 1] : load(along + i + (j + 1) * kWidth);
        ToRows::write_two(to_row + i + j * kWidth, updated(a, along_a), updated(b, along_b));
      }
    }
    for (; i < width; i += kWidth) ToRows::write(to_row + i, updated(FromRows::read(from_row + i), load(along + i)));
  }
}

template <class FromRows, class ToRows, Walk kWalk>
FLASHQLA_INLINE void update_rows(const typename FromRows::Element* from, std::int64_t from_stride, typename ToRows::Element* to,
                                 std::int64_t to_stride, std::int64_t n, std::int64_t width, const float* along,
                                 const float* across, float decay, const std::byte* next) {
  constexpr int kWhole = 8;
  if (kRegisters >= 32 && width == kWhole * kWidth)
    return update_rows_of<FromRows, ToRows, kWalk, kWhole>(from, from_stride, to, to_stride, n, kWhole * kWidth, along, across,
                                                           decay, next);
  update_rows_of<FromRows, ToRows, kWalk, 0>(from, from_stride, to, to_stride, n, width, along, across, decay, next);
}

/// Both sweeps with what lies between. Null `to`: the new state is not wanted. Side by side a value_key slab is done kWidth rows
/// at a time, so that the second sweep finds them in the first-level cache; in order that would interrupt the stream of reads.
template <class FromRows, class ToRows, Walk kWalk>
inline void step_slab(const SlabShape& shape, const SlabRows& from, const SlabRows& to, const TokenStep& step) {
  const auto* from_data = reinterpret_cast<const typename FromRows::Element*>(from.data);
  auto* to_data = reinterpret_cast<typename ToRows::Element*>(to.data);
  const std::int64_t rows = shape.padded_rows, width = shape.padded_width;
  if (shape.layout == StateLayout::key_value) {
    sum_slab_columns<FromRows, kWalk>(from_data, from.stride, rows, width, step.k, step.q, step.sum_k, step.sum_q);
    finish_columns(step, 0, step.columns);
    if (to_data != nullptr)
      update_rows<FromRows, ToRows, kWalk>(from_data, from.stride, to_data, to.stride, rows, width, step.e, step.k, step.decay,
                                           step.next);
    return;
  }
  const std::int64_t block = kWalk == Walk::in_order ? rows : kWidth;
  for (std::int64_t r = 0; r < rows; r += block) {
    const std::int64_t n = rows - r < block ? rows - r : block;
    const auto* from_rows = from_data + r * from.stride;
    for (std::int64_t i = 0; i < n; i += kDotRows)
      sum_rows<FromRows, kWalk>(from_rows + i * from.stride, from.stride, width, step.k, step.q, step.sum_k + r + i,
                                step.sum_q + r + i);
    finish_columns(step, r, step.columns - r < n ? step.columns : r + n);
    if (to_data != nullptr)
      update_rows<FromRows, ToRows, kWalk>(from_rows, from.stride, to_data + r * to.stride, to.stride, n, width, step.k,
                                           step.e + r, step.decay, step.next);
  }
}
