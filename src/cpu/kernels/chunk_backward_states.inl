// The forward recurrence of one value head over one chunk: the errors e and the next state. Included after
// chunk_backward_group.inl.
//
//   e_i = v_i - decay_i (k_i S) - sum_{j<i} Gam_ij (k_i.k_j) beta_j e_j        Gam_ij = e^(cumulative_i - cumulative_j)
//   S' = total S + sum_i rest_i beta_i k_i^T e_i                               the factors are those of ChunkGates
//
// beta e of docs/math.md is never formed alone: with e itself the gradient of beta needs no division.

/// The log-decay factor Gam_ij for token j and the kWidth tokens i of lane block l; the caller masks i < j, where it may be
/// infinite.
FLASHQLA_INLINE Vec decay_since(const Gates& gates, std::int64_t j, std::int64_t l) {
  const Vec high = sub(load(gates.high + l * kWidth), set1(gates.high[j]));
  const Vec low = sub(load(gates.low + l * kWidth), set1(gates.low[j]));
  return exp(add(high, low));
}

/// With ChunkGates::far: both its parts.
FLASHQLA_INLINE FarDecay decay_parts_since(const Gates& gates, std::int64_t j, std::int64_t l) {
  return far_parts(
      difference({load(gates.high + l * kWidth), load(gates.low + l * kWidth)}, {set1(gates.high[j]), set1(gates.low[j])}));
}

/// With ChunkGates::far: both parts of `solve`.
template <class Dot>
FLASHQLA_NOINLINE void prepare_solve_far(const BackwardRun<Dot>& run, const ChunkPlace& place, const Gates& gates) {
  const Vec numbers = lane_numbers();
  const GroupChunk<Dot>& chunk = run.scratch.chunks[place.in_segment];
  for (std::int64_t j = 0; j < kTokens; ++j) {
    for (std::int64_t l = 0; l < kLaneBlocks; ++l) {
      const std::int64_t at = j * kTokens + l * kWidth;
      const FarDecay decay = decay_parts_since(gates, j, l);
      const Vec k_k = mul(set1(-gates.beta[j]), load(chunk.gram + j * kBoth + kTokens + l * kWidth));
      store(chunk.solve + at, from_token(mul(decay.near, k_k), l, j + 1, numbers));
      store(chunk.solve_far + at, from_token(flush(mul(decay.far, k_k)), l, j + 1, numbers));
    }
  }
}

/// solve [j][i] = -Gam_ij (k_i.k_j) beta_j for i > j, else 0.
template <class Dot>
FLASHQLA_NOINLINE void prepare_solve(const BackwardRun<Dot>& run, const ChunkPlace& place, const Gates& gates) {
  if (gates.far) return prepare_solve_far(run, place, gates);
  const Vec numbers = lane_numbers();
  const GroupChunk<Dot>& chunk = run.scratch.chunks[place.in_segment];
  const float* gram = chunk.gram;
  for (std::int64_t j = 0; j < kTokens; ++j) {
    for (std::int64_t l = 0; l < kLaneBlocks; ++l) {
      Vec a = zero();
      if ((l + 1) * kWidth > j) {
        const Vec factor = mul(decay_since(gates, j, l), load(gram + j * kBoth + kTokens + l * kWidth));
        a = from_token(mul(set1(-gates.beta[j]), factor), l, j + 1, numbers);
      }
      store(chunk.solve + j * kTokens + l * kWidth, a);
    }
  }
}

/// Fills in a copy of `rows` rows.
template <class Dot>
FLASHQLA_INLINE void finish_operand(const float* from, std::int64_t rows, const TokenOperand<Dot>& to) {
  if constexpr (Packing<Dot>::kCopies) Packing<Dot>::fix_panel(from, rows / 2, to.words, to.worth);
}

/// A panel of a state as the B operand of multiply_state.
template <class Dot>
FLASHQLA_INLINE const typename Dot::B* panel_as_words(const BackwardRun<Dot>& run, const float* panel) {
  if constexpr (Packing<Dot>::kCopies) {
    finish_operand(panel, 2 * run.steps_k, run.scratch.state_words);
    return run.scratch.state_words.words;
  } else {
    return panel;
  }
}

/// A factor of token `row` of [Q | K] in the other operand of a product with x_words.
template <class Dot>
FLASHQLA_INLINE float unscaled(const GroupChunk<Dot>& chunk, std::int64_t row, float factor) {
  if constexpr (Packing<Dot>::kCopies) {
    return factor * chunk.unscale[row];
  } else {
    return factor;
  }
}

/// c = K S for kBlock tokens from t0 on and a panel: `words` from panel_as_words. The errors v - k S are small where keys repeat:
/// with S in bf16 they would be swamped.
template <class Dot>
FLASHQLA_INLINE void multiply_state(const BackwardRun<Dot>& run, const GroupChunk<Dot>& chunk, std::int64_t t0,
                                    const typename Dot::B* words, Block& c) {
  clear(c);
  using TokenDot = typename Packing<Dot>::TokenDot;
  multiply<TokenDot, 2>(operands<TokenDot>(chunk.key_words + t0, 1, kKeyWords<Dot>, words, kPanel), run.steps_k, c);
  if constexpr (Packing<Dot>::kCopies) Packing<Dot>::unfix(chunk.unscale + kTokens + t0, run.scratch.state_words.worth, c);
}

