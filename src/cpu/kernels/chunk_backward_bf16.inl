// How chunk_backward packs f32 into pairs of bf16 or int16, and what it leaves to f32. Included inside namespace avx512bf16,
// after fixed_point.inl, reflection.inl and chunk_backward_blocks.inl.

/// 2 kWidth numbers to kWidth words: neighbours in one word.
FLASHQLA_INLINE PairVec neighbour_words(Vec low, Vec high) { return (PairVec)_mm512_cvtne2ps_pbh(high, low); }

template <>
struct Packing<Bf16Dot> {
  static constexpr bool kCopies = true;
  using Word = std::uint32_t;

  /// Rows of a block, neighbouring columns in one word, kPanelWords apart.
  template <int kRows>
  static FLASHQLA_INLINE void store_rows(const Rows<kRows>& c, Word* to) {
    static_assert(kColumns == 2);
    FLASHQLA_UNROLL
    for (int r = 0; r < kRows; ++r) store_pair(to + r * kPanelWords<Bf16Dot>, neighbour_words(c[r][0], c[r][1]));
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

  using TokenDot = Int16Dot;
  static FLASHQLA_INLINE Vec to_f32(Vec a) { return from_int32(a); }

  /// Pairs of rows of a panel in fixed point, and what one is worth in its columns. load_pair_rows(p, c) loads pair p.
  template <class Load>
  static FLASHQLA_INLINE void fix_pairs(std::int64_t pairs, Word* to, float* worth, Load load_pair_rows) {
    FixedRange<kColumns> range;
    for (std::int64_t p = 0; p < pairs; ++p) {
      Rows<2> c;
      load_pair_rows(p, c);
      range.add(c);
    }
    const FixedUnit<kColumns> unit = range.unit();
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) store(worth + j * kWidth, unit.worth[j]);
    for (std::int64_t p = 0; p < pairs; ++p) {
      Rows<2> c;
      load_pair_rows(p, c);
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        store_pair(to + p * kPanel + j * kWidth, pack_int16(mul(unit.scale[j], c[0][j]), mul(unit.scale[j], c[1][j])));
      }
    }
  }

  static FLASHQLA_NOINLINE void fix_panel(const float* from, std::int64_t pairs, Word* to, float* worth) {
    fix_pairs(pairs, to, worth,
              [&](std::int64_t p, Rows<2>& c) FLASHQLA_INLINE_LAMBDA { load_block(from + 2 * p * kPanel, kPanel, c); });
  }

  /// Rows times `factors`. Returns the sums of the squares of columns in `squares`.
  static FLASHQLA_NOINLINE void fix_panel(const float* from, const float* factors, std::int64_t pairs, Word* to, float* worth,
                                          float* squares) {
    Vec sums[kColumns] = {zero(), zero()};
    fix_pairs(pairs, to, worth, [&](std::int64_t p, Rows<2>& c) FLASHQLA_INLINE_LAMBDA {
      load_block(from + 2 * p * kPanel, kPanel, c);
      FLASHQLA_UNROLL
      for (int r = 0; r < 2; ++r) {
        FLASHQLA_UNROLL
        for (int j = 0; j < kColumns; ++j) {
          c[r][j] = mul(set1(factors[2 * p + r]), c[r][j]);
          sums[j] = fmadd(c[r][j], c[r][j], sums[j]);
        }
      }
    });
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) store(squares + j * kWidth, mul(set1(0.5f), sums[j]));  // each was loaded twice
  }

  /// Rows of a panel of a state as left operands in fixed point, neighbouring columns in one word. What one is worth belongs to a
  /// column, so that it has to be a factor of the right operand. Returns the sum of the squares of these numbers.
  static FLASHQLA_NOINLINE float fix_state_rows(const float* from, std::int64_t rows, Word* to, float* worth) {
    Vec most[kColumns] = {zero(), zero()}, sums[kColumns] = {zero(), zero()}, scale[kColumns];
    for (std::int64_t r = 0; r < rows; ++r) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        const Vec a = abs(load(from + r * kPanel + j * kWidth));
        most[j] = max(most[j], a);
        sums[j] = add(sums[j], a);  // NaN, if there is any
      }
    }
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      const Vec unit = max(set1(0x1p-126f), mul(most[j], set1(1.0f / kFixedRowMost)));
      store(worth + j * kWidth, add(unit, mul(zero(), sums[j])));
      scale[j] = div(set1(1.0f), unit);
    }
    auto* const words = reinterpret_cast<std::int16_t*>(to);
    Vec squares[kColumns] = {zero(), zero()};
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* row = from + r * kPanel;
      const Vec low = mul(scale[0], load(row)), high = mul(scale[1], load(row + kWidth));
      store_int16(words + r * kPanel, low, high);
      squares[0] = fmadd(low, low, squares[0]);
      squares[1] = fmadd(high, high, squares[1]);
    }
    return sum(add(squares[0], squares[1]));
  }

  /// Products in fixed point to f32: rows times unscale, columns times worth.
  static FLASHQLA_INLINE void unfix(const float* unscale, const float* worth, Block& c) {
    FLASHQLA_UNROLL
    for (int r = 0; r < kBlock; ++r) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) c[r][j] = mul(mul(set1(unscale[r]), load(worth + j * kWidth)), from_int32(c[r][j]));
    }
  }

  static FLASHQLA_INLINE Vec load_token_words(const Word* from) {
    return load_int16(reinterpret_cast<const std::int16_t*>(from));
  }

  /// Products in fixed point to f32, of two columns.
  template <int kRows>
  static FLASHQLA_INLINE void unfix_columns(Vec first, Vec second, Rows<kRows>& c) {
    FLASHQLA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      c[r][0] = mul(first, from_int32(c[r][0]));
      c[r][1] = mul(second, from_int32(c[r][1]));
    }
  }

  /// kWidth columns in fixed point; rows times `factors`. for_pairs(body) calls body(row) for the first of each pair of rows.
  template <class ForPairs>
  static FLASHQLA_INLINE void fix_column(const float* from, std::int64_t stride, const float* factors, Word* to, float* worth,
                                         ForPairs for_pairs) {
    FixedRange<1> range;
    const auto load_scaled = [&](std::int64_t row, Vec(&c)[2][1]) FLASHQLA_INLINE_LAMBDA {
      c[0][0] = mul(set1(factors[row]), load(from + row * stride));
      c[1][0] = mul(set1(factors[row + 1]), load(from + (row + 1) * stride));
    };
    for_pairs([&](std::int64_t row) FLASHQLA_INLINE_LAMBDA {
      Vec c[2][1];
      load_scaled(row, c);
      range.add(c);
    });
    const FixedUnit<1> unit = range.unit();
    store(worth, unit.worth[0]);
    for_pairs([&](std::int64_t row) FLASHQLA_INLINE_LAMBDA {
      Vec c[2][1];
      load_scaled(row, c);
      store_pair(to + row / 2 * stride, pack_int16(mul(unit.scale[0], c[0][0]), mul(unit.scale[0], c[1][0])));
    });
  }

  /// rt and r: the blocks that are read.
  static FLASHQLA_NOINLINE void fix_token_products(const BackwardScratch<Bf16Dot>& scratch, const float* unscale) {
    for (std::int64_t l = 0; l < kLaneBlocks; ++l) {
      const std::int64_t at = l * kWidth;
      for (std::int64_t column : {at, kTokens + at}) {
        fix_column(scratch.rt + column, kBoth, unscale + kTokens, scratch.rt_words + column, scratch.rt_worth + column,
                   [&](auto body) FLASHQLA_INLINE_LAMBDA {
                     for (std::int64_t row = 0; row < at + kWidth; row += 2) body(row);
                   });
      }
      fix_column(scratch.r + at, kTokens, unscale, scratch.r_words + at, scratch.r_worth + at,
                 [&](auto body) FLASHQLA_INLINE_LAMBDA {
                   for (std::int64_t half : {0, kTokens})
                     for (std::int64_t row = half + at; row < half + kTokens; row += 2) body(row);
                 });
    }
  }

  /// The copies of rows of q (half 0) or k (half 1). L2 normalisation leaves the rows as they are, exact, and goes into what
  /// takes the copies back.
  static FLASHQLA_NOINLINE void pack_rows(const std::byte* first, std::int64_t stride, std::int64_t n, const BackwardShape& shape,
                                          double norm_eps, std::int64_t half, const GroupChunk<Bf16Dot>& chunk) {
    static_assert(kLaneBlocks == 2);
    Word* lanes = chunk.xt_words + half * kTokens;
    Bf16Dot::load_transposed(first, stride, n, kTokens, shape.dim_k, round_up(shape.padded_k, 2 * kWidth), lanes, kBoth);
    const std::int64_t pairs = shape.padded_k / 2;
    constexpr std::int64_t kRow = 2 * kTokenWords<Bf16Dot>;  // from one k to the next
    Vec scale[kLaneBlocks];
    for (int l = 0; l < kLaneBlocks; ++l) {
      Vec unscale;
      fixed_row_scale(lanes + l * kWidth, kBoth, pairs, scale[l], unscale);
      Vec squares = zero();
      for (std::int64_t p = 0; p < pairs; ++p) squares = Bf16Dot::add_squares(squares, lanes + p * kBoth + l * kWidth);
      if (norm_eps >= 0.0) {
        const Vec factor = div(set1(1.0f), sqrt(add(squares, set1(static_cast<float>(norm_eps)))));
        store(chunk.norms + half * kTokens + l * kWidth, factor);
        unscale = mul(unscale, factor);
        squares = mul(squares, mul(factor, factor));
      }
      store(chunk.squares + half * kTokens + l * kWidth, squares);
      store(chunk.unscale + half * kTokens + l * kWidth, unscale);
    }
    for (std::int64_t p = 0; p < pairs; ++p) {
      const PairVec low = load_pair(lanes + p * kBoth), high = load_pair(lanes + p * kBoth + kWidth);
      const PairVec fixed_low = pack_int16(mul(scale[0], first_of_pair(low)), mul(scale[0], second_of_pair(low)));
      const PairVec fixed_high = pack_int16(mul(scale[1], first_of_pair(high)), mul(scale[1], second_of_pair(high)));
      const std::int64_t at = 2 * p * kRow + half * kTokenWords<Bf16Dot>;
      store_pair(chunk.x_words + at, first_halves(fixed_low, fixed_high));
      store_pair(chunk.x_words + at + kRow, second_halves(fixed_low, fixed_high));
      if (half == 1) {
        store_pair(chunk.key_words + p * kTokens, fixed_low);
        store_pair(chunk.key_words + p * kTokens + kWidth, fixed_high);
      }
    }
  }

  /// Neighbours along a row in one word. `count` is a multiple of 2 kWidth.
  static FLASHQLA_NOINLINE void row_words(const float* from, std::int64_t count, Word* to) {
    for (std::int64_t i = 0; i < count; i += 2 * kWidth)
      store_pair(to + i / 2, neighbour_words(load(from + i), load(from + i + kWidth)));
  }
};

