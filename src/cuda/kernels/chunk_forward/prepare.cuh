// The part of chunk_forward that knows no state, for all chunks at once: one block of 128 threads a chunk and q/k head. With
// Gam_ij = the decay between tokens j and i (i >= j), and everything normalised on the way if asked for:
//   L = stril(beta_i Gam_ij k_i.k_j),  solve = (I + L)^-1 o beta_j,  scores = tril(scale Gam_ij q_i.k_j)
// and the factors of rows, to a ChunkUnit. K K^T and Q K^T are made once and stay in the accumulators for all value heads of the
// group: warp w has their rows 16 w to 16 w + 15.
#pragma once

#include "cuda/block/gates.cuh"
#include "cuda/block/inverse.cuh"
#include "cuda/kernels/chunk_forward/params.hpp"
#include "cuda/tile/fragments.cuh"
#include "cuda/tile/rows.cuh"

namespace flashqla::cuda {

inline constexpr int kPrepareThreads = 128, kPrepareWarps = 4;

/// Of the inverse's operands: the bounds of f16 tensors are a quarter of those of bf16.
template <class Element>
inline constexpr int kInverseParts = 1;
template <>
inline constexpr int kInverseParts<ptx::F16> = 2;

/// A token with beta |k|^2 near 2 reflects the state instead of contracting it, and an error in it is never forgotten. A chunk
/// whose mean of beta |k|^2, weighted with itself, is above this is precise.
inline constexpr float kMostStrength = 1.4f;

/// Sums of log2 decays and betas of a value head's tokens.
struct HeadGates {
  float high[kChunkTokens], low[kChunkTokens], beta[kChunkTokens];
};

/// Shared memory of prepare_chunks. The keys and queries are gone when the first head's memory is written.
template <class Element, int kDimK>
struct PrepareShared {
  static constexpr int kParts = kInverseParts<Element>;
  using Rows = tile::SharedTile<kChunkTokens, kDimK>;
  struct Heads {
    block::InverseScratch scratch[kPrepareWarps];
    block::InverseExchange<kParts> exchange[2];  // of one value head and the next
    HeadGates gates[kPrepareWarps];              // of as many value heads as there are warps
  };
  union {
    alignas(128) std::byte rows[2][Rows::kBytes];  // keys, queries
    alignas(128) Heads heads;
  };
  float factors[2][kChunkTokens];  // what L2 normalisation multiplies keys and queries by
  float squares[kChunkTokens];     // |k|^2 as the operation takes the keys
};

/// The chunk of a block.
struct PreparedChunk {
  std::int64_t batch, token;  // of its first token
  std::int64_t index;         // among all chunks
  int tokens;
  std::int32_t head_qk;
};

/// |q|^2 of row `row`.
template <class Element, int kDimK>
FLASHQLA_DEVICE float query_square(const PrepareShared<Element, kDimK>& shared, int row) {
  using Rows = typename PrepareShared<Element, kDimK>::Rows;
  float sums[2] = {0.0f, 0.0f};
#pragma unroll 4
  for (int piece = 0; piece < Rows::kRowPieces; ++piece) {
    const uint4 pairs = *reinterpret_cast<const uint4*>(shared.rows[1] + Rows::offset(row, piece));
    const std::uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (const std::uint32_t word : words) {
      const float2 x = ptx::unpack_pair<Element>(word);
      sums[0] = fmaf(x.x, x.x, sums[0]);
      sums[1] = fmaf(x.y, x.y, sums[1]);
    }
  }
  return sums[0] + sums[1];
}

/// Factors of rows and |k|^2. The latter are the diagonal of K K^T: of each row one lane of its warp has it.
template <class Element, int kDimK>
FLASHQLA_DEVICE void row_factors(PrepareShared<Element, kDimK>& shared, float eps, const tile::Accumulator (&kk)[8]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, row = tile::lane_id() / 4, column = tile::lane_id() % 4 * 2;
#pragma unroll
  for (int block_j = 0; block_j < 4; ++block_j) {
    if (block_j != warp) continue;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      if (row / 2 * 2 != column) continue;
      const float square = row % 2 == 0 ? kk[2 * block_j + upper].c[2 * upper] : kk[2 * block_j + upper].c[2 * upper + 1];
      const float factor = eps >= 0.0f ? rsqrtf(square + eps) : 1.0f;
      shared.factors[0][16 * warp + row + 8 * upper] = factor;
      shared.squares[16 * warp + row + 8 * upper] = square * factor * factor;
    }
  }
  if (threadIdx.x < kChunkTokens) {
    const int query = static_cast<int>(threadIdx.x);
    shared.factors[1][query] = eps >= 0.0f ? rsqrtf(query_square<Element>(shared, query) + eps) : 1.0f;
  }
}