/// weighted <- rest beta e for kBlock tokens of a panel.
template <class Dot>
FLASHQLA_INLINE void store_weighted(const BackwardRun<Dot>& run, const GroupChunk<Dot>& chunk, const Gates& gates,
                                    std::int64_t t0, const Block& e) {
  Block w;
  FLASHQLA_UNROLL
  for (int r = 0; r < kBlock; ++r) {
    const Vec factor = set1(unscaled(chunk, kTokens + t0 + r, gates.rest[t0 + r] * gates.beta[t0 + r]));
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) w[r][j] = mul(factor, e[r][j]);
  }
  if (gates.far) scale_again(gates.rest_again + t0, w);
  store_block(run.scratch.weighted.rows + t0 * kPanel, kPanel, w);
}

/// `weighted` of a panel whose errors are known.
template <class Dot>
FLASHQLA_NOINLINE void weigh_errors(const BackwardRun<Dot>& run, const GroupChunk<Dot>& chunk, const Gates& gates,
                                    const float* errors) {
  for (std::int64_t t0 = 0; t0 < kTokens; t0 += kBlock) {
    Block e;
    load_block(errors + t0 * kPanel, kPanel, e);
    store_weighted(run, chunk, gates, t0, e);
  }
  finish_operand(run.scratch.weighted.rows, kTokens, run.scratch.weighted);
}

/// kBlock rows of the substitution: contributions of rows before t0 have been subtracted.
FLASHQLA_INLINE void substitute(const float* solve, std::int64_t t0, Block& e) {
  FLASHQLA_UNROLL
  for (int r = 1; r < kBlock; ++r) {
    FLASHQLA_UNROLL
    for (int q = 0; q < r; ++q) {
      const Vec factor = set1(solve[(t0 + q) * kTokens + t0 + r]);
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) e[r][j] = fmadd(factor, e[q][j], e[r][j]);
    }
  }
}

/// With ChunkGates::far: both, for tokens t0 .. t0 + kBlock - 1 of a panel of `errors`.
template <class Dot>
FLASHQLA_NOINLINE void substitute_far(const GroupChunk<Dot>& chunk, std::int64_t t0, float* errors) {
  const FarMatrix solve{chunk.solve, chunk.solve_far, 1, kTokens};
  for (std::int64_t t = t0; t < t0 + kBlock; ++t) {
    Rows<1> e;
    load_block(errors + t * kPanel, kPanel, e);
    multiply_far(solve, t, 0, t, errors, kPanel, e);
    store_block(errors + t * kPanel, kPanel, e);
  }
}

/// The substitution is in f32 with any policy: its errors grow where keys repeat, and it is little work.
/// Errors of panel p of the chunk from that panel of the state before it, and `weighted` for the next state.
template <class Dot>
FLASHQLA_NOINLINE void solve_errors(const BackwardRun<Dot>& run, const ChunkPlace& place, const Gates& gates, std::int64_t head,
                                    std::int64_t p, const float* state, float* errors) {
  using Word = typename Dot::B;
  const BackwardScratch<Dot>& scratch = run.scratch;
  const GroupChunk<Dot>& chunk = scratch.chunks[place.in_segment];
  const bool zero_state = run.state_is_zero(place);
  const Word* words = zero_state ? nullptr : panel_as_words(run, state);
  for (std::int64_t t0 = 0; t0 < kTokens; t0 += kBlock) {
    Block e, v;
    clear(e);
    if (t0 < place.tokens) {
      if (!zero_state) multiply_state(run, chunk, t0, words, e);
      if (gates.far) scale_again(gates.decay_again + t0, e);
      load_rows_block(run.inputs.v, run.batch, place.token + t0, head, place.tokens - t0, run.shape.dim_v, p * kPanel, v);
      FLASHQLA_UNROLL
      for (int r = 0; r < kBlock; ++r) {
        const Vec decay = set1(gates.decay[t0 + r]);
        FLASHQLA_UNROLL
        for (int j = 0; j < kColumns; ++j) e[r][j] = fnmadd(decay, e[r][j], v[r][j]);
      }
      if (gates.far) {
        store_block(errors + t0 * kPanel, kPanel, e);
        substitute_far(chunk, t0, errors);
        load_block(errors + t0 * kPanel, kPanel, e);
      } else {
        multiply<F32Dot, 2>(operands<F32Dot>(chunk.solve + t0, 1, kTokens, errors, kPanel), t0, e);
        substitute(chunk.solve, t0, e);
      }
    }
    store_block(errors + t0 * kPanel, kPanel, e);
    store_weighted(run, chunk, gates, t0, e);
    prefetch_step(run);
  }
  finish_operand(scratch.weighted.rows, kTokens, scratch.weighted);
}

