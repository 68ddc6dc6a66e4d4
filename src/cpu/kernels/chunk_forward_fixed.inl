// With Bf16Dot, the update of the state S = D_end S + K^T (R o beta o e) in 16-bit fixed point. Included after chunk_forward.inl
// and gemm_bf16.inl, inside namespace avx512bf16.
//
// Rounding R o beta o e to bf16 is not accurate enough: nothing downstream of it in the chunk corrects the error, and where keys
// repeat the parts of 32 tokens cancel, so that the state would be up to 2e-2 off with beta 1. Fixed point has the same speed and
// 15 bits instead of 8, because what counts is the error relative to the sum over the tokens:
//   keys   int16 [padded K][tokens], each token scaled by a power of two so that its largest element is in [2^12, 2^13): exact
//          for all elements down to 1/32 of the largest (bf16 has 8 bits), 13 bits for the rest
//   R o beta o e  times what the keys were divided by, scaled per column so that no number exceeds 2^15 and no column's absolute
//   sum 2^18
// so that no sum of products exceeds 2^31 and the integers are exact. A column with NaN or infinity gets such a scale and stays
// alone with it.
//
// Where an error is never forgotten (a token with beta |k|^2 near 2 reflects the state instead of contracting it) even that would
// add up over thousands of tokens with the same key. There the update is in f32: `choose_precision`, from the chunk's own tokens;
// and so it is where R or D_end are far (far_decay.inl).
#pragma once

#include "cpu/kernels/chunk_forward.inl"
#include "cpu/kernels/fixed_point.inl"
#include "cpu/kernels/reflection.inl"

/// Keys in fixed point, and the factor (a power of two) that takes them back.
template <class Dot, int kTokens>
inline void prepare_fixed_keys(const ForwardScratch<Dot, kTokens>& x) {
  static_assert(kTokens == 2 * kWidth);
  constexpr int kBlocks = kTokens / kWidth;
  PackedChunk<kTokens>& packed = *x.packed;
  packed.keys_in_f32 = false;
  Vec scale[kBlocks];
  for (int l = 0; l < kBlocks; ++l) {
    Vec unscale;
    fixed_row_scale(x.panel + l * kWidth, 2 * kTokens, x.padded_k / 2, scale[l], unscale);
    store(packed.unscale + l * kWidth, unscale);
  }
  for (std::int64_t p = 0; p < x.padded_k / 2; ++p) {
    const PairVec low = load_pair(x.panel + p * 2 * kTokens), high = load_pair(x.panel + p * 2 * kTokens + kWidth);
    std::int16_t* const to = x.fixed_keys + 2 * p * kTokens;
    store_int16(to, mul(scale[0], first_of_pair(low)), mul(scale[1], first_of_pair(high)));
    store_int16(to + kTokens, mul(scale[0], second_of_pair(low)), mul(scale[1], second_of_pair(high)));
  }
}

/// Whether the current value head needs f32; what its update takes. After prepare_head.
template <class Dot, int kTokens>
inline void choose_precision(const ForwardScratch<Dot, kTokens>& x) {
  PackedChunk<kTokens>& packed = *x.packed;
  Reflection reflection;
  for (int i = 0; i < kTokens; ++i) reflection.add(x.gates->beta[i] * x.gram[i * kTokens + i]);
  packed.precise = x.gates->far || reflection.found();
  if (!packed.precise) {
    for (int i = 0; i < kTokens; i += kWidth) store(x.write_k + i, mul(load(x.write_k + i), load(packed.unscale + i)));
  } else if (!packed.keys_in_f32) {
    packed.keys_in_f32 = true;
    for (std::int64_t p = 0; p < x.padded_k / 2; ++p) {
      for (int i = 0; i < kTokens; i += kWidth) {
        const PairVec pair = load_pair(x.panel + p * 2 * kTokens + i);
        store(x.keys + 2 * p * kTokens + i, first_of_pair(pair));
        store(x.keys + (2 * p + 1) * kTokens + i, second_of_pair(pair));
      }
    }
  }
}

/// Rows [row, row + kRows) of R o beta o e to fixed point.
template <class Dot, int kTokens, int kColumns, int kRows>
FLASHQLA_INLINE void fix_rows(const ForwardScratch<Dot, kTokens>& x, std::int64_t row, const FixedUnit<kColumns>& unit) {
  constexpr std::int64_t kSlab = kColumns * kWidth;
  FLASHQLA_UNROLL
  for (int i = 0; i < kRows; i += 2) {
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      const float* const from = x.weighted + (row + i) * kSlab + j * kWidth;
      store_pair(x.fixed_rows + (row + i) / 2 * kSlab + j * kWidth,
                 pack_int16(mul(unit.scale[j], load(from)), mul(unit.scale[j], load(from + kSlab))));
    }
  }
}

/// As update_slab, from the rows in fixed point.
template <class Dot, int kTokens, int kColumns, class Prefetch>
FLASHQLA_NOINLINE void update_fixed(const ForwardScratch<Dot, kTokens>& x, std::int64_t n, const FixedUnit<kColumns>& unit,
                                    float* state, typename Dot::B* operand, Prefetch& soon) {
  constexpr std::int64_t kSlab = kColumns * kWidth;
  const Operands<Int16Dot> update{x.fixed_keys, kTokens, 2, x.fixed_rows, kSlab};
  const Vec total = set1(x.gates->total);
  const std::int64_t steps = (n + 1) / 2;
  for_row_blocks<kColumns>(0, x.padded_k, [&]<int kRows>(std::int64_t row) FLASHQLA_INLINE_LAMBDA {
    Vec c[kRows][kColumns];
    float* const p = state + row * kSlab;
    soon.template step<2>();
    clear_block(c);
    multiply_block<Int16Dot, kRows, kColumns>(update, row, steps, c);
    FLASHQLA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j)
        c[i][j] = fmadd(unit.worth[j], from_int32(c[i][j]), mul(total, load(p + i * kSlab + j * kWidth)));
    }
    store_block(p, kSlab, c);
    if constexpr (kRows % 2 == 0) Dot::store_b(operand, kSlab, row, c);
  });
}