/// A token's log2 decay and beta.
FLASHQLA_DEVICE float2 token_gates(const ChunkForwardParams& p, const PreparedChunk& chunk, std::int32_t head, int token) {
  if (token >= chunk.tokens) return {0.0f, 0.0f};  // past the end nothing decays and nothing is written
  const float rate = p.gate == Gate::computed ? -expf(load_scalar(p.a_log.data, p.a_log.dtype, head * p.a_log.stride)) : 0.0f;
  const float bias = p.dt_bias.data != nullptr ? load_scalar(p.dt_bias.data, p.dt_bias.dtype, head * p.dt_bias.stride) : 0.0f;
  const std::int64_t row = chunk.token + token;
  const float g = p.gate == Gate::none ? 0.0f : load_scalar(p.g.data, p.g.dtype, offset_of(p.g, chunk.batch, row, head));
  const float b =
      p.beta_kind == Beta::one ? 1.0f : load_scalar(p.beta.data, p.beta.dtype, offset_of(p.beta, chunk.batch, row, head));
  return {block::log_decay(p.gate, g, rate, bias), block::strength(p.beta_kind, b)};
}

/// Gates of one value head by one warp, two tokens a lane, and the factors of its unit.
template <class Element, int kDimK>
FLASHQLA_DEVICE void prepare_gates(const ChunkForwardParams& p, const PreparedChunk& chunk, std::int32_t head,
                                   const PrepareShared<Element, kDimK>& shared, HeadGates& gates, std::byte* unit) {
  const int lane = tile::lane_id();
  const float2 first = token_gates(p, chunk, head, lane), second = token_gates(p, chunk, head, lane + 32);
  double sums[2] = {block::warp_sums(static_cast<double>(first.x) * block::kLog2E),
                    block::warp_sums(static_cast<double>(second.x) * block::kLog2E)};
  sums[1] += __shfl_sync(0xffffffffu, sums[0], 31);
  const block::TwoFloats all = block::split(__shfl_sync(0xffffffffu, sums[1], 31));
  float strength = 0.0f, squares = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = lane + 32 * half;
    const block::TwoFloats sum = block::split(sums[half]);
    const float beta = half == 0 ? first.y : second.y, own = beta * shared.squares[token];
    gates.high[token] = sum.high;
    gates.low[token] = sum.low;
    gates.beta[token] = beta;
    const float decay = exp2f(sum.high) * exp2f(sum.low), factor_k = shared.factors[0][token];
    reinterpret_cast<float*>(unit + ChunkUnit::kReadK)[token] = decay * factor_k;
    reinterpret_cast<float*>(unit + ChunkUnit::kReadQ)[token] = p.scale * decay * shared.factors[1][token];
    reinterpret_cast<float*>(unit + ChunkUnit::kWriteK)[token] = block::exp2_difference(all, sum) * factor_k;
    strength += own;
    squares += own * own;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    strength += __shfl_xor_sync(0xffffffffu, strength, step);
    squares += __shfl_xor_sync(0xffffffffu, squares, step);
  }
  if (lane == 0) {
    *reinterpret_cast<float*>(unit + ChunkUnit::kTotal) = exp2f(all.high) * exp2f(all.low);
    *reinterpret_cast<float*>(unit + ChunkUnit::kPrecise) = squares <= kMostStrength * strength ? 0.0f : 1.0f;  // NaN: precise
  }
}

