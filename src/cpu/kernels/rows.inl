// Reading and writing rows of q, k, v, o and states: any dtype in memory, f32 inside. Included inside an instruction set's
// namespace.

/// kWidth elements at p + i, or the first n of them (zeros beyond).
FLASHQLA_INLINE Vec load_any(const std::byte* p, DType dtype, std::int64_t i, int n) {
  if (dtype == DType::f32) {
    const float* f = reinterpret_cast<const float*>(p) + i;
    return n >= kWidth ? load(f) : load_partial(f, n);
  }
  const std::uint16_t* h = reinterpret_cast<const std::uint16_t*>(p) + i;
  if (dtype == DType::bf16) return n >= kWidth ? load_bf16(h) : load_bf16_partial(h, n);
  return n >= kWidth ? load_f16(h) : load_f16_partial(h, n);
}

/// The reverse, rounding to nearest even.
FLASHQLA_INLINE void store_any(std::byte* p, DType dtype, std::int64_t i, int n, Vec a) {
  if (dtype == DType::f32) {
    float* f = reinterpret_cast<float*>(p) + i;
    n >= kWidth ? store(f, a) : store_partial(f, a, n);
    return;
  }
  std::uint16_t* h = reinterpret_cast<std::uint16_t*>(p) + i;
  if (dtype == DType::bf16) {
    n >= kWidth ? store_bf16(h, a) : store_bf16_partial(h, a, n);
  } else {
    n >= kWidth ? store_f16(h, a) : store_f16_partial(h, a, n);
  }
}

constexpr std::int64_t round_up(std::int64_t n, std::int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

FLASHQLA_INLINE int lanes_left(std::int64_t n, std::int64_t i) { return static_cast<int>(n - i < kWidth ? n - i : kWidth); }

/// One row of `width` elements to f32, zeros up to `padded` (a multiple of kWidth).
inline void load_row(const std::byte* p, DType dtype, std::int64_t width, std::int64_t padded, float* out) {
  for (std::int64_t i = 0; i < padded; i += kWidth) {
    store(out + i, i < width ? load_any(p, dtype, i, lanes_left(width, i)) : zero());
  }
}

/// x * rsqrt(sum x^2 + eps) in place, where the row is padded with zeros. Returns the factor.
inline float normalise_row(float* row, std::int64_t padded, double eps) {
  Vec squares = zero();
  for (std::int64_t i = 0; i < padded; i += kWidth) squares = fmadd(load(row + i), load(row + i), squares);
  const float factor = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(sum(squares)) + eps));
  for (std::int64_t i = 0; i < padded; i += kWidth) store(row + i, mul(load(row + i), set1(factor)));
  return factor;
}

/// Rows token .. token + n - 1 of one head as f32 [rows][padded], normalised if `eps` >= 0; rows from n on and columns from
/// `width` on are zero.
inline void load_head_rows(const ConstTokenView& view, std::int64_t batch, std::int64_t token, std::int64_t head, std::int64_t n,
                           std::int64_t rows, std::int64_t width, std::int64_t padded, double eps, float* out) {
  for (std::int64_t t = 0; t < n; ++t) {
    load_row(view.row(batch, token + t, head), view.dtype, width, padded, out + t * padded);
    if (eps >= 0.0) normalise_row(out + t * padded, padded, eps);
  }
  for (std::int64_t i = n * padded; i < rows * padded; i += kWidth) store(out + i, zero());
}

/// [rows][columns] (both multiples of kWidth, row stride from_stride) transposed.
inline void transpose_matrix(const float* from, std::int64_t rows, std::int64_t columns, std::int64_t from_stride, float* to,
                             std::int64_t to_stride) {
  for (std::int64_t i = 0; i < rows; i += kWidth) {
    for (std::int64_t j = 0; j < columns; j += kWidth) {
      Vec block[kWidth];
      for (int r = 0; r < kWidth; ++r) block[r] = load(from + (i + r) * from_stride + j);
      transpose(block);
      for (int r = 0; r < kWidth; ++r) store(to + (j + r) * to_stride + i, block[r]);
    }
  }
}
