// chunk_forward of one q/k head and some of its value heads over one chunk of at most kTokens tokens
// (docs/design/cpu_forward.md). With S the state before the chunk, D = e^(cumulative decay), R = e^(decay from a token to the
// chunk's end), E_ij = e^(decay between tokens j and i):
//   W = V - D o (K S);  e = (I + stril(E o K K^T) o beta_j)^-1 W;  O = scale D o (Q S) + (tril(scale E o Q K^T) o beta_j) e
//   S = D_end S + K^T (R o beta o e)
// beta multiplies columns j of the two matrices, so that the errors e themselves come out: the backward wants those.
// Once a q/k head: the transposed keys and queries, K K^T, Q K^T. Once a value head: the inverse and the two masked matrices.
// Once a slab of columns, in the first-level cache: the rest. The dot policy does the products with K and Q on the left. What
// stays in the state is more delicate: e is always f32, and K^T (R o beta o e) is f32 or, with packed operands,
// what chunk_forward_fixed.inl makes of it. Included inside an instruction set's namespace.
#pragma once

#include "cpu/kernels/gates.inl"
#include "cpu/kernels/gemm.inl"
#include "cpu/kernels/prefetch.inl"
#include "cpu/kernels/saved.inl"

/// What chunk_forward_fixed.inl keeps of a chunk.
template <int kTokens>
struct PackedChunk {
  alignas(64) float unscale[kTokens];  // what takes a token's key in fixed point back
  bool keys_in_f32;                    // whether ForwardScratch::keys is there
  bool precise;                        // whether the current value head takes K S and the update in f32
};

/// What is known of the states at both ends of the current chunk of an item.
struct ChunkEnds {
  bool zero_before = false;  // nothing has been written yet: K S = Q S = 0
  bool wanted_after = true;  // somebody reads the state after the chunk
};

/// Scratch of one work item. `take` hands out 64-byte aligned pieces; with a null base it only counts.
template <class Dot, int kTokens>
struct ForwardScratch {
  using B = typename Dot::B;

  std::int64_t padded_k;
  SlabRange range;
  ChunkEnds ends;
  ChunkGates<kTokens>* gates;
  B* panel;                             // [padded_k / kPair][2 kTokens]: keys, then queries, transposed
  float* keys;                          // the keys in f32, transposed: part of the panel, or [padded_k][kTokens]
  float* factors;                       // [2 kTokens]: what L2 normalisation multiplies the rows by
  float* gram;                          // [2 kTokens][kTokens]: K K^T, then Q K^T, of normalised rows
  float* negative;                      // [kTokens][kTokens]: -stril(E o K K^T) o beta_j
  float* solve;                         // [kTokens][kTokens]: the inverse
  float* attention;                     // [kTokens][kTokens]: tril(scale E o Q K^T) o beta_j
  float *negative_far, *attention_far;  // with ChunkGates::far, the far parts
  float *read_k, *read_q, *write_k;     // [kTokens]: D, scale D and R beta, times the rows' factors
  float* values;                        // [kTokens][padded V]: rows of v, replaced by rows of o
  float *w, *e, *weighted;              // W, e, R o beta o e: [kTokens][slab]
  float* states;                        // [heads][padded_k * padded V], in slabs
  B* operands;                          // the same states as right operand: the same array, or pair rows
  PackedChunk<kTokens>* packed;         // these three with packed operands only
  std::int16_t* fixed_keys;             // [padded_k][kTokens]
  B* fixed_rows;                        // [kTokens / 2][slab]
  std::size_t bytes = 0;

  ForwardScratch(std::byte* base, std::int64_t padded_k_, const SlabRange& range_, std::int64_t heads)
      : padded_k(padded_k_), range(range_) {
    take(base, 1, gates);
    take(base, padded_k / Dot::kPair * 2 * kTokens, panel);
    take(base, 2 * kTokens, factors);
    take(base, 2 * kTokens * kTokens, gram);
    take(base, kTokens * kTokens, negative);
    take(base, kTokens * kTokens, solve);
    take(base, kTokens * kTokens, attention);
    take(base, kTokens * kTokens, negative_far);
    take(base, kTokens * kTokens, attention_far);
    take(base, kTokens, read_k);
    take(base, kTokens, read_q);
    take(base, kTokens, write_k);
    take(base, kTokens * kSlabColumns, w);
    take(base, kTokens * kSlabColumns, e);
    take(base, kTokens * kSlabColumns, weighted);
    take(base, kTokens * range.padded(), values);
    take(base, heads * state_size(), states);
    if constexpr (kPacked<Dot>) {
      take(base, padded_k * kTokens, keys);
      take(base, heads * state_size() / Dot::kPair, operands);
      take(base, 1, packed);
      take(base, padded_k * kTokens, fixed_keys);
      take(base, kTokens / 2 * kSlabColumns, fixed_rows);
    } else {
      keys = panel;
      operands = states;
    }
  }

