// What the value heads of a q/k head share in one chunk: Q and K in the layouts of the products, their Gram matrix, and at the
// end the gradients of their rows. Included after chunk_backward_blocks.inl.

FLASHQLA_INLINE std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

struct ChunkPlace;

template <class Dot>
struct BackwardRun {
  const BackwardItem& item;
  const ChunkBackwardArguments& arguments;
  const InputArguments& inputs;
  const BackwardShape& shape;
  BackwardScratch<Dot> scratch;
  PrefetchList& prefetch;
  std::int64_t batch, begin, length;
  std::int64_t panels;   // of V
  std::int64_t steps_k;  // words along K
  std::int64_t segments;
  SavedShape saved;

  BackwardRun(const BackwardItem& item_, PrefetchList& prefetch_)
      : item(item_),
        arguments(item_.arguments),
        inputs(arguments.inputs),
        shape(item_.shape),
        scratch(shape, item_.scratch),
        prefetch(prefetch_),
        batch(inputs.sequences.batch(item_.sequence)),
        begin(inputs.sequences.begin(item_.sequence)),
        length(inputs.sequences.length(item_.sequence)),
        panels((shape.dim_v + kPanel - 1) / kPanel),
        steps_k((shape.dim_k + Dot::kPair - 1) / Dot::kPair),
        segments(shape.segments(length)),
        saved(inputs.problem) {}

  /// One past the last chunk of a segment.
  std::int64_t end_of_segment(std::int64_t segment) const {
    return smaller((segment + 1) * shape.chunks_per_segment, (length + kTokens - 1) / kTokens);
  }
  std::int64_t head_v(std::int64_t member) const { return item.head_qk * shape.group + member; }
  bool state_is_zero(const ChunkPlace& place) const;         // the state before the chunk
  bool next_d_state_is_zero(const ChunkPlace& place) const;  // the gradient of the state after it
  bool d_state_is_wanted(const ChunkPlace& place) const;     // the gradient of the state before it
  double norm_eps() const { return inputs.problem.qk_l2norm ? inputs.problem.l2norm_eps : -1.0; }
  /// The state before a segment; once the segment is done, the gradient of that state. With what the forward saved, only the
  /// first segment's state is here, and one gradient.
  float* stashed_state(std::int64_t member, std::int64_t segment) const {
    if (shape.saved) return item.stash + shape.stash(2 * member + (segment > 0));
    return item.stash + shape.stash(member * segments) + segment * shape.state();
  }
  const float* state_before(std::int64_t member, std::int64_t segment) const {
    if (!shape.saved || segment == 0) return stashed_state(member, segment);
    return arguments.saved + saved.state_at(row(), segment, head_v(member));
  }
  /// The state before a chunk of the segment, as readers of its rows take it.
  const typename Dot::B* state_rows(std::int64_t member, std::int64_t segment, std::int64_t in_segment) const {
    if constexpr (Packing<Dot>::kCopies) {
      return scratch.state_rows + in_segment * shape.state() / Dot::kPair;
    } else {
      return in_segment == 0 ? state_before(member, segment) : scratch.states + (in_segment - 1) * shape.state();
    }
  }
  /// Errors of a chunk that the forward saved.
  const float* saved_errors(std::int64_t member, std::int64_t position, std::int64_t tokens) const {
    return arguments.saved + saved.errors_at(row() + position, tokens, head_v(member));
  }
  /// The sequence's first among the rows of all batch entries.
  std::int64_t row() const { return batch * inputs.sequences.tokens + begin; }
  /// Errors of a chunk (numbered in the sequence, and in its segment).
  float* errors(std::int64_t member, std::int64_t chunk, std::int64_t in_segment) const {
    if (!shape.errors_kept) return scratch.errors + in_segment * shape.errors();
    return stashed_state(member, segments) + chunk * shape.errors();
  }
};

/// Between two register blocks. A chunk has about 240 of these and wants up to 2500 lines.
template <class Dot>
FLASHQLA_INLINE void prefetch_step(const BackwardRun<Dot>& run) {
  run.prefetch.template step<4>();
  run.prefetch.template step<4>();
}

/// A chunk of the sequence. Rows past its `tokens` are zero in every operand.
struct ChunkPlace {
  std::int64_t index, in_segment;
  std::int64_t position, token;  // of the first token: in the sequence, in the batch entry
  std::int64_t tokens;
};