/// From this warp's rows of K K^T and Q K^T: -L to the exchange and L_ii to the scratch, `scores` to the unit.
template <class Element, int kDimK>
FLASHQLA_DEVICE void gate_products(const PrepareShared<Element, kDimK>& shared, const HeadGates& gates, float scale,
                                   const tile::Accumulator (&kk)[8], const tile::Accumulator (&qk)[8],
                                   block::InverseExchange<kInverseParts<Element>>& exchange, block::InverseScratch& scratch,
                                   std::byte* unit) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = tile::lane_id();
#pragma unroll
  for (int block_j = 0; block_j < 4; ++block_j) {
    if (block_j > warp) break;
    tile::Accumulator scores[2], lower[2];
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {  // rows g and g + 8
      const int i = 16 * warp + lane / 4 + 8 * upper;
      const block::TwoFloats sum_i{gates.high[i], gates.low[i]};
      const float factor_l = -gates.beta[i] * shared.factors[0][i], factor_s = scale * shared.factors[1][i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int j = 16 * block_j + 8 * half + lane % 4 * 2 + c, at = 2 * upper + c;
          const float decay = block::exp2_difference(sum_i, {gates.high[j], gates.low[j]}) * shared.factors[0][j];
          lower[half].c[at] = j < i ? factor_l * decay * kk[2 * block_j + half].c[at] : 0.0f;
          scores[half].c[at] = j <= i ? factor_s * decay * qk[2 * block_j + half].c[at] : 0.0f;
        }
      }
    }
    const int number = warp * (warp + 1) / 2 + block_j;
    const tile::FragmentB packed = tile::to_b_transposed<ptx::F16>(scores[0], scores[1]);
    *reinterpret_cast<uint4*>(unit + ChunkUnit::kScores + number * 512 + lane * 16) = {packed.b[0], packed.b[1], packed.b[2],
                                                                                       packed.b[3]};
    if (block_j < warp) {
      block::store_parts(exchange.minus_lower[warp * (warp - 1) / 2 + block_j],
                         block::to_parts_a<kInverseParts<Element>>(lower[0], lower[1]));
      continue;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        float* const to = scratch.lower + (lane / 4 + 8 * upper) * block::kInverseStride + 8 * half + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = {-lower[half].c[2 * upper], -lower[half].c[2 * upper + 1]};
      }
    }
  }
}

FLASHQLA_DEVICE void store_block(std::byte* unit, int triangle, int block_i, int block_j, const tile::FragmentB& b) {
  const int number = block_i * (block_i + 1) / 2 + block_j;
  *reinterpret_cast<uint4*>(unit + triangle + number * 512 + tile::lane_id() * 16) = {b.b[0], b.b[1], b.b[2], b.b[3]};
}

/// `solve`, this warp's column of blocks, to the unit.
template <int kParts>
FLASHQLA_DEVICE void store_solve(const HeadGates& gates, const block::InverseExchange<kParts>& exchange,
                                 const block::PartsB<kParts>& diagonal, const tile::FragmentB& scaled, std::byte* unit) {
  const int column = static_cast<int>(threadIdx.x) / 32, place = 16 * column + tile::lane_id() % 4 * 2;
  store_block(unit, ChunkUnit::kSolve, column, column, scaled);
  const float beta[2][2] = {{gates.beta[place], gates.beta[place + 1]}, {gates.beta[place + 8], gates.beta[place + 9]}};
  block::solve_block_column(exchange, diagonal, [&](int i, const tile::Accumulator(&t)[2]) {
    tile::Accumulator c[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int at = 0; at < 4; ++at) c[half].c[at] = t[half].c[at] * beta[half][at % 2];
    }
    store_block(unit, ChunkUnit::kSolve, i, column, tile::to_b_transposed<ptx::F16>(c[0], c[1]));
  });
}

}  // namespace flashqla::cuda
