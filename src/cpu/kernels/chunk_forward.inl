// chunk_forward of one q/k head and some of its value heads over one chunk of at most kTokens tokens
// (docs/design/cpu_forward.md). With S the state before the chunk, D = e^(cumulative decay), R = e^(decay from a token to the
// chunk's end), E_ij = e^(decay between tokens j and i):
//   W = V - D o (K S);  U = (I + stril(E o (beta o K K^T)))^-1 (beta o W);  O = scale D o (Q S) + tril(scale E o Q K^T) U;  S =
//   D_end S + K^T (R o U)
// Once a q/k head: rows, K^T, K K^T, Q K^T. Once a value head: the inverse and the two masked matrices. Once a slab of columns,
// entirely in the first-level cache: the rest. Included inside an instruction set's namespace.
#pragma once

#include "cpu/kernels/gates.inl"
#include "cpu/kernels/gemm.inl"
#include "cpu/kernels/states.inl"

/// Scratch of one work item. `take` hands out 64-byte aligned pieces; with a null base it only counts.
template <class Dot, int kTokens>
struct ForwardScratch {
  using A = typename Dot::A;
  using B = typename Dot::B;

  std::int64_t padded_k;
  SlabRange range;
  ChunkGates<kTokens>* gates;
  A* rows;                                  // [2 kTokens][padded_k]: keys, then queries
  A* update;                                // keys as left operand of K^T (R o U): the same array, or [kTokens / 2][padded_k][2]
  B* keys_t;                                // [padded_k / kPair][kTokens]
  float* staging;                           // [kTokens][padded_k], packed only
  float* gram;                              // [2 kTokens][kTokens]: K K^T, then Q K^T
  float* negative;                          // [kTokens][kTokens]: -stril(E o (beta o K K^T))
  float* inverse;                           // [kTokens][kTokens]
  A* solve;                                 // [kTokens][kTokens]: strict lower part of the inverse, columns times beta
  A* attention;                             // [kTokens][kTokens]: tril(scale E o Q K^T)
  float* values;                            // [kTokens][padded V]: rows of v, replaced by rows of o
  float* w;                                 // [kTokens][slab]
  B *w_operand, *u_operand, *rest_operand;  // W, U, R o U: [kTokens / kPair][slab]
  float* states;                            // [heads][padded_k * padded V], in slabs
  B* operands;                              // the same states as right operand: the same array, or pair rows
  std::size_t bytes = 0;

  ForwardScratch(std::byte* base, std::int64_t padded_k_, const SlabRange& range_, std::int64_t heads)
      : padded_k(padded_k_), range(range_) {
    take(base, 1, gates);
    take(base, 2 * kTokens * padded_k, rows);
    take(base, padded_k / Dot::kPair * kTokens, keys_t);
    take(base, 2 * kTokens * kTokens, gram);
    take(base, kTokens * kTokens, negative);
    take(base, kTokens * kTokens, inverse);
    take(base, kTokens * kTokens, solve);
    take(base, kTokens * kTokens, attention);
    take(base, kTokens * kSlabColumns, w);
    take(base, kTokens / Dot::kPair * kSlabColumns, u_operand);
    take(base, kTokens / Dot::kPair * kSlabColumns, rest_operand);
    take(base, kTokens * range.padded(), values);
    take(base, heads * state_size(), states);
    if constexpr (kPacked<Dot>) {
      take(base, kTokens * padded_k, update);
      take(base, kTokens * padded_k, staging);
      take(base, kTokens / Dot::kPair * kSlabColumns, w_operand);
      take(base, heads * state_size() / Dot::kPair, operands);
    } else {
      update = rows;
      staging = nullptr;
      w_operand = w;
      operands = states;
    }
  }

  std::int64_t state_size() const { return padded_k * range.padded(); }
  float* state(std::int64_t head) const { return states + head * state_size(); }
  B* operand(std::int64_t head) const { return operands + head * state_size() / Dot::kPair; }

 private:
  template <class T>
  void take(std::byte* base, std::int64_t count, T*& piece) {
    piece = base == nullptr ? nullptr : reinterpret_cast<T*>(base + bytes);
    bytes += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
  }
};

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