  static constexpr std::int64_t kKeysStride = kPacked<Dot> ? kTokens : 2 * kTokens;
  std::int64_t state_size() const { return padded_k * range.padded(); }
  /// Along K, of K S and Q S.
  std::int64_t projection_steps() const { return ends.zero_before ? 0 : padded_k / Dot::kPair; }
  float* state(std::int64_t head) const { return states + head * state_size(); }
  B* operand(std::int64_t head) const { return operands + head * state_size() / Dot::kPair; }

 private:
  template <class T>
  void take(std::byte* base, std::int64_t count, T*& piece) {
    piece = base == nullptr ? nullptr : reinterpret_cast<T*>(base + bytes);
    bytes += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
  }
};

// Of chunk_forward_fixed.inl, for packed operands.
template <class Dot, int kTokens>
void prepare_fixed_keys(const ForwardScratch<Dot, kTokens>& x);
template <class Dot, int kTokens>
void choose_precision(const ForwardScratch<Dot, kTokens>& x);
// Of chunk_forward_packed.inl.
template <class Dot, int kTokens, class Prefetch>
void advance_packed(const ForwardScratch<Dot, kTokens>& x, const ConstTokenView& v, const MutableTokenView& o, std::int64_t batch,
                    std::int64_t token, std::int64_t head, std::int64_t place, std::int64_t n, Prefetch& soon);

/// The right operand of a state that has just been loaded.
template <class Dot, int kTokens>
inline void pack_state(const ForwardScratch<Dot, kTokens>& x, std::int64_t head) {
  if constexpr (kPacked<Dot>) {
    for (std::int64_t s = 0; s < x.range.slabs(); ++s) {
      const std::int64_t columns = x.range.columns(s), first = s * x.padded_k * kSlabColumns;
      for (std::int64_t k = 0; k < x.padded_k; k += 2) {
        for (std::int64_t c = 0; c < columns; c += kWidth) {
          const float* p = x.state(head) + first + k * columns + c;
          const Vec pair[2][1] = {{load(p)}, {load(p + columns)}};
          Dot::store_b(x.operand(head) + first / 2 + c, columns, k, pair);
        }
      }
    }
  }
}

/// Factors of L2 normalisation, from the panel (1 when it is not asked for).
template <class Dot, int kTokens>
inline void prepare_factors(const ForwardScratch<Dot, kTokens>& x, const Problem& problem) {
  constexpr int kVectors = 2 * kTokens / kWidth, kSums = 4;  // several sums, each short: less rounding
  for (int j = 0; j < kVectors; ++j) {
    Vec factor = set1(1.0f);
    if (problem.qk_l2norm) {
      Vec sums[kSums] = {zero(), zero(), zero(), zero()};
      for (std::int64_t d = 0; d < x.padded_k / Dot::kPair; d += kSums) {
        FLASHQLA_UNROLL
        for (int i = 0; i < kSums; ++i) sums[i] = Dot::add_squares(sums[i], x.panel + (d + i) * 2 * kTokens + j * kWidth);
      }
      const Vec sum = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
      factor = div(set1(1.0f), sqrt(add(sum, set1(static_cast<float>(problem.l2norm_eps)))));
    }
    store(x.factors + j * kWidth, factor);
  }
}

