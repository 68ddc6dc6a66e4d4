// How chunk_backward packs f32 into pairs of bf16. Included inside namespace avx512bf16, after gemm_bf16.inl and
// chunk_backward_blocks.inl.

/// 2 kWidth numbers to kWidth words: neighbours in one word.
FLASHQLA_INLINE PairVec neighbour_words(Vec low, Vec high) { return (PairVec)_mm512_cvtne2ps_pbh(high, low); }

/// Two rows to one row of words: first in the low halves.
FLASHQLA_INLINE PairVec row_words_of(Vec first, Vec second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                         19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, neighbour_words(first, second));
}

template <>
struct Packing<Bf16Dot> {
  static constexpr bool kCopies = true;
  using Word = std::uint32_t;

  static FLASHQLA_INLINE void rows(const Block& c, Word* to, std::int64_t stride) {
    FLASHQLA_UNROLL
    for (int r = 0; r < kBlock; r += 2) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) store_pair(to + r / 2 * stride + j * kWidth, row_words_of(c[r][j], c[r + 1][j]));
    }
  }

  /// Neighbouring rows in one word.
  static FLASHQLA_NOINLINE void row_pairs(const float* from, std::int64_t rows, std::int64_t columns, std::int64_t from_stride,
                                          Word* to, std::int64_t to_stride) {
    for (std::int64_t r = 0; r < rows; r += 2) {
      for (std::int64_t j = 0; j < columns; j += kWidth) {
        store_pair(to + r / 2 * to_stride + j,
                   row_words_of(load(from + r * from_stride + j), load(from + (r + 1) * from_stride + j)));
      }
    }
  }

  /// Neighbouring rows in one word; after all of them, likewise what rounding took away.
  static FLASHQLA_NOINLINE void split_pairs(const float* from, std::int64_t rows, std::int64_t columns, Word* to) {
    for (std::int64_t r = 0; r < rows; r += 2) {
      for (std::int64_t j = 0; j < columns; j += kWidth) {
        const Vec first = load(from + r * columns + j), second = load(from + (r + 1) * columns + j);
        const PairVec rounded = row_words_of(first, second);
        const Vec first_rest = sub(first, _mm512_castsi512_ps(_mm512_slli_epi32(rounded, 16)));
        const Vec second_rest = sub(second, _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(-65536))));
        store_pair(to + r / 2 * columns + j, rounded);
        store_pair(to + (rows + r) / 2 * columns + j, row_words_of(first_rest, second_rest));
      }
    }
  }

  /// Neighbours along a row in one word. `count` is a multiple of 2 kWidth.
  static FLASHQLA_NOINLINE void row_words(const float* from, std::int64_t count, Word* to) {
    for (std::int64_t i = 0; i < count; i += 2 * kWidth)
      store_pair(to + i / 2, neighbour_words(load(from + i), load(from + i + kWidth)));
  }
};
