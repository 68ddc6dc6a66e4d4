// The dot policy of AVX512_BF16. A: bf16, neighbours along the depth adjacent. B: pair rows. Included after gemm.inl, inside
// namespace avx512bf16.
#pragma once

#include "cpu/kernels/gemm.inl"

struct Bf16Dot {
  using A = std::uint16_t;
  using B = std::uint32_t;
  using AVec = PairVec;
  using BVec = PairVec;
  static constexpr int kPair = 2;
  static FLASHQLA_INLINE AVec broadcast(const A* a) { return set1_pair(a); }
  static FLASHQLA_INLINE BVec load_b(const B* b) { return load_pair(b); }
  static FLASHQLA_INLINE Vec accumulate(Vec acc, AVec a, BVec b) { return dot_pair(acc, a, b); }
  static FLASHQLA_INLINE void store_a(A* a, Vec x) { store_bf16(a, x); }
  /// kWidth elements of two rows of A, interleaved into 2 kWidth: neighbours along the depth where the rows are.
  static FLASHQLA_INLINE void interleave(const A* first, const A* second, A* to) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second));
    _mm512_storeu_si512(to, interleave_bf16(low, high));
  }
  template <int kRows, int kColumns>
  static FLASHQLA_INLINE void store_b(B* b, std::int64_t b_step, std::int64_t row, const Vec (&c)[kRows][kColumns]) {
    FLASHQLA_UNROLL
    for (int i = 0; i < kRows / 2; ++i) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j)
        store_pair(b + (row / 2 + i) * b_step + j * kWidth, pack_pair(c[2 * i][j], c[2 * i + 1][j]));
    }
  }
};