/// Keys and queries of the chunk, and the two products of keys. Tokens from n on are zero.
template <class Dot, int kTokens>
inline void prepare_keys(const ForwardScratch<Dot, kTokens>& x, const InputArguments& in, std::int64_t batch, std::int64_t token,
                         std::int64_t head_qk, std::int64_t n) {
  const std::int64_t dim_k = in.problem.dim_k, padded_k = x.padded_k;
  for (int part = 0; part < 2; ++part) {
    const ConstTokenView& view = part == 0 ? in.k : in.q;
    const std::byte* first = view.row(batch, token, head_qk);
    if constexpr (kPacked<Dot>) {
      Dot::load_transposed(first, view.stride_token, n, kTokens, dim_k, padded_k, x.panel + part * kTokens, 2 * kTokens);
    } else {
      load_transposed(first, view.dtype, view.stride_token, n, kTokens, dim_k, padded_k, x.panel + part * kTokens, 2 * kTokens);
    }
  }
  if constexpr (kPacked<Dot>) prepare_fixed_keys(x);
  prepare_factors(x, in.problem);
  for (std::int64_t column = 0; column < kTokens; column += kWidth) {
    const Operands<Dot> product{reinterpret_cast<const typename Dot::A*>(x.panel), Dot::kPair, 2 * kTokens * Dot::kPair,
                                x.panel + column, 2 * kTokens};
    const Vec column_factors = load(x.factors + column);
    for (int part = 0; part < 2; ++part) {
      multiply_rows<Dot, 1>(product, part * kTokens + column, (part + 1) * kTokens, padded_k / Dot::kPair,
                            [&]<int kRows>(std::int64_t row, const Vec(&c)[kRows][1]) FLASHQLA_INLINE_LAMBDA {
                              FLASHQLA_UNROLL
                              for (int i = 0; i < kRows; ++i) {
                                store(x.gram + (row + i) * kTokens + column,
                                      mul(mul(column_factors, set1(x.factors[row + i])), c[i][0]));
                              }
                            });
    }
  }
}

/// With ChunkGates::far: `negative`, `attention` and their far parts. There is no inverse.
template <class Dot, int kTokens>
FLASHQLA_NOINLINE void prepare_far_matrices(const ForwardScratch<Dot, kTokens>& x, float scale) {
  const ChunkGates<kTokens>& gates = *x.gates;
  for (int i = 0; i < kTokens; ++i) {
    const Decay later{set1(gates.high[i]), set1(gates.low[i])};
    for (int j = 0; j <= i; j += kWidth) {
      const FarDecay decay = far_parts(difference(later, {load(gates.high + j), load(gates.low + j)}));
      const Vec beta = load(gates.beta + j);
      const Vec k_k = mul(sub(zero(), beta), load(x.gram + i * kTokens + j));
      const Vec q_k = mul(mul(set1(scale), beta), load(x.gram + (kTokens + i) * kTokens + j));
      store_parts(decay, k_k, x.negative + i * kTokens + j, x.negative_far + i * kTokens + j);
      store_parts(decay, q_k, x.attention + i * kTokens + j, x.attention_far + i * kTokens + j);
    }
  }
}

/// The matrices and factors of one value head. Reads x.gram, x.factors and x.gates.
template <class Dot, int kTokens>
inline void prepare_head(const ForwardScratch<Dot, kTokens>& x, float scale) {
  const ChunkGates<kTokens>& gates = *x.gates;
  for (int i = 0; i < kTokens; i += kWidth) {
    const Vec decay = load(gates.decay + i), factor = load(x.factors + i);
    store(x.read_k + i, mul(decay, factor));
    store(x.read_q + i, mul(mul(set1(scale), decay), load(x.factors + kTokens + i)));
    store(x.write_k + i, mul(mul(load(gates.rest + i), load(gates.beta + i)), factor));
  }
  if (gates.far) return prepare_far_matrices(x, scale);
  for (int i = 0; i < kTokens; ++i) {
    for (int j = 0; j <= i; j += kWidth) {  // lanes above the diagonal may hold anything: they are never read
      const Vec factor = mul(load(gates.beta + j), decay_between(gates, i, j));
      store(x.negative + i * kTokens + j, mul(sub(zero(), factor), load(x.gram + i * kTokens + j)));
      store(x.attention + i * kTokens + j, mul(mul(set1(scale), factor), load(x.gram + (kTokens + i) * kTokens + j)));
    }
  }
  invert_unit_lower<kTokens>(x.negative, x.solve);
}

/// c[i] = factors[i] * c[i].
template <int kRows, int kColumns>
FLASHQLA_INLINE void scale_rows(const float* factors, Vec (&c)[kRows][kColumns]) {
  FLASHQLA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) c[i][j] = mul(set1(factors[i]), c[i][j]);
  }
}

