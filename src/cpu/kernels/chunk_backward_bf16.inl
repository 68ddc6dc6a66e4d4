// How chunk_backward packs f32 into pairs of bf16. Included inside namespace avx512bf16, after gemm_bf16.inl and
// chunk_backward_blocks.inl.

/// 2 kWidth numbers to kWidth words: neighbours in one word.
FLASHQLA_INLINE PairVec neighbour_words(Vec low, Vec high) { return (PairVec)_mm512_cvtne2ps_pbh(high, low); }

template <>
struct Packing<Bf16Dot> {
  static constexpr bool kCopies = true;
  using Word = std::uint32_t;

  static FLASHQLA_INLINE void rows(const Block& c, Word* to, std::int64_t stride) {
    FLASHQLA_UNROLL
    for (int r = 0; r < kBlock; r += 2) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) store_pair(to + r / 2 * stride + j * kWidth, pack_pair(c[r][j], c[r + 1][j]));
    }
  }

  /// Neighbouring rows in one word.
  static FLASHQLA_NOINLINE void row_pairs(const float* from, std::int64_t rows, std::int64_t columns, std::int64_t from_stride,
                                          Word* to, std::int64_t to_stride) {
    for (std::int64_t r = 0; r < rows; r += 2) {
      for (std::int64_t j = 0; j < columns; j += kWidth) {
        store_pair(to + r / 2 * to_stride + j,
                   pack_pair(load(from + r * from_stride + j), load(from + (r + 1) * from_stride + j)));
      }
    }
  }

  /// Neighbouring rows in one word; after all of them, likewise what rounding took away.
  static FLASHQLA_NOINLINE void split_pairs(const float* from, std::int64_t rows, std::int64_t columns, Word* to) {
    for (std::int64_t r = 0; r < rows; r += 2) {
      for (std::int64_t j = 0; j < columns; j += kWidth) {
        const Vec first = load(from + r * columns + j), second = load(from + (r + 1) * columns + j);
        const PairVec rounded = pack_pair(first, second);
        const Vec first_rest = sub(first, first_of_pair(rounded));
        const Vec second_rest = sub(second, second_of_pair(rounded));
        store_pair(to + r / 2 * columns + j, rounded);
        store_pair(to + (rows + r) / 2 * columns + j, pack_pair(first_rest, second_rest));
      }
    }
  }

  /// Neighbours along a row in one word. `count` is a multiple of 2 kWidth.
  static FLASHQLA_NOINLINE void row_words(const float* from, std::int64_t count, Word* to) {
    for (std::int64_t i = 0; i < count; i += 2 * kWidth)
      store_pair(to + i / 2, neighbour_words(load(from + i), load(from + i + kWidth)));
  }
};