/// Keys and queries of the chunk, and the two products of keys. Tokens from n on are zero.
template <class Dot, int kTokens>
inline void prepare_keys(const ForwardScratch<Dot, kTokens>& x, const InputArguments& in, std::int64_t batch, std::int64_t token,
                         std::int64_t head_qk, std::int64_t n) {
  const std::int64_t padded_k = x.padded_k;
  for (int part = 0; part < 2; ++part) {
    const ConstTokenView& view = part == 0 ? in.k : in.q;
    typename Dot::A* rows = x.rows + part * kTokens * padded_k;
    if constexpr (kPacked<Dot>) {
      load_qk_rows(in, view, batch, token, head_qk, n, kTokens, padded_k, x.staging);
      for (std::int64_t i = 0; i < kTokens * padded_k; i += kWidth) Dot::store_a(rows + i, load(x.staging + i));
    } else {
      load_qk_rows(in, view, batch, token, head_qk, n, kTokens, padded_k, rows);
    }
  }
  if constexpr (kPacked<Dot>) {
    for (std::int64_t t = 0; t < kTokens; t += 2) {
      for (std::int64_t i = 0; i < padded_k; i += kWidth)
        Dot::interleave(x.rows + t * padded_k + i, x.rows + (t + 1) * padded_k + i, x.update + t * padded_k + 2 * i);
    }
  }
  // a pair is moved as one 32-bit element
  transpose_matrix(reinterpret_cast<const float*>(x.rows), kTokens, padded_k / Dot::kPair, padded_k / Dot::kPair,
                   reinterpret_cast<float*>(x.keys_t), kTokens);
  for (std::int64_t column = 0; column < kTokens; column += kWidth) {
    const Operands<Dot> product{x.rows, padded_k, Dot::kPair, x.keys_t + column, kTokens};
    for (int part = 0; part < 2; ++part) {
      multiply_rows<Dot, 1>(product, part * kTokens + column, (part + 1) * kTokens, padded_k / Dot::kPair,
                            [&]<int kRows>(std::int64_t row, const Vec(&c)[kRows][1]) FLASHQLA_INLINE_LAMBDA {
                              for (int i = 0; i < kRows; ++i) store(x.gram + (row + i) * kTokens + column, c[i][0]);
                            });
    }
  }
}

/// The matrices of one value head. Reads x.gram and x.gates.
template <class Dot, int kTokens>
inline void prepare_head(const ForwardScratch<Dot, kTokens>& x, float scale) {
  const ChunkGates<kTokens>& gates = *x.gates;
  for (int i = 0; i < kTokens; ++i) {
    const Vec minus_beta = set1(-gates.beta[i]);
    for (int j = 0; j <= i; j += kWidth) {
      const Vec decay = decay_between(gates, i, j);
      store(x.negative + i * kTokens + j, mul(minus_beta, mul(decay, load(x.gram + i * kTokens + j))));
      const Vec seen = mul(mul(set1(scale), decay), load(x.gram + (kTokens + i) * kTokens + j));
      Dot::store_a(x.attention + i * kTokens + j, first_lanes(seen, i + 1 - j));
    }
  }
  invert_unit_lower<kTokens>(x.negative, x.inverse);
  for (int i = 0; i < kTokens; ++i) {
    for (int j = 0; j <= i; j += kWidth) {
      const Vec scaled = mul(load(x.inverse + i * kTokens + j), load(gates.beta + j));
      Dot::store_a(x.solve + i * kTokens + j, first_lanes(scaled, i - j));
    }
  }
}

