// The reverse recurrence of one value head over one chunk: from the gradient dS' of the state after it to dS before it and the
// gradients of its tokens. Included after chunk_backward_states.inl. With D the gradient of beta e and all sums over the chunk:
//
//   D_j = rest_j (k_j dS') + sum_{i>=j} scale Gam_ij (q_i.k_j) do_i - sum_{i>j} Gam_ij (k_i.k_j) beta_i D_i
//   dv = beta D,  dbeta_i = D_i.e_i,  dU_i = -decay_i beta_i D_i,  dOg_i = scale decay_i do_i
//   dP_ij = scale Gam_ij beta_j (do_i.e_j) for i >= j,  dKK_ij = -Gam_ij beta_i beta_j (D_i.e_j) for i > j
//   dQ = dOg S^T + dP K,  dK = dU S^T + dKK K + dP^T Q + dKK^T K + Z with Z_j = rest_j beta_j (e_j dS'^T)
//   dS = total dS' + Q^T dOg + K^T dU
//   dg_t = total <dS', S> + sum_{j<t} k_j.Z_j + sum_{i>=t} (q_i.(dOg S^T)_i + k_i.(dU S^T)_i) + sum_{i>=t>j} (dP * QK^T + dKK *
//   KK^T)_ij
//
// No term of dg is there to be cancelled by another, so strong decay (where dg is tiny) costs no digits.

/// With ChunkGates::far: both parts of what prepare_reverse makes.
template <class Dot>
FLASHQLA_NOINLINE void prepare_reverse_far(const BackwardRun<Dot>& run, const ChunkPlace& place, const Gates& gates) {
  const BackwardScratch<Dot>& scratch = run.scratch;
  const Vec numbers = lane_numbers(), scale = set1(static_cast<float>(run.inputs.scale));
  for (std::int64_t j = 0; j < kTokens; ++j) {
    for (std::int64_t l = 0; l < kLaneBlocks; ++l) {
      const std::int64_t at = j * kTokens + l * kWidth;
      const float* row = scratch.chunks[place.in_segment].gram + j * kBoth + l * kWidth;
      const FarDecay decay = decay_parts_since(gates, j, l);
      const Vec near = from_token(decay.near, l, j, numbers), far = from_token(decay.far, l, j, numbers);
      const Vec k_k = mul(sub(zero(), load(gates.beta + l * kWidth)), load(row + kTokens)), q_k = mul(scale, load(row));
      store(scratch.between + at, near);
      store(scratch.between_far + at, far);
      store(scratch.reverse_solve + at, from_token(mul(near, k_k), l, j + 1, numbers));
      store(scratch.reverse_solve_far + at, from_token(flush(mul(far, k_k)), l, j + 1, numbers));
      store(scratch.scores + at, from_token(mul(near, q_k), l, j, numbers));
      store(scratch.scores_far + at, from_token(flush(mul(far, q_k)), l, j, numbers));
    }
  }
}

/// Gates of the chunk as matrices [token j][token i]: between = Gam (i >= j), solve as in prepare_solve but with beta_i, in
/// reverse_solve, and scores = scale Gam (q_i.k_j).
template <class Dot>
FLASHQLA_NOINLINE void prepare_reverse(const BackwardRun<Dot>& run, const ChunkPlace& place, const Gates& gates) {
  if (gates.far) return prepare_reverse_far(run, place, gates);
  const BackwardScratch<Dot>& scratch = run.scratch;
  const float* gram = scratch.chunks[place.in_segment].gram;
  const Vec numbers = lane_numbers(), scale = set1(static_cast<float>(run.inputs.scale));
  for (std::int64_t j = 0; j < kTokens; ++j) {
    for (std::int64_t l = 0; l < kLaneBlocks; ++l) {
      const std::int64_t at = j * kTokens + l * kWidth;
      Vec between = zero(), reverse = zero(), scores = zero();
      if ((l + 1) * kWidth > j) {
        const float* row = gram + j * kBoth + l * kWidth;
        between = from_token(decay_since(gates, j, l), l, j, numbers);
        const Vec minus_beta = sub(zero(), load(gates.beta + l * kWidth));
        reverse = from_token(mul(mul(minus_beta, between), load(row + kTokens)), l, j + 1, numbers);
        scores = from_token(mul(mul(scale, between), load(row)), l, j, numbers);
      }
      store(scratch.between + at, between);
      store(scratch.reverse_solve + at, reverse);
      store(scratch.scores + at, scores);
    }
  }
}

