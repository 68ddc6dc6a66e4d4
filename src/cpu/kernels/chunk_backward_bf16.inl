// How chunk_backward packs f32 into pairs of bf16 or int16. Included inside namespace avx512bf16, after fixed_point.inl and
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

  using FixedDot = Int16Dot;

  /// Pairs of rows of a panel of a state in fixed point, and what one is worth in its columns.
  static FLASHQLA_NOINLINE void fix_panel(const float* from, std::int64_t pairs, Word* to, float* worth) {
    FixedRange<kColumns> range;
    for (std::int64_t p = 0; p < pairs; ++p) {
      Rows<2> c;
      load_block(from + 2 * p * kPanel, kPanel, c);
      range.add(c);
    }
    const FixedUnit<kColumns> unit = range.unit();
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) store(worth + j * kWidth, unit.worth[j]);
    for (std::int64_t p = 0; p < pairs; ++p) {
      Rows<2> c;
      load_block(from + 2 * p * kPanel, kPanel, c);
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        store_pair(to + p * kPanel + j * kWidth, pack_int16(mul(unit.scale[j], c[0][j]), mul(unit.scale[j], c[1][j])));
      }
    }
  }

  /// Products in fixed point to f32: rows times unscale, columns times worth.
  static FLASHQLA_INLINE void unfix(const float* unscale, const float* worth, Block& c) {
    FLASHQLA_UNROLL
    for (int r = 0; r < kBlock; ++r) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) c[r][j] = mul(mul(set1(unscale[r]), load(worth + j * kWidth)), from_int32(c[r][j]));
    }
  }

  /// The copies of rows of q (half 0) or k (half 1): xt_words, x_words and, of k, key_words with unscale.
  static FLASHQLA_NOINLINE void pack_rows(const std::byte* first, std::int64_t stride, std::int64_t n, const BackwardShape& shape,
                                          std::int64_t half, const GroupChunk<Bf16Dot>& chunk) {
    static_assert(kLaneBlocks == 2);
    Word* lanes = chunk.xt_words + half * kTokens;
    Bf16Dot::load_transposed(first, stride, n, kTokens, shape.dim_k, round_up(shape.padded_k, 2 * kWidth), lanes, kBoth);
    const std::int64_t pairs = shape.padded_k / 2;
    for (std::int64_t p = 0; p < pairs; ++p) {
      const PairVec low = load_pair(lanes + p * kBoth), high = load_pair(lanes + p * kBoth + kWidth);
      store_pair(chunk.x_words + (4 * p + half) * kTokenWords<Bf16Dot>, first_halves(low, high));
      store_pair(chunk.x_words + (4 * p + 2 + half) * kTokenWords<Bf16Dot>, second_halves(low, high));
    }
    if (half == 0) return;
    for (std::int64_t l = 0; l < kTokens; l += kWidth) {
      Vec scale, unscale;
      fixed_row_scale(lanes + l, kBoth, pairs, scale, unscale);
      store(chunk.unscale + l, unscale);
      for (std::int64_t p = 0; p < pairs; ++p) {
        const PairVec pair = load_pair(lanes + p * kBoth + l);
        store_pair(chunk.key_words + p * kTokens + l,
                   pack_int16(mul(scale, first_of_pair(pair)), mul(scale, second_of_pair(pair))));
      }
    }
  }

  /// kWidth numbers of bf16 as f32.
  static FLASHQLA_INLINE Vec load_words(const Word* from) { return load_bf16(reinterpret_cast<const std::uint16_t*>(from)); }

  /// Neighbours along a row in one word. `count` is a multiple of 2 kWidth.
  static FLASHQLA_NOINLINE void row_words(const float* from, std::int64_t count, Word* to) {
    for (std::int64_t i = 0; i < count; i += 2 * kWidth)
      store_pair(to + i / 2, neighbour_words(load(from + i), load(from + i + kWidth)));
  }
};