/// Everything of one slab of columns: its state moves over the chunk, `values` (row stride padded V) turns from v into o.
template <class Dot, int kTokens, int kColumns>
inline void advance_slab(const ForwardScratch<Dot, kTokens>& x, std::int64_t n, float scale, float* state,
                         typename Dot::B* operand, float* values) {
  constexpr std::int64_t kSlab = kColumns * kWidth;
  constexpr int kRowsOfTriangle = kRegisters == 32 ? 8 : 4;
  const ChunkGates<kTokens>& gates = *x.gates;
  const std::int64_t row_stride = x.range.padded(), steps = x.padded_k / Dot::kPair;

  const Operands<Dot> projection{x.rows, x.padded_k, Dot::kPair, operand, kSlab};
  multiply_rows<Dot, kColumns>(projection, 0, kTokens, steps,
                               [&]<int kRows>(std::int64_t row, Vec(&c)[kRows][kColumns]) FLASHQLA_INLINE_LAMBDA {
                                 FLASHQLA_UNROLL
                                 for (int i = 0; i < kRows; ++i) {
                                   const Vec decay = set1(gates.decay[row + i]);
                                   FLASHQLA_UNROLL
                                   for (int j = 0; j < kColumns; ++j) {
                                     c[i][j] = fnmadd(decay, c[i][j], load(values + (row + i) * row_stride + j * kWidth));
                                     store(x.w + (row + i) * kSlab + j * kWidth, c[i][j]);
                                   }
                                 }
                                 if constexpr (kPacked<Dot>) Dot::store_b(x.w_operand, kSlab, row, c);
                               });
  multiply_rows<Dot, kColumns>(projection, kTokens, 2 * kTokens, steps,
                               [&]<int kRows>(std::int64_t row, Vec(&c)[kRows][kColumns]) FLASHQLA_INLINE_LAMBDA {
                                 FLASHQLA_UNROLL
                                 for (int i = 0; i < kRows; ++i) {
                                   const Vec decay = set1(scale * gates.decay[row + i - kTokens]);
                                   FLASHQLA_UNROLL
                                   for (int j = 0; j < kColumns; ++j)
                                     store(values + (row + i - kTokens) * row_stride + j * kWidth, mul(decay, c[i][j]));
                                 }
                               });

  const Operands<Dot> solve{x.solve, kTokens, Dot::kPair, x.w_operand, kSlab};
  const Operands<Dot> attention{x.attention, kTokens, Dot::kPair, x.u_operand, kSlab};
  for (std::int64_t row = 0; row < n; row += kRowsOfTriangle) {
    Vec c[kRowsOfTriangle][kColumns];
    FLASHQLA_UNROLL
    for (int i = 0; i < kRowsOfTriangle; ++i) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) c[i][j] = mul(set1(gates.beta[row + i]), load(x.w + (row + i) * kSlab + j * kWidth));
    }
    multiply_triangle<Dot, kRowsOfTriangle, kColumns, true>(solve, row, c);
    if (row + kRowsOfTriangle > n) {  // beyond the end stands whatever the state holds times zero: NaN if it holds NaN
      FLASHQLA_UNROLL
      for (int i = 0; i < kRowsOfTriangle; ++i) {
        FLASHQLA_UNROLL
        for (int j = 0; j < kColumns; ++j) c[i][j] = row + i < n ? c[i][j] : zero();
      }
    }
    Dot::store_b(x.u_operand, kSlab, row, c);
    FLASHQLA_UNROLL
    for (int i = 0; i < kRowsOfTriangle; ++i) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) c[i][j] = mul(set1(gates.rest[row + i]), c[i][j]);
    }
    Dot::store_b(x.rest_operand, kSlab, row, c);
    FLASHQLA_UNROLL
    for (int i = 0; i < kRowsOfTriangle; ++i) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) c[i][j] = load(values + (row + i) * row_stride + j * kWidth);
    }
    multiply_triangle<Dot, kRowsOfTriangle, kColumns, false>(attention, row, c);
    FLASHQLA_UNROLL
    for (int i = 0; i < kRowsOfTriangle; ++i) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) store(values + (row + i) * row_stride + j * kWidth, c[i][j]);
    }
  }

  const Operands<Dot> update{x.update, Dot::kPair, x.padded_k * Dot::kPair, x.rest_operand, kSlab};
  const std::int64_t update_steps = (n + Dot::kPair - 1) / Dot::kPair;
  const Vec total = set1(gates.total);
  for_row_blocks<kColumns>(0, x.padded_k, [&]<int kRows>(std::int64_t row) FLASHQLA_INLINE_LAMBDA {
    Vec c[kRows][kColumns];
    FLASHQLA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) c[i][j] = mul(total, load(state + (row + i) * kSlab + j * kWidth));
    }
    multiply_block<Dot, kRows, kColumns>(update, row, update_steps, c);
    FLASHQLA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) store(state + (row + i) * kSlab + j * kWidth, c[i][j]);
    }
    if constexpr (kPacked<Dot> && kRows % 2 == 0) Dot::store_b(operand, kSlab, row, c);
  });
}

/// One value head over one chunk: v, gates -> o, state.
template <class Dot, int kTokens>
inline void advance_head(const ForwardScratch<Dot, kTokens>& x, const ChunkForwardArguments& arguments, std::int64_t batch,
                         std::int64_t token, std::int64_t position, std::int64_t head, std::int64_t place, std::int64_t n) {
  const InputArguments& in = arguments.inputs;
  const float scale = static_cast<float>(in.scale);
  const SlabRange& range = x.range;
  const std::int64_t width = range.end - range.begin;
  prepare_gates(in, batch, token, position, head, n, *x.gates);
  prepare_head(x, scale);
  load_rows(in.v.row(batch, token, head) + range.begin * element_bytes(in.v.dtype), in.v.dtype, in.v.stride_token, n, kTokens,
            width, range.padded(), x.values);
  for (std::int64_t s = 0; s < range.slabs(); ++s) {
    const std::int64_t first = s * x.padded_k * kSlabColumns;
    float* state = x.state(place) + first;
    typename Dot::B* operand = x.operand(place) + first / Dot::kPair;
    float* values = x.values + s * kSlabColumns;
    if (range.columns(s) == kSlabColumns) {
      advance_slab<Dot, kTokens, kSlabVectors>(x, n, scale, state, operand, values);
    } else {
      advance_slab<Dot, kTokens, 1>(x, n, scale, state, operand, values);
    }
  }
  const MutableTokenView& o = arguments.o;
  with_type(o.dtype, [&]<DType kType>() FLASHQLA_INLINE_LAMBDA {
    for (std::int64_t t = 0; t < n; ++t)
      store_row_as<kType>(x.values + t * range.padded(), width,
                          o.row(batch, token + t, head) + range.begin * element_bytes(kType));
  });
}