/// A panel's d_o (half 0) or D (half 1) [token][kPanel] to zt.
template <class Dot>
FLASHQLA_INLINE void transpose_to_zt(const BackwardRun<Dot>& run, const float* rows, std::int64_t p, std::int64_t half) {
  for (std::int64_t l = 0; l < kLaneBlocks; ++l) {
    float* to = run.scratch.zt + (l * run.shape.padded_v + p * kPanel) * kPanel + half * kWidth;
    transpose_matrix(rows + l * kWidth * kPanel, kWidth, kPanel, kPanel, to, kPanel);
  }
}

/// Of panel p: d_o, the upper half of y, the left half of zt.
template <class Dot>
FLASHQLA_NOINLINE void prepare_d_o(const BackwardRun<Dot>& run, const ChunkPlace& place, const Gates& gates, std::int64_t head,
                                   std::int64_t p) {
  const BackwardScratch<Dot>& scratch = run.scratch;
  const float scale = static_cast<float>(run.inputs.scale);
  const std::int64_t rows = run.arguments.d_o.present() ? place.tokens : 0;
  for (std::int64_t t0 = 0; t0 < kTokens; t0 += kBlock) {
    Block c;
    load_rows_block(run.arguments.d_o, run.batch, place.token + t0, head, rows - t0, run.shape.dim_v, p * kPanel, c);
    store_block(scratch.d_o + t0 * kPanel, kPanel, c);
    FLASHQLA_UNROLL
    for (int r = 0; r < kBlock; ++r) {
      const Vec factor = set1(unscaled(scratch.chunks[place.in_segment], t0 + r, scale * gates.decay[t0 + r]));
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) c[r][j] = mul(factor, c[r][j]);
    }
    if (gates.far) scale_again(gates.decay_again + t0, c);
    store_block(scratch.y.rows + t0 * kPanel, kPanel, c);
  }
  transpose_to_zt(run, scratch.d_o, p, 0);
}

/// kBlock rows of the transposed substitution: contributions of rows after t0 + kBlock - 1 have been subtracted.
FLASHQLA_INLINE void substitute_back(const float* reverse_solve, std::int64_t t0, Block& d) {
  FLASHQLA_UNROLL
  for (int r = kBlock - 2; r >= 0; --r) {
    FLASHQLA_UNROLL
    for (int q = kBlock - 1; q > r; --q) {
      const Vec factor = set1(reverse_solve[(t0 + r) * kTokens + t0 + q]);
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) d[r][j] = fmadd(factor, d[q][j], d[r][j]);
    }
  }
}

/// With ChunkGates::far: what comes from d_o and the substitution, for tokens t0 .. t0 + kBlock - 1 of scratch.panel.
template <class Dot>
FLASHQLA_NOINLINE void substitute_back_far(const BackwardScratch<Dot>& scratch, std::int64_t t0) {
  const FarMatrix scores{scratch.scores, scratch.scores_far, kTokens, 1};
  const FarMatrix solve{scratch.reverse_solve, scratch.reverse_solve_far, kTokens, 1};
  for (std::int64_t t = t0 + kBlock - 1; t >= t0; --t) {
    Rows<1> d;
    load_block(scratch.panel + t * kPanel, kPanel, d);
    multiply_far(scores, t, t, kTokens, scratch.d_o, kPanel, d);
    multiply_far(solve, t, t + 1, kTokens, scratch.panel, kPanel, d);
    store_block(scratch.panel + t * kPanel, kPanel, d);
  }
}

/// One block of D is done: d_v, the lower half of y, and its part of the gradient of beta.
template <class Dot>
FLASHQLA_INLINE void finish_d(const BackwardRun<Dot>& run, const ChunkPlace& place, const Gates& gates, std::int64_t head,
                              const float* errors, std::int64_t p, std::int64_t t0, const Block& d) {
  const BackwardScratch<Dot>& scratch = run.scratch;
  Block c;
  FLASHQLA_UNROLL
  for (int r = 0; r < kBlock; ++r) {
    const Vec beta = set1(gates.beta[t0 + r]);
    const float* e = errors + (t0 + r) * kPanel;
    float* sums = scratch.beta_sums + (t0 + r) * kWidth;
    Vec sum = p == 0 ? zero() : load(sums);
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      sum = fmadd(d[r][j], load(e + j * kWidth), sum);
      c[r][j] = mul(beta, d[r][j]);
    }
    store(sums, sum);
  }
  if (run.arguments.d_v.present()) {
    store_rows_block(run.arguments.d_v, run.batch, place.token + t0, head, place.tokens - t0, run.shape.dim_v, p * kPanel, c);
  }
  FLASHQLA_UNROLL
  for (int r = 0; r < kBlock; ++r) {
    const Vec factor = set1(unscaled(scratch.chunks[place.in_segment], kTokens + t0 + r, -gates.decay[t0 + r]));
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) c[r][j] = mul(factor, c[r][j]);
  }
  if (gates.far) scale_again(gates.decay_again + t0, c);
  store_block(scratch.y.rows + (kTokens + t0) * kPanel, kPanel, c);
}