/// K S and Q S of one slab: W goes to x.w, scale D o (Q S) to `values`.
template <class Dot, int kTokens, int kColumns>
FLASHQLA_INLINE void project_slab(const ForwardScratch<Dot, kTokens>& x, const float* state, const typename Dot::B* operand,
                                  float* values, PrefetchList& soon) {
  constexpr std::int64_t kSlab = kColumns * kWidth;
  const std::int64_t row_stride = x.range.padded(), steps = x.projection_steps();
  const float *read_k = x.read_k, *read_q = x.read_q;
  float* const w = x.w;
  const Operands<Dot> projection{reinterpret_cast<const typename Dot::A*>(x.panel), Dot::kPair, 2 * kTokens * Dot::kPair, operand,
                                 kSlab};
  const auto meanwhile = [&]() FLASHQLA_INLINE_LAMBDA { soon.step<2>(); };
  const auto finish_w = [&]<int kRows>(std::int64_t row, Vec(&c)[kRows][kColumns]) FLASHQLA_INLINE_LAMBDA {
    const float *v = values + row * row_stride, *factors = read_k + row;
    if (x.gates->far) scale_again(x.gates->decay_again + row, c);
    FLASHQLA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) c[i][j] = fnmadd(set1(factors[i]), c[i][j], load(v + i * row_stride + j * kWidth));
    }
    store_block(w + row * kSlab, kSlab, c);
  };
  if (kPacked<Dot> && x.packed->precise) {
    const Operands<F32Dot> keys{x.keys, 1, x.kKeysStride, state, kSlab};
    multiply_rows<F32Dot, kColumns>(keys, 0, kTokens, steps * Dot::kPair, finish_w, meanwhile);
  } else {
    multiply_rows<Dot, kColumns>(projection, 0, kTokens, steps, finish_w, meanwhile);
  }
  multiply_rows<Dot, kColumns>(
      projection, kTokens, 2 * kTokens, steps,
      [&]<int kRows>(std::int64_t row, Vec(&c)[kRows][kColumns]) FLASHQLA_INLINE_LAMBDA {
        scale_rows(read_q + (row - kTokens), c);
        store_block(values + (row - kTokens) * row_stride, row_stride, c);
      },
      meanwhile);
}

/// e and R o beta o e of one slab, and o in `values`.
template <class Dot, int kTokens, int kColumns>
FLASHQLA_INLINE void solve_slab(const ForwardScratch<Dot, kTokens>& x, std::int64_t n, float* values) {
  constexpr std::int64_t kSlab = kColumns * kWidth;
  constexpr int kRows = kRegisters == 32 ? 8 : 4;
  const std::int64_t row_stride = x.range.padded();
  float *const e = x.e, *const weighted = x.weighted;
  const float* const write_k = x.write_k;
  const Operands<F32Dot> solve{x.solve, kTokens, 1, x.w, kSlab}, attention{x.attention, kTokens, 1, e, kSlab};
  for (std::int64_t row = 0; row < n; row += kRows) {
    Vec c[kRows][kColumns];
    clear_block(c);
    multiply_triangle<F32Dot, kRows, kColumns>(solve, row, c);
    store_block(e + row * kSlab, kSlab, c);
    scale_rows(write_k + row, c);
    store_block(weighted + row * kSlab, kSlab, c);
    load_block(values + row * row_stride, row_stride, c);
    multiply_triangle<F32Dot, kRows, kColumns>(attention, row, c);
    store_block(values + row * row_stride, row_stride, c);
  }
}

/// With ChunkGates::far, token by token.
template <class Dot, int kTokens, int kColumns>
FLASHQLA_NOINLINE void solve_far_slab(const ForwardScratch<Dot, kTokens>& x, std::int64_t n, float* values) {
  constexpr std::int64_t kSlab = kColumns * kWidth;
  const FarMatrix negative{x.negative, x.negative_far, kTokens, 1}, attention{x.attention, x.attention_far, kTokens, 1};
  for (std::int64_t row = 0; row < n; ++row) {
    float* const o = values + row * x.range.padded();
    Vec c[1][kColumns];
    load_block(x.w + row * kSlab, kSlab, c);
    multiply_far(negative, row, 0, row, x.e, kSlab, c);
    store_block(x.e + row * kSlab, kSlab, c);
    scale_rows(x.write_k + row, c);
    scale_again(x.gates->rest_again + row, c);
    store_block(x.weighted + row * kSlab, kSlab, c);
    load_block(o, kSlab, c);
    scale_again(x.gates->decay_again + row, c);
    multiply_far(attention, row, 0, row + 1, x.e, kSlab, c);
    store_block(o, kSlab, c);
  }
}