template <class Dot>
ChunkPlace chunk_at(const BackwardRun<Dot>& run, std::int64_t index) {
  const std::int64_t position = index * kTokens;
  return {index, index % run.shape.chunks_per_segment, position, run.begin + position, smaller(kTokens, run.length - position)};
}

// Where a product with a state or its gradient is known to be nothing, or is wanted by nobody. A walk of 512 tokens has 16
// chunks.
template <class Dot>
FLASHQLA_INLINE bool BackwardRun<Dot>::state_is_zero(const ChunkPlace& place) const {
  return place.index == 0 && !arguments.initial_state.present();
}
template <class Dot>
FLASHQLA_INLINE bool BackwardRun<Dot>::next_d_state_is_zero(const ChunkPlace& place) const {
  return place.position + place.tokens == length && !arguments.d_final_state.present();
}
template <class Dot>
FLASHQLA_INLINE bool BackwardRun<Dot>::d_state_is_wanted(const ChunkPlace& place) const {
  return place.index > 0 || arguments.d_initial_state.present();
}

/// Rows of q (half 0) or k (half 1): xt, or its packed copies.
template <class Dot>
FLASHQLA_NOINLINE void prepare_rows(const BackwardRun<Dot>& run, const ChunkPlace& place, const ConstTokenView& view,
                                    std::int64_t half) {
  const GroupChunk<Dot>& chunk = run.scratch.chunks[place.in_segment];
  const std::int64_t row_k = run.shape.row_k, padded_k = run.shape.padded_k, head = run.item.head_qk;
  if constexpr (Packing<Dot>::kCopies) {
    Packing<Dot>::pack_rows(view.row(run.batch, place.token, head), view.stride_token, place.tokens, run.shape, run.norm_eps(),
                            half, chunk);
    return;
  }
  for (std::int64_t t = 0; t < kTokens; ++t) {
    float* row = run.scratch.rows + t * row_k;
    if (t < place.tokens) {
      load_row(view.row(run.batch, place.token + t, head), view.dtype, run.shape.dim_k, padded_k, row);
      if (run.norm_eps() >= 0.0) normalise_row(row, padded_k, run.norm_eps());
    } else {
      for (std::int64_t i = 0; i < padded_k; i += kWidth) store(row + i, zero());
    }
  }
  transpose_matrix(run.scratch.rows, kTokens, padded_k, row_k, chunk.xt + half * kTokens, kBoth);
}

/// A row of a panel of state rows as f32, but for state_worth: vector j.
template <class Dot>
FLASHQLA_INLINE Vec load_state_row(const typename Dot::B* row, int j) {
  if constexpr (Packing<Dot>::kCopies) {
    return Packing<Dot>::load_token_words(row + j * kWidth / Dot::kPair);
  } else {
    return load(row + j * kWidth);
  }
}

/// Lane block l of row k of the lanes of q (half 0) or k (half 1).
template <class Dot>
FLASHQLA_INLINE Vec load_x(const GroupChunk<Dot>& chunk, std::int64_t k, std::int64_t half, std::int64_t l) {
  if constexpr (Packing<Dot>::kCopies) {
    const auto* x = chunk.x_words + (2 * k + half) * kTokenWords<Dot> + l * kWidth / Dot::kPair;
    return mul(load(chunk.unscale + half * kTokens + l * kWidth), Packing<Dot>::load_token_words(x));
  } else {
    return load(chunk.xt + k * kBoth + half * kTokens + l * kWidth);
  }
}

/// Products of rows j0 .. of k with kWidth rows of q or k each, from copies: normalised if the problem says so.
template <class Dot>
FLASHQLA_INLINE void normalise_products(const BackwardRun<Dot>& run, const GroupChunk<Dot>& chunk, std::int64_t j0,
                                        std::int64_t first, std::int64_t second, Block& c) {
  if constexpr (Packing<Dot>::kCopies) {
    if (run.norm_eps() < 0.0) return;
    FLASHQLA_UNROLL
    for (int r = 0; r < kBlock; ++r) {
      const Vec factor = set1(chunk.norms[kTokens + j0 + r]);
      c[r][0] = mul(mul(factor, load(chunk.norms + first)), c[r][0]);
      c[r][1] = mul(mul(factor, load(chunk.norms + second)), c[r][1]);
    }
  }
}