/// Of panel p: D, and from it d_v, dbeta, the lower half of y and the right half of zt; et.
template <class Dot>
FLASHQLA_NOINLINE void solve_d(const BackwardRun<Dot>& run, const ChunkPlace& place, const Gates& gates, std::int64_t head,
                               std::int64_t p, const float* errors, const float* d_state) {
  using Word = typename Dot::B;
  const BackwardScratch<Dot>& scratch = run.scratch;
  const bool zero_state = run.next_d_state_is_zero(place);
  const Word* words = zero_state ? nullptr : panel_as_words(run, d_state);
  if (Packing<Dot>::kCopies && zero_state) {
    for (int j = 0; j < kColumns; ++j) store(scratch.state_words.worth + j * kWidth, zero());
  }
  float* panel = scratch.panel;
  for (std::int64_t t0 = kTokens - kBlock; t0 >= 0; t0 -= kBlock) {
    Block d;
    clear(d);
    if (t0 < place.tokens) {
      if (!zero_state) multiply_state(run, scratch.chunks[place.in_segment], t0, words, d);
      if (gates.far) scale_again(gates.rest_again + t0, d);
      FLASHQLA_UNROLL
      for (int r = 0; r < kBlock; ++r) {
        const Vec rest = set1(gates.rest[t0 + r]);
        const float* e = errors + (t0 + r) * kPanel;
        float* sums = scratch.write_sums + (t0 + r) * kWidth;
        Vec sum = p == 0 ? zero() : load(sums), squares = zero();
        FLASHQLA_UNROLL
        for (int j = 0; j < kColumns; ++j) {
          const Vec written = mul(rest, load(e + j * kWidth));
          sum = fmadd(d[r][j], written, sum);  // rest d alone may be too small where e is large
          d[r][j] = mul(rest, d[r][j]);
          if constexpr (Packing<Dot>::kCopies) {
            const Vec rounded = mul(load(scratch.state_words.worth + j * kWidth), written);
            squares = fmadd(rounded, rounded, squares);
          }
        }
        store(sums, sum);
        if constexpr (Packing<Dot>::kCopies) {
          float* to = scratch.write_squares + (t0 + r) * kWidth;
          store(to, p == 0 ? squares : add(load(to), squares));
        }
      }
      if (gates.far) {
        store_block(panel + t0 * kPanel, kPanel, d);
        substitute_back_far(scratch, t0);
        load_block(panel + t0 * kPanel, kPanel, d);
      } else {
        const std::int64_t after = t0 + kBlock;
        multiply<F32Dot, 2>(operands<F32Dot>(scratch.scores + t0 * kTokens + t0, kTokens, 1, scratch.d_o + t0 * kPanel, kPanel),
                            kTokens - t0, d);
        multiply<F32Dot, 2>(
            operands<F32Dot>(scratch.reverse_solve + t0 * kTokens + after, kTokens, 1, panel + after * kPanel, kPanel),
            kTokens - after, d);
        substitute_back(scratch.reverse_solve, t0, d);
      }
    }
    store_block(panel + t0 * kPanel, kPanel, d);
    finish_d(run, place, gates, head, errors, p, t0, d);
    prefetch_step(run);
  }
  transpose_to_zt(run, panel, p, 1);
  finish_operand(scratch.y.rows, kBoth, scratch.y);
  transpose_matrix(errors, kTokens, kPanel, kPanel, scratch.et + p * kPanel * kTokens, kTokens);
}

