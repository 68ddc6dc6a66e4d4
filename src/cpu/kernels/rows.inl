// Reading and writing rows of q, k, v, o and states: any dtype in memory, f32 inside. Included inside an instruction set's
// namespace.
#pragma once

constexpr std::int64_t round_up(std::int64_t n, std::int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

FLASHQLA_INLINE int lanes_left(std::int64_t n, std::int64_t i) { return static_cast<int>(n - i < kWidth ? n - i : kWidth); }

/// kWidth elements at p + i, or the first n of them (zeros beyond).
template <DType kType>
FLASHQLA_INLINE Vec load_as(const std::byte* p, std::int64_t i) {
  if constexpr (kType == DType::f32) return load(reinterpret_cast<const float*>(p) + i);
  if constexpr (kType == DType::bf16) return load_bf16(reinterpret_cast<const std::uint16_t*>(p) + i);
  if constexpr (kType == DType::f16) return load_f16(reinterpret_cast<const std::uint16_t*>(p) + i);
}
template <DType kType>
FLASHQLA_INLINE Vec load_as_partial(const std::byte* p, std::int64_t i, int n) {
  if constexpr (kType == DType::f32) return load_partial(reinterpret_cast<const float*>(p) + i, n);
  if constexpr (kType == DType::bf16) return load_bf16_partial(reinterpret_cast<const std::uint16_t*>(p) + i, n);
  if constexpr (kType == DType::f16) return load_f16_partial(reinterpret_cast<const std::uint16_t*>(p) + i, n);
}

/// The reverse, rounding to nearest even.
template <DType kType>
FLASHQLA_INLINE void store_as(std::byte* p, std::int64_t i, Vec a) {
  if constexpr (kType == DType::f32) store(reinterpret_cast<float*>(p) + i, a);
  if constexpr (kType == DType::bf16) store_bf16(reinterpret_cast<std::uint16_t*>(p) + i, a);
  if constexpr (kType == DType::f16) store_f16(reinterpret_cast<std::uint16_t*>(p) + i, a);
}
template <DType kType>
FLASHQLA_INLINE void store_as_partial(std::byte* p, std::int64_t i, int n, Vec a) {
  if constexpr (kType == DType::f32) store_partial(reinterpret_cast<float*>(p) + i, a, n);
  if constexpr (kType == DType::bf16) store_bf16_partial(reinterpret_cast<std::uint16_t*>(p) + i, a, n);
  if constexpr (kType == DType::f16) store_f16_partial(reinterpret_cast<std::uint16_t*>(p) + i, a, n);
}

/// Calls body.template operator()<kType>() with the element type of `dtype` (f32, bf16 or f16).
template <class Body>
FLASHQLA_INLINE void with_type(DType dtype, Body body) {
  if (dtype == DType::f32) {
    body.template operator()<DType::f32>();
  } else if (dtype == DType::bf16) {
    body.template operator()<DType::bf16>();
  } else {
    body.template operator()<DType::f16>();
  }
}

/// The same for one vector, chosen at run time: for code that is not hot.
FLASHQLA_INLINE Vec load_any(const std::byte* p, DType dtype, std::int64_t i, int n) {
  if (dtype == DType::f32) return load_as_partial<DType::f32>(p, i, n);
  return dtype == DType::bf16 ? load_as_partial<DType::bf16>(p, i, n) : load_as_partial<DType::f16>(p, i, n);
}
FLASHQLA_INLINE void store_any(std::byte* p, DType dtype, std::int64_t i, int n, Vec a) {
  with_type(dtype, [&]<DType kType>() FLASHQLA_INLINE_LAMBDA { store_as_partial<kType>(p, i, n, a); });
}

/// One row of `width` elements to f32, zeros up to `padded` (a multiple of kWidth).
template <DType kType>
FLASHQLA_INLINE void load_row_as(const std::byte* p, std::int64_t width, std::int64_t padded, float* out) {
  std::int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) store(out + i, load_as<kType>(p, i));
  if (i < width) {
    store(out + i, load_as_partial<kType>(p, i, lanes_left(width, i)));
    i += kWidth;
  }
  for (; i < padded; i += kWidth) store(out + i, zero());
}
inline void load_row(const std::byte* p, DType dtype, std::int64_t width, std::int64_t padded, float* out) {
  with_type(dtype, [&]<DType kType>() FLASHQLA_INLINE_LAMBDA { load_row_as<kType>(p, width, padded, out); });
}