/// S = D_end S + K^T (R o beta o e) over the first n tokens.
template <class Dot, int kTokens, int kColumns>
FLASHQLA_INLINE void update_slab(const ForwardScratch<Dot, kTokens>& x, std::int64_t n, float* state, typename Dot::B* operand,
                                 PrefetchList& soon) {
  constexpr std::int64_t kSlab = kColumns * kWidth;
  const Operands<F32Dot> update{x.keys, x.kKeysStride, 1, x.weighted, kSlab};
  const Vec total = set1(x.gates->total);
  for_row_blocks<kColumns>(0, x.padded_k, [&]<int kRows>(std::int64_t row) FLASHQLA_INLINE_LAMBDA {
    Vec c[kRows][kColumns];
    float* const p = state + row * kSlab;
    soon.step<2>();
    clear_block(c);
    if (n == kTokens) {
      multiply_block<F32Dot, kRows, kColumns>(update, row, kTokens, c);
    } else {
      multiply_block<F32Dot, kRows, kColumns>(update, row, n, c);
    }
    FLASHQLA_UNROLL
    for (int i = 0; i < kRows; ++i) {  // the state last: its loads have the whole product to arrive
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) c[i][j] = fmadd(total, load(p + i * kSlab + j * kWidth), c[i][j]);
    }
    store_block(p, kSlab, c);
    if constexpr (kPacked<Dot> && kRows % 2 == 0) Dot::store_b(operand, kSlab, row, c);
  });
}

template <class Dot, int kTokens, int kColumns>
inline void advance_slab(const ForwardScratch<Dot, kTokens>& x, std::int64_t n, std::int64_t s, float* state,
                         typename Dot::B* operand, const SavedErrors& errors, PrefetchList& soon) {
  float* const values = x.values + s * kSlabColumns;
  project_slab<Dot, kTokens, kColumns>(x, state, operand, values, soon);
  const bool far = x.gates->far;
  far ? solve_far_slab<Dot, kTokens, kColumns>(x, n, values) : solve_slab<Dot, kTokens, kColumns>(x, n, values);
  errors.store_slab<kColumns>(x.range.begin + s * kSlabColumns, n, x.e);
  if (!x.ends.wanted_after) return;
  if (far) scale_numbers(x.gates->total_again, x.padded_k * kColumns * kWidth, state);
  update_slab<Dot, kTokens, kColumns>(x, n, state, operand, soon);
}

/// One value head over one chunk: v, gates -> o, state.
template <class Dot, int kTokens>
inline void advance_head(const ForwardScratch<Dot, kTokens>& x, const ChunkForwardArguments& arguments, std::int64_t batch,
                         std::int64_t token, std::int64_t position, std::int64_t head, std::int64_t place, std::int64_t n,
                         const SavedErrors& errors, PrefetchList& soon) {
  const InputArguments& in = arguments.inputs;
  const SlabRange& range = x.range;
  const std::int64_t width = range.end - range.begin;
  prepare_gates(in, batch, token, position, head, n, *x.gates);
  prepare_head(x, static_cast<float>(in.scale));
  if constexpr (kPacked<Dot>) {
    choose_precision(x);
    if (!x.packed->precise) return advance_packed(x, in.v, arguments.o, batch, token, head, place, n, soon);
  }
  load_rows(in.v.row(batch, token, head) + range.begin * element_bytes(in.v.dtype), in.v.dtype, in.v.stride_token, n, kTokens,
            width, range.padded(), x.values);
  for (std::int64_t s = 0; s < range.slabs(); ++s) {
    const std::int64_t first = s * x.padded_k * kSlabColumns;
    float* state = x.state(place) + first;
    typename Dot::B* operand = x.operand(place) + first / Dot::kPair;
    if (range.columns(s) == kSlabColumns) {
      advance_slab<Dot, kTokens, kSlabVectors>(x, n, s, state, operand, errors, soon);
    } else {
      advance_slab<Dot, kTokens, 1>(x, n, s, state, operand, errors, soon);
    }
  }
  const MutableTokenView& o = arguments.o;
  with_type(o.dtype, [&]<DType kType>() FLASHQLA_INLINE_LAMBDA {
    for (std::int64_t t = 0; t < n; ++t)
      store_row_as<kType>(x.values + t * range.padded(), width,
                          o.row(batch, token + t, head) + range.begin * element_bytes(kType));
  });
}