/// c = total from + A B for rows of a panel, `x` being A and the words of `operand` B; calls use(r, j, v) with the vectors of
/// `from`, after total_again. `from` comes after the product: its loads have all of it to arrive.
template <class Dot, int kRows, class Use>
FLASHQLA_INLINE void update_rows(const Gates& gates, const typename Dot::B* x, const TokenOperand<Dot>& operand,
                                 std::int64_t steps, const float* from, Rows<kRows>& c, Use use) {
  using TokenDot = typename Packing<Dot>::TokenDot;
  clear(c);
  multiply<TokenDot, 2>(operands<TokenDot>(x, 2 * kTokenWords<Dot>, 1, operand.words, kPanel), steps, c);
  const Vec total = set1(gates.total);
  const auto add_decayed = [&]<bool kFar>() FLASHQLA_INLINE_LAMBDA {
    FLASHQLA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        Vec before = load(from + r * kPanel + j * kWidth);
        if (kFar) before = mul(set1(gates.total_again), before);
        use(r, j, before);
        if constexpr (Packing<Dot>::kCopies) {
          c[r][j] = fmadd(load(operand.worth + j * kWidth), Packing<Dot>::to_f32(c[r][j]), mul(total, before));
        } else {
          c[r][j] = fmadd(total, before, c[r][j]);
        }
      }
    }
  };
  gates.far ? add_decayed.template operator()<true>() : add_decayed.template operator()<false>();
}

/// A panel of S' from that of S and `weighted`. `to` may be `from`.
template <class Dot>
FLASHQLA_NOINLINE void advance_state(const BackwardRun<Dot>& run, const ChunkPlace& place, const Gates& gates, const float* from,
                                     float* to) {
  const auto* keys = run.scratch.chunks[place.in_segment].x_words + kTokenWords<Dot>;
  for_tall_blocks(run.shape.dim_k, [&]<int kRows>(std::int64_t k0) FLASHQLA_INLINE_LAMBDA {
    Rows<kRows> c;
    update_rows<Dot>(gates, keys + k0 * 2 * kTokenWords<Dot>, run.scratch.weighted, kTokenWords<Dot>, from + k0 * kPanel, c,
                     [](int, int, Vec) FLASHQLA_INLINE_LAMBDA {});
    store_block(to + k0 * kPanel, kPanel, c);
    prefetch_step(run);
  });
}

/// A head's matrix of the caller (rows of K or of V) to panels, or zero.
template <class Dot>
inline void load_state(const BackwardRun<Dot>& run, const ConstStateView& view, std::int64_t head, float* state) {
  const std::int64_t dim_k = run.shape.dim_k, dim_v = run.shape.dim_v, size = run.panels * run.shape.padded_k * kPanel;
  for (std::int64_t i = 0; i < size; i += kWidth) store(state + i, zero());
  if (!view.present()) return;
  const std::byte* first = view.matrix(run.item.sequence, head);
  const std::int64_t row_bytes = view.stride_outer * element_bytes(view.dtype);
  const bool keys_first = view.layout == StateLayout::key_value;
  const std::int64_t rows = keys_first ? dim_k : dim_v, columns = keys_first ? dim_v : dim_k;
  alignas(64) float row[kMaxHeadDim + kWidth];
  for (std::int64_t i = 0; i < rows; ++i) {
    load_row(first + i * row_bytes, view.dtype, columns, round_up(columns, kWidth), row);
    for (std::int64_t j = 0; j < columns; ++j) {
      const std::int64_t k = keys_first ? i : j, v = keys_first ? j : i;
      state[(v / kPanel * run.shape.padded_k + k) * kPanel + v % kPanel] = row[j];
    }
  }
}

template <class Dot>
inline void store_state(const BackwardRun<Dot>& run, const MutableStateView& view, std::int64_t head, const float* state) {
  if (!view.present()) return;
  std::byte* first = view.matrix(run.item.sequence, head);
  const std::int64_t row_bytes = view.stride_outer * element_bytes(view.dtype);
  const bool keys_first = view.layout == StateLayout::key_value;
  const std::int64_t rows = keys_first ? run.shape.dim_k : run.shape.dim_v;
  const std::int64_t columns = keys_first ? run.shape.dim_v : run.shape.dim_k;
  alignas(64) float row[kMaxHeadDim + kWidth];
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      const std::int64_t k = keys_first ? i : j, v = keys_first ? j : i;
      row[j] = state[(v / kPanel * run.shape.padded_k + k) * kPanel + v % kPanel];
    }
    for (std::int64_t j = 0; j < columns; j += kWidth) {
      store_any(first + i * row_bytes, view.dtype, j, lanes_left(columns, j), load(row + j));
    }
  }
}

template <class Dot>
inline void copy_state(const BackwardRun<Dot>& run, const float* from, float* to) {
  const std::int64_t size = run.panels * run.shape.padded_k * kPanel;
  for (std::int64_t i = 0; i < size; i += kWidth) store(to + i, load(from + i));
}