/// `width` elements of f32 to a row in memory.
template <DType kType>
FLASHQLA_INLINE void store_row_as(const float* row, std::int64_t width, std::byte* p) {
  std::int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) store_as<kType>(p, i, load(row + i));
  if (i < width) store_as_partial<kType>(p, i, lanes_left(width, i), load(row + i));
}
inline void store_row(const float* row, std::int64_t width, DType dtype, std::byte* p) {
  with_type(dtype, [&]<DType kType>() FLASHQLA_INLINE_LAMBDA { store_row_as<kType>(row, width, p); });
}

/// x * rsqrt(sum x^2 + eps) in place, where the row is padded with zeros. Returns the factor.
inline float normalise_row(float* row, std::int64_t padded, double eps) {
  Vec squares = zero();
  for (std::int64_t i = 0; i < padded; i += kWidth) squares = fmadd(load(row + i), load(row + i), squares);
  const float factor = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(sum(squares)) + eps));
  for (std::int64_t i = 0; i < padded; i += kWidth) store(row + i, mul(load(row + i), set1(factor)));
  return factor;
}

/// `n` rows of `width` elements, `stride` elements apart, as f32 [rows][padded]; rows from n on and columns from `width` on are
/// zero.
inline void load_rows(const std::byte* first, DType dtype, std::int64_t stride, std::int64_t n, std::int64_t rows,
                      std::int64_t width, std::int64_t padded, float* out) {
  with_type(dtype, [&]<DType kType>() FLASHQLA_INLINE_LAMBDA {
    for (std::int64_t t = 0; t < n; ++t)
      load_row_as<kType>(first + t * stride * element_bytes(kType), width, padded, out + t * padded);
  });
  for (std::int64_t i = n * padded; i < rows * padded; i += kWidth) store(out + i, zero());
}

/// Rows token .. token + n - 1 of one head of q or k, normalised if the problem says so; as load_rows.
inline void load_qk_rows(const InputArguments& in, const ConstTokenView& view, std::int64_t batch, std::int64_t token,
                         std::int64_t head, std::int64_t n, std::int64_t rows, std::int64_t padded, float* out) {
  load_rows(view.row(batch, token, head), view.dtype, view.stride_token, n, rows, in.problem.dim_k, padded, out);
  if (!in.problem.qk_l2norm) return;
  for (std::int64_t t = 0; t < n; ++t) normalise_row(out + t * padded, padded, in.problem.l2norm_eps);
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

/// `n` rows of `width` elements, `stride` elements apart, transposed: to[column][row] as f32, row stride to_stride; zero for rows
/// n .. rows - 1 and columns width .. padded - 1 (rows and padded are multiples of kWidth).
template <DType kType>
FLASHQLA_INLINE void load_transposed_as(const std::byte* first, std::int64_t stride, std::int64_t n, std::int64_t rows,
                                        std::int64_t width, std::int64_t padded, float* to, std::int64_t to_stride) {
  for (std::int64_t t = 0; t < rows; t += kWidth) {
    for (std::int64_t d = 0; d < padded; d += kWidth) {
      const int whole = lanes_left(width, d);
      Vec block[kWidth];
      for (int r = 0; r < kWidth; ++r) {
        const std::byte* p = first + (t + r) * stride * element_bytes(kType);
        block[r] = t + r >= n ? zero() : whole == kWidth ? load_as<kType>(p, d) : load_as_partial<kType>(p, d, whole);
      }
      transpose(block);
      for (int r = 0; r < kWidth; ++r) store(to + (d + r) * to_stride + t, block[r]);
    }
  }
}
inline void load_transposed(const std::byte* first, DType dtype, std::int64_t stride, std::int64_t n, std::int64_t rows,
                            std::int64_t width, std::int64_t padded, float* to, std::int64_t to_stride) {
  with_type(dtype, [&]<DType kType>() FLASHQLA_INLINE_LAMBDA {
    load_transposed_as<kType>(first, stride, n, rows, width, padded, to, to_stride);
  });
}