/// gram: k_j.q_i and k_j.k_i for the lane blocks that hold some i >= j.
template <class Dot>
FLASHQLA_NOINLINE void prepare_gram(const BackwardRun<Dot>& run, const ChunkPlace& place) {
  const GroupChunk<Dot>& chunk = run.scratch.chunks[place.in_segment];
  for (std::int64_t j0 = 0; j0 < kTokens; j0 += kBlock) {
    for (std::int64_t l = j0 / kWidth; l < kLaneBlocks; ++l) {
      Block c;
      clear(c);
      multiply<Dot, 2, kTokens>(operands<Dot>(chunk.xt_words + kTokens + j0, 1, kBoth, chunk.xt_words + l * kWidth, kBoth),
                                run.steps_k, c);
      normalise_products(run, chunk, j0, l * kWidth, kTokens + l * kWidth, c);
      FLASHQLA_UNROLL
      for (int r = 0; r < kBlock; ++r) {
        store(chunk.gram + (j0 + r) * kBoth + l * kWidth, c[r][0]);
        store(chunk.gram + (j0 + r) * kBoth + kTokens + l * kWidth, c[r][1]);
      }
    }
  }
}

/// k_j.k_i alone, for the forward recurrence.
template <class Dot>
FLASHQLA_NOINLINE void prepare_key_gram(const BackwardRun<Dot>& run, const ChunkPlace& place) {
  const GroupChunk<Dot>& chunk = run.scratch.chunks[place.in_segment];
  const auto* keys = chunk.xt_words + kTokens;
  for (std::int64_t j0 = 0; j0 < kTokens; j0 += kBlock) {
    for (std::int64_t l = j0 / kPanel * kColumns; l < kLaneBlocks; l += kColumns) {
      Block c;
      clear(c);
      multiply<Dot, 2>(operands<Dot>(keys + j0, 1, kBoth, keys + l * kWidth, kBoth), run.steps_k, c);
      normalise_products(run, chunk, j0, kTokens + l * kWidth, kTokens + (l + 1) * kWidth, c);
      store_block(chunk.gram + j0 * kBoth + kTokens + l * kWidth, kBoth, c);
    }
  }
}

/// From the summed gradients of the rows as the recurrence reads them to those of q (half 0) or k (half 1) as given. With
/// y = x f and f = rsqrt(|x|^2 + eps): dx = f (dy - (dy.y) y).
template <class Dot>
FLASHQLA_NOINLINE void finish_rows(const BackwardRun<Dot>& run, const ChunkPlace& place, const MutableTokenView& d_view,
                                   const ConstTokenView& view, std::int64_t half) {
  if (!d_view.present()) return;
  const GroupChunk<Dot>& chunk = run.scratch.chunks[place.in_segment];
  const std::int64_t padded_k = run.shape.padded_k, dim_k = run.shape.dim_k, head = run.item.head_qk;
  constexpr std::int64_t kRow = kMaxHeadDim + kWidth;  // not a multiple of a power of two: 16 rows would fall on few L1 sets
  alignas(64) float rows[kWidth * kRow];
  alignas(64) float y[kMaxHeadDim];
  for (std::int64_t t0 = 0; t0 < place.tokens; t0 += kWidth) {
    transpose_matrix(chunk.gradient + half * kTokens + t0, padded_k, kWidth, kBoth, rows, kRow);
    for (std::int64_t t = t0; t < smaller(t0 + kWidth, place.tokens); ++t) {
      float* dy = rows + (t - t0) * kRow;
      Vec dot = zero(), factor = set1(1.0f);
      if (run.norm_eps() >= 0.0) {
        load_row(view.row(run.batch, place.token + t, head), view.dtype, dim_k, padded_k, y);
        factor = set1(normalise_row(y, padded_k, run.norm_eps()));
        for (std::int64_t i = 0; i < dim_k; i += kWidth) {  // past dim_k the rows of `gradient` hold anything
          dot = fmadd(first_lanes(load(dy + i), lanes_left(dim_k, i)), load(y + i), dot);
        }
        dot = set1(sum(dot));
      }
      for (std::int64_t i = 0; run.norm_eps() >= 0.0 && i < dim_k; i += kWidth) {
        store(dy + i, mul(factor, fnmadd(dot, load(y + i), load(dy + i))));
      }
      store_row(dy, dim_k, d_view.dtype, d_view.row(run.batch, place.token + t, head));
    }
  }
}