/// rt = [dP^T | dKK^T] and flow, the gradient of log Gam below the diagonal.
template <class Dot>
FLASHQLA_NOINLINE void multiply_errors(const BackwardRun<Dot>& run, const ChunkPlace& place, const Gates& gates) {
  const BackwardScratch<Dot>& scratch = run.scratch;
  const float* gram = scratch.chunks[place.in_segment].gram;
  const Vec numbers = lane_numbers();
  const float scale = static_cast<float>(run.inputs.scale);
  for (std::int64_t j0 = 0; j0 < kTokens; j0 += kBlock) {
    for (std::int64_t l = j0 / kWidth; l < kLaneBlocks; ++l) {
      Block c;
      clear(c);
      multiply<F32Dot, 2>(operands<F32Dot>(scratch.et + j0, 1, kTokens, scratch.zt + l * run.shape.padded_v * kPanel, kPanel),
                          run.panels * kPanel, c);
      const Vec beta_i = load(gates.beta + l * kWidth);
      FLASHQLA_UNROLL
      for (int r = 0; r < kBlock; ++r) {
        const std::int64_t j = j0 + r;
        const Vec weight = mul(set1(gates.beta[j]), load(scratch.between + j * kTokens + l * kWidth));
        Vec d_p = from_token(mul(c[r][0], mul(set1(scale), weight)), l, j, numbers);
        Vec d_kk = from_token(mul(c[r][1], mul(sub(zero(), beta_i), weight)), l, j + 1, numbers);
        if (gates.far) {
          const Vec far = mul(set1(gates.beta[j]), load(scratch.between_far + j * kTokens + l * kWidth)), unit = set1(kFarUnit);
          const Vec far_p = mul(c[r][0], mul(set1(scale), far)), far_kk = mul(c[r][1], mul(sub(zero(), beta_i), far));
          d_p = flush(fmadd(unit, from_token(far_p, l, j, numbers), d_p));
          d_kk = flush(fmadd(unit, from_token(far_kk, l, j + 1, numbers), d_kk));
        }
        const float* row = gram + j * kBoth + l * kWidth;
        const Vec flow = fmadd(d_p, load(row), mul(d_kk, load(row + kTokens)));
        store(scratch.rt + j * kBoth + l * kWidth, d_p);
        store(scratch.rt + j * kBoth + kTokens + l * kWidth, d_kk);
        store(scratch.flow + j * kTokens + l * kWidth, from_token(flow, l, j + 1, numbers));
      }
    }
  }
  for (int half = 0; half < 2; ++half) {
    for (std::int64_t l = 0; l < kLaneBlocks; ++l) {  // blocks above the diagonal of r are never read
      transpose_matrix(scratch.rt + half * kTokens + l * kWidth, (l + 1) * kWidth, kWidth, kBoth,
                       scratch.r + (half * kTokens + l * kWidth) * kTokens, kTokens);
    }
  }
  if constexpr (Packing<Dot>::kCopies) {
    Packing<Dot>::fix_token_products(scratch, scratch.chunks[place.in_segment].unscale);
    for (std::int64_t l = 0; l < kLaneBlocks; ++l) {
      const std::int64_t at = l * run.shape.padded_v * kPanel;
      Packing<Dot>::fix_panel(scratch.zt + at, scratch.state_worth + place.in_segment * run.shape.padded_v,
                              run.panels * kPanel / 2, scratch.zt_words + at / Dot::kPair, scratch.zt_worth + l * kPanel,
                              scratch.zt_squares + l * kPanel);
    }
    Packing<Dot>::row_pairs(scratch.et, run.panels * kPanel, kTokens, kTokens, scratch.et_words, kTokens);
  }
}

/// total_again <dS', S> so far, and the variance of what the rounding of S does to it in units of kFixedVariance.
struct StateDot {
  double sum = 0.0, rounded = 0.0;
};

/// A panel of dS before the chunk into `to` (which may be d_state) and `rows`. Adds to `state_dot`.
template <class Dot>
FLASHQLA_NOINLINE void retreat_state(const BackwardRun<Dot>& run, const ChunkPlace& place, const Gates& gates, std::int64_t p,
                                     const typename Dot::B* state_rows, const float* d_state, float* to, typename Dot::B* rows,
                                     StateDot& state_dot) {
  const auto* x = run.scratch.chunks[place.in_segment].x_words;
  Vec dot[kColumns] = {zero(), zero()}, squares[kColumns] = {zero(), zero()};
  for_tall_blocks(run.shape.dim_k, [&]<int kRows>(std::int64_t k0) FLASHQLA_INLINE_LAMBDA {
    Rows<kRows> c;
    update_rows<Dot>(gates, x + k0 * 2 * kTokenWords<Dot>, run.scratch.y, 2 * kTokenWords<Dot>, d_state + k0 * kPanel, c,
                     [&](int r, int j, Vec v) FLASHQLA_INLINE_LAMBDA {
                       dot[j] = fmadd(v, load_state_row<Dot>(state_rows + (k0 + r) * kPanelWords<Dot>, j), dot[j]);
                       if constexpr (Packing<Dot>::kCopies) squares[j] = fmadd(v, v, squares[j]);
                     });
    store_block(to + k0 * kPanel, kPanel, c);
    if constexpr (Packing<Dot>::kCopies) Packing<Dot>::store_rows(c, rows + k0 * kPanelWords<Dot>);
    prefetch_step(run);
  });
  if constexpr (Packing<Dot>::kCopies) {
    const float* worth = run.scratch.state_worth + place.in_segment * run.shape.padded_v + p * kPanel;
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      const Vec unit = load(worth + j * kWidth);
      dot[j] = mul(unit, dot[j]);
      squares[j] = mul(mul(unit, unit), squares[j]);
    }
    state_dot.rounded += static_cast<double>(sum(add(squares[0], squares[1])));
  }
  state_dot.sum += static_cast<double>(sum(add(dot[0], dot[1])));
}
