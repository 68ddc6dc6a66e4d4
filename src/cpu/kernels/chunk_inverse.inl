// The `a` output of chunk_forward: (I + stril(beta_i k_i.k_j))^-1 of every 64-token chunk, ungated, in f32. The chunk kernels
// have no use for it (theirs is gated and shorter), so this is a pass of its own. Included inside an instruction set's namespace.
#pragma once

#include "cpu/kernels/gates.inl"
#include "cpu/kernels/gemm.inl"
#include "cpu/kernels/rows.inl"

struct InverseScratch {
  static constexpr std::int64_t kTokens = kTokensPerChunk;
  float *rows, *rows_t, *gram, *negative, *inverse, *beta;
  std::size_t bytes;

  InverseScratch(std::byte* base, std::int64_t padded_k) {
    float* const first = reinterpret_cast<float*>(base);
    std::int64_t used = 0;
    const auto take = [&](std::int64_t count) {
      float* const piece = first == nullptr ? nullptr : first + used;
      used += count;
      return piece;
    };
    rows = take(kTokens * padded_k);    // [kTokens][padded_k]
    rows_t = take(kTokens * padded_k);  // [padded_k][kTokens]
    gram = take(kTokens * kTokens);
    negative = take(kTokens * kTokens);
    inverse = take(kTokens * kTokens);
    beta = take(kTokens);
    bytes = static_cast<std::size_t>(used) * sizeof(float);
  }
};

/// All chunks of one sequence, all value heads of one q/k head.
inline void store_inverses(const ChunkForwardArguments& arguments, std::int64_t sequence, std::int64_t head_qk,
                           std::byte* memory) {
  constexpr std::int64_t kTokens = InverseScratch::kTokens;
  const InputArguments& in = arguments.inputs;
  if (arguments.states.padding(sequence)) return;
  const std::int64_t batch = in.sequences.batch(sequence), begin = in.sequences.begin(sequence),
                     length = in.sequences.length(sequence), padded_k = round_up(in.problem.dim_k, kWidth);
  const InverseScratch x(memory, padded_k);
  for (std::int64_t t = 0; t < length; t += kTokens) {
    const std::int64_t n = length - t < kTokens ? length - t : kTokens;
    load_qk_rows(in, in.k, batch, begin + t, head_qk, n, kTokens, padded_k, x.rows);
    transpose_matrix(x.rows, kTokens, padded_k, padded_k, x.rows_t, kTokens);
    for (std::int64_t column = 0; column < kTokens; column += kWidth) {
      const Operands<F32Dot> product{x.rows, padded_k, 1, x.rows_t + column, kTokens};
      multiply_rows<F32Dot, 1>(product, column, kTokens, padded_k,
                               [&]<int kRows>(std::int64_t row, const Vec(&c)[kRows][1]) FLASHQLA_INLINE_LAMBDA {
                                 for (int i = 0; i < kRows; ++i) store(x.gram + (row + i) * kTokens + column, c[i][0]);
                               });
    }
    for (std::int64_t h = head_qk * in.group; h < (head_qk + 1) * in.group; ++h) {
      load_betas(in, batch, begin + t, h, n, x.beta);
      for (std::int64_t i = 0; i < kTokens; ++i) {
        const Vec minus_beta = set1(i < n ? -x.beta[i] : 0.0f);
        for (std::int64_t j = 0; j <= i; j += kWidth)
          store(x.negative + i * kTokens + j, mul(minus_beta, load(x.gram + i * kTokens + j)));
      }
      invert_unit_lower<kTokens>(x.negative, x.inverse);
      for (std::int64_t i = 0; i < n; ++i) {
        float* row = x.inverse + i * kTokens;
        for (std::int64_t j = 0; j < kTokens; j += kWidth)
          store(row + j, first_lanes(load(row + j), static_cast<int>(i + 1 - j)));
        store_row(row, kTokens, arguments.a.dtype, arguments.a.row(batch, begin + t + i, h));
      }
    }
  }
}
