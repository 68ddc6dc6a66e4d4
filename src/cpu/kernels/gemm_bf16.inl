// The dot policies of AVX512_BF16 and AVX512_VNNI. A: bf16 or int16, neighbours along the depth adjacent. B: pair rows. Included
// after gemm.inl, inside namespace avx512bf16.
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
  static FLASHQLA_INLINE Vec add_squares(Vec acc, const B* b) {
    const PairVec pair = load_pair(b);
    const Vec first = first_of_pair(pair), second = second_of_pair(pair);
    return fmadd(first, first, fmadd(second, second, acc));
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
  /// As load_transposed of rows.inl, but bf16 rows to pair rows: to[column / 2][row]. A pair moves as one 32-bit element.
  static inline void load_transposed(const std::byte* first, std::int64_t stride, std::int64_t n, std::int64_t rows,
                                     std::int64_t width, std::int64_t padded, B* to, std::int64_t to_stride) {
    const std::uint16_t* from = reinterpret_cast<const std::uint16_t*>(first);
    for (std::int64_t t = 0; t < rows; t += kWidth) {
      for (std::int64_t d = 0; d < padded; d += 2 * kWidth) {
        const std::int64_t left = width - d;
        const __mmask32 mask = left >= 32 ? 0xffffffffu : left <= 0 ? 0u : (1u << left) - 1u;
        Vec block[kWidth];
        for (int r = 0; r < kWidth; ++r) {
          block[r] = t + r >= n ? zero() : _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, from + (t + r) * stride + d));
        }
        transpose(block);
        for (int r = 0; r < kWidth; ++r) store_pair(to + (d / 2 + r) * to_stride + t, _mm512_castps_si512(block[r]));
      }
    }
  }
};

/// Pairs of int16 summed into int32: as many a cycle as pairs of bf16 (AMD Zen 4), and no rounding. Accumulators hold int32.
struct Int16Dot {
  using A = std::int16_t;
  using B = std::uint32_t;
  using AVec = PairVec;
  using BVec = PairVec;
  static constexpr int kPair = 2;
  static FLASHQLA_INLINE AVec broadcast(const A* a) { return set1_pair(reinterpret_cast<const std::uint16_t*>(a)); }
  static FLASHQLA_INLINE BVec load_b(const B* b) { return load_pair(b); }
  static FLASHQLA_INLINE Vec accumulate(Vec acc, AVec a, BVec b) { return dot_int16(acc, a, b); }
};
