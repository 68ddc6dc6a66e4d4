// The gradients of the rows of q and k of one value head and chunk, added up over the group: those of tokens as readers of the
// state and as writers into it (formulas in chunk_backward_reverse.inl). Included after chunk_backward_reverse.inl.

/// Adds to (or, from the first member of the group, becomes) the gradient of the rows; the columns lie `apart` in memory.
template <int kRows>
FLASHQLA_INLINE void add_gradients(float* to, std::int64_t apart, std::int64_t member, const Rows<kRows>& c) {
  FLASHQLA_UNROLL
  for (int r = 0; r < kRows; ++r) {
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      float* const at = to + r * kBoth + j * apart;
      store(at, member == 0 ? c[r][j] : add(load(at), c[r][j]));
    }
  }
}

/// What the tokens get as readers of the state: dQ, and dU S^T + dKK K of dK. rows_dot_i: the part of dg that token i brings.
template <class Dot>
FLASHQLA_NOINLINE void reader_gradients(const BackwardRun<Dot>& run, const ChunkPlace& place, const Gates& gates,
                                        std::int64_t member, const typename Dot::B* state, float* rows_dot) {
  const BackwardScratch<Dot>& scratch = run.scratch;
  const GroupChunk<Dot>& chunk = scratch.chunks[place.in_segment];
  const Vec scale = set1(static_cast<float>(run.inputs.scale));
  const bool zero_state = run.state_is_zero(place);
  using TokenDot = typename Packing<Dot>::TokenDot;
  for (std::int64_t l = 0; l < kLaneBlocks; ++l) {  // outermost: a lane block of zt stays in the first-level cache
    const auto* z = scratch.zt_words + l * run.shape.padded_v / Dot::kPair * kPanel;
    const float* zt_worth = scratch.zt_worth + l * kPanel;
    const Vec decay = load(gates.decay + l * kWidth);
    const Vec factor_q = mul(scale, decay), factor_k = mul(sub(zero(), decay), load(gates.beta + l * kWidth));
    for_tall_blocks(run.shape.dim_k, [&]<int kRows>(std::int64_t k0) FLASHQLA_INLINE_LAMBDA {
      float* const to = chunk.gradient + k0 * kBoth + l * kWidth;
      const auto add_token_products = [&](Rows<kRows>& c) FLASHQLA_INLINE_LAMBDA {
        multiply<TokenDot, 2, kTokens>(operands<TokenDot>(chunk.x_words + (2 * k0 + 1) * kTokenWords<Dot>, 2 * kTokenWords<Dot>,
                                                          1, scratch.rt_words + l * kWidth, kBoth),
                                       (l + 1) * kWidth / Dot::kPair, c);
      };
      Rows<kRows> c;
      if constexpr (Packing<Dot>::kCopies) {
        clear(c);
        add_token_products(c);
        Packing<Dot>::unfix_columns(load(scratch.rt_worth + l * kWidth), load(scratch.rt_worth + kTokens + l * kWidth), c);
        add_gradients(to, kTokens, member, c);
      }
      clear(c);
      for (std::int64_t p = 0; p < run.panels; ++p) {
        if (!zero_state)
          multiply<TokenDot, 2>(operands<TokenDot>(state + (p * run.shape.padded_k + k0) * kPanelWords<Dot>, kPanelWords<Dot>, 1,
                                                   z + p * kPanelWords<Dot> * kPanel, kPanel),
                                kPanelWords<Dot>, c);
        prefetch_step(run);
      }
      if constexpr (Packing<Dot>::kCopies) Packing<Dot>::unfix_columns(load(zt_worth), load(zt_worth + kWidth), c);
      if (gates.far) scale_columns({load(gates.decay_again + l * kWidth), load(gates.decay_again + l * kWidth)}, c);
      Vec dot = load(rows_dot + l * kWidth);
      FLASHQLA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        c[r][0] = mul(factor_q, c[r][0]);
        c[r][1] = mul(factor_k, c[r][1]);
        dot = fmadd(load_x(chunk, k0 + r, 0, l), c[r][0], fmadd(load_x(chunk, k0 + r, 1, l), c[r][1], dot));
      }
      store(rows_dot + l * kWidth, dot);
      if constexpr (!Packing<Dot>::kCopies) add_token_products(c);
      add_gradients(to, kTokens, Packing<Dot>::kCopies ? 1 : member, c);
    });
  }
}

/// What the tokens get as writers: Z + dP^T Q + dKK^T K of dK.
template <class Dot>
FLASHQLA_NOINLINE void writer_gradients(const BackwardRun<Dot>& run, const ChunkPlace& place, const Gates& gates,
                                        const typename Dot::B* d_state) {
  const BackwardScratch<Dot>& scratch = run.scratch;
  const GroupChunk<Dot>& chunk = scratch.chunks[place.in_segment];
  constexpr std::int64_t kHalf = kTokenWords<Dot>;  // words of Q in a row of x, rows of words of dP in r
  const bool zero_state = run.next_d_state_is_zero(place);
  for_tall_blocks(run.shape.dim_k, [&]<int kRows>(std::int64_t k0) FLASHQLA_INLINE_LAMBDA {
    for (std::int64_t l = 0; l < kLaneBlocks; l += kColumns) {
      float* const to = chunk.gradient + k0 * kBoth + kTokens + l * kWidth;
      const auto add_token_products = [&](Rows<kRows>& c) FLASHQLA_INLINE_LAMBDA {
        using TokenDot = typename Packing<Dot>::TokenDot;
        for (std::int64_t half = 0; half < 2; ++half) {  // rows i of the first lane block reach its columns j only
          const auto* x = chunk.x_words + (2 * k0 + half) * kHalf;
          const auto* r = scratch.r_words + half * kHalf * kTokens + l * kWidth;
          const std::int64_t first = l * kWidth / Dot::kPair, second = (l + 1) * kWidth / Dot::kPair;
          multiply<TokenDot, 1>(operands<TokenDot>(x + first, 2 * kHalf, 1, r + first * kTokens, kTokens), second - first, c);
          multiply<TokenDot, 2>(operands<TokenDot>(x + second, 2 * kHalf, 1, r + second * kTokens, kTokens), kHalf - second, c);
        }
      };
      Rows<kRows> c;
      if constexpr (Packing<Dot>::kCopies) {
        clear(c);
        add_token_products(c);
        Packing<Dot>::unfix_columns(load(scratch.r_worth + l * kWidth), load(scratch.r_worth + (l + 1) * kWidth), c);
        add_gradients(to, kWidth, 1, c);
      }
      clear(c);
      for (std::int64_t p = 0; p < run.panels; ++p) {
        if (!zero_state)
          multiply<Dot, 2>(operands<Dot>(d_state + (p * run.shape.padded_k + k0) * kPanelWords<Dot>, kPanelWords<Dot>, 1,
                                         scratch.et_words + p * kPanelWords<Dot> * kTokens + l * kWidth, kTokens),
                           kPanelWords<Dot>, c);
        prefetch_step(run);
      }
      const float* again = gates.rest_again + l * kWidth;
      if (gates.far) scale_columns({load(again), load(again + kWidth)}, c);
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        const std::int64_t at = (l + j) * kWidth;
        const Vec factor = mul(load(gates.rest + at), load(gates.beta + at));
        FLASHQLA_UNROLL
        for (int r = 0; r < kRows; ++r) c[r][j] = mul(factor, c[r][j]);
      }
      if constexpr (!Packing<Dot>::kCopies) add_token_products(c);
      add_gradients(to, kWidth, 1, c);
    }
  });
}
