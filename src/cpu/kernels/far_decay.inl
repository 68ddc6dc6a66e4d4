// Decays so strong that e^x is no normal f32, which may still multiply numbers so large that the product is one. Included inside
// an instruction set's namespace, after math.inl.
//
// A factor of a row of numbers is kept as e^(x/2), applied twice: the kernels multiply by the second only in chunks that have
// such factors (ChunkGates::far). A matrix of decays between tokens is kept in two parts, near + kFarUnit far, each zero where
// the other is not: one product with each, and the sum. That is exact as long as no number exceeds e^88 = 2e38 and the product
// matters: what is below e^-170 counts as zero.
#pragma once

#include "cpu/kernels/math.inl"

/// A decay of less than e^kFarDecay is far. e^-87.3 is the smallest normal number; this leaves room for other small factors.
inline constexpr float kFarDecay = -80.0f;
inline constexpr float kFarUnit = 0x1p-120f;

/// A logarithm of a decay: the sum of both, low below an ulp of high.
struct Decay {
  Vec high, low;
};

/// a - b without loss of digits where |a| >= |b|, as between cumulative sums without growth.
FLASHQLA_INLINE Decay difference(const Decay& a, const Decay& b) {
  const Vec high = sub(a.high, b.high), lost = sub(sub(a.high, high), b.high);
  return {high, add(sub(a.low, b.low), lost)};
}

/// e^x = near + kFarUnit far.
struct FarDecay {
  Vec near, far;
};
FLASHQLA_INLINE FarDecay far_parts(const Decay& x) {
  const Vec limit = set1(kFarDecay), near = exp_sum(x.high, x.low);
  Vec n;
  const Vec r = exp_parts(min(zero(), max(set1(-180.0f), x.high)), n);
  const Vec far = scale_by_power(fmadd(r, x.low, r), add(n, set1(120.0f)));
  return {select_less(x.high, limit, zero(), near),
          select_less(x.high, limit, select_less(x.high, set1(-170.5f), zero(), far), zero())};
}

/// e^x = factor * again, both normal or zero.
FLASHQLA_INLINE void store_factors(const Decay& x, float* factor, float* again) {
  const Vec limit = set1(kFarDecay), half = set1(0.5f);
  const Vec root = exp_sum(mul(half, x.high), mul(half, x.low));
  store(factor, select_less(x.high, limit, root, exp_sum(x.high, x.low)));
  store(again, select_less(x.high, limit, root, set1(1.0f)));
}

/// a, or 0 for a denormal number: operands of products must not be slow.
FLASHQLA_INLINE Vec flush(Vec a) { return select_less(abs(a), set1(0x1p-126f), zero(), a); }

/// Elements of a matrix: what the decay multiplies, times the decay.
FLASHQLA_INLINE void store_parts(const FarDecay& decay, Vec factor, float* near, float* far) {
  store(near, mul(decay.near, factor));
  store(far, flush(mul(decay.far, factor)));
}

/// c[i] = again[i] * c[i].
template <int kRows, int kColumns>
FLASHQLA_INLINE void scale_again(const float* again, Vec (&c)[kRows][kColumns]) {
  FLASHQLA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) c[i][j] = flush(mul(set1(again[i]), c[i][j]));
  }
}

/// `again` times n numbers, n a multiple of kWidth.
FLASHQLA_INLINE void scale_numbers(float again, std::int64_t n, float* numbers) {
  for (std::int64_t i = 0; i < n; i += kWidth) store(numbers + i, flush(mul(set1(again), load(numbers + i))));
}

/// near + kFarUnit far; strides from row to row and from column to column.
struct FarMatrix {
  const float *near, *far;
  std::int64_t row, column;
};

/// c += row `row` of the matrix, columns [first, last), times those rows of b, which are `stride` apart.
template <int kColumns>
FLASHQLA_INLINE void multiply_far(const FarMatrix& x, std::int64_t row, std::int64_t first, std::int64_t last, const float* b,
                                  std::int64_t stride, Vec (&c)[1][kColumns]) {
  Vec far[kColumns];
  FLASHQLA_UNROLL
  for (int j = 0; j < kColumns; ++j) far[j] = zero();
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t at = row * x.row + i * x.column;
    const Vec near_i = set1(x.near[at]), far_i = set1(x.far[at]);
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      const Vec b_i = load(b + i * stride + j * kWidth);
      c[0][j] = fmadd(near_i, b_i, c[0][j]);
      far[j] = fmadd(far_i, b_i, far[j]);
    }
  }
  FLASHQLA_UNROLL
  for (int j = 0; j < kColumns; ++j) c[0][j] = fmadd(far[j], set1(kFarUnit), c[0][j]);
}