/// Whether a value head of an item of chunk_backward reflects over some 256 tokens of its sequence.
inline bool reflects(const BackwardItem& item) {
  constexpr std::int64_t kTokensEach = 256, kPart = 64;
  const InputArguments& in = item.arguments.inputs;
  const std::int64_t batch = in.sequences.batch(item.sequence), begin = in.sequences.begin(item.sequence),
                     length = in.sequences.length(item.sequence), group = item.shape.group;
  alignas(64) float row[kMaxHeadDim], squares[kTokensEach], betas[kPart];
  for (std::int64_t first = 0; first < length; first += kTokensEach) {
    const std::int64_t n = length - first < kTokensEach ? length - first : kTokensEach;
    for (std::int64_t t = 0; t < n; ++t) {
      load_row(in.k.row(batch, begin + first + t, item.head_qk), in.k.dtype, item.shape.dim_k, item.shape.padded_k, row);
      Vec sums = zero();
      for (std::int64_t i = 0; i < item.shape.padded_k; i += kWidth) sums = fmadd(load(row + i), load(row + i), sums);
      squares[t] = sum(sums);
      if (in.problem.qk_l2norm) squares[t] /= squares[t] + static_cast<float>(in.problem.l2norm_eps);
    }
    for (std::int64_t member = 0; member < group; ++member) {
      Reflection reflection;
      for (std::int64_t t = 0; t < n; ++t) {
        const std::int64_t left = n - t, part = t % kPart;
        if (part == 0) {
          load_betas(in, batch, begin + first + t, item.head_qk * group + member, left < kPart ? left : kPart, betas);
        }
        reflection.add(betas[part] * squares[t]);
      }
      if (reflection.found()) return true;
    }
  }
  return false;
}
