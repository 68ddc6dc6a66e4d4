// 16-bit fixed point for Int16Dot: right operands whose columns are scaled, left operands, q or k, whose rows are. Included after
// gemm_bf16.inl, inside namespace avx512bf16. docs/numerics.md says what is gained over bf16.
//
//   rows of q and k  times a power of two that brings their largest element into [2^12, 2^13)
//   columns          times what keeps every number below 2^15 and every absolute sum up to 2^18
// so that no sum of products exceeds 2^31 and nothing but the conversions rounds.
#pragma once

#include "cpu/kernels/gemm_bf16.inl"

inline constexpr float kFixedSum = 0x1p18f;            // of a column's magnitudes
inline constexpr float kFixedMost = 32767.0f;          // of each
inline constexpr float kFixedRowMost = 8160.0f;        // of a row, as of the largest bf16 below 2^13
inline constexpr int kFixedRowBits = 12, kBias = 127;  // 2^12 <= largest element of a row; of the exponent of f32

/// Factors, powers of two, of kWidth rows of bf16 that are given transposed as `pairs` pair rows, and what takes them back: NaN
/// for a row with NaN or infinity.
FLASHQLA_INLINE void fixed_row_scale(const std::uint32_t* lanes, std::int64_t stride, std::int64_t pairs, Vec& scale,
                                     Vec& unscale) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fff7fff), bits = _mm512_set1_epi32(kFixedRowBits);
  __m512i most = _mm512_setzero_si512();  // bf16 without the sign is ordered like integers; NaN comes last
  for (std::int64_t p = 0; p < pairs; ++p)
    most = _mm512_max_epu16(most, _mm512_and_si512(load_pair(lanes + p * stride), magnitude));
  most = _mm512_max_epu16(most, _mm512_slli_epi32(most, 16));
  const __m512i exponent = _mm512_max_epi32(_mm512_srli_epi32(most, 23), _mm512_set1_epi32(2 * kFixedRowBits));
  const __mmask16 bad = _mm512_cmpeq_epi32_mask(exponent, _mm512_set1_epi32(2 * kBias + 1));
  const __m512i up = _mm512_sub_epi32(_mm512_add_epi32(_mm512_set1_epi32(2 * kBias), bits), exponent);
  scale = _mm512_castsi512_ps(_mm512_slli_epi32(up, 23));
  const __m512i down =
      _mm512_mask_mov_epi32(_mm512_slli_epi32(_mm512_sub_epi32(exponent, bits), 23), bad, _mm512_set1_epi32(0x7fc00000));
  unscale = _mm512_castsi512_ps(down);
}

/// What one is worth in the columns of a matrix in fixed point, and its reciprocal.
template <int kColumns>
struct FixedUnit {
  Vec worth[kColumns], scale[kColumns];
};

/// How large the columns of a matrix are.
template <int kColumns>
class FixedRange {
 public:
  FLASHQLA_INLINE FixedRange() {
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) sum_[0][j] = sum_[1][j] = most_[j] = zero();
  }
  template <int kRows>
  FLASHQLA_INLINE void add(const Vec (&c)[kRows][kColumns]) {
    FLASHQLA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        const Vec a = abs(c[i][j]);
        sum_[i % 2][j] = avx512::add(sum_[i % 2][j], a);
        most_[j] = max(most_[j], a);
      }
    }
  }
  FLASHQLA_INLINE FixedUnit<kColumns> unit() const {
    FixedUnit<kColumns> unit;
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      // not less than the smallest normal number, whose reciprocal exists: decayed states may be as small (far_decay.inl)
      const Vec by_most = max(set1(0x1p-126f), mul(most_[j], set1(1.0f / kFixedMost)));
      const Vec by_sum = mul(avx512::add(sum_[0][j], sum_[1][j]), set1(1.0f / kFixedSum));
      unit.worth[j] = max(by_most, by_sum);  // NaN is in the sum if anywhere
      unit.scale[j] = div(set1(1.0f), unit.worth[j]);
    }
    return unit;
  }

 private:
  Vec sum_[2][kColumns], most_[kColumns];
};
