// The part of chunk_forward that knows no state, for all chunks at once: one block of 128 threads a chunk and q/k head. With
// Gam_ij = the decay between tokens j and i (i >= j), and everything normalised on the way if asked for:
//   L = stril(Gam_ij k_i.k_j beta_j),  solve = (I + L)^-1,  scores = tril(scale Gam_ij q_i.k_j beta_j)
// and the factors of rows, to a ChunkUnit. K K^T and Q K^T are made once and stay in the accumulators for all value heads of the
// group: warp w has their rows 16 w to 16 w + 15.
#pragma once

#include "cuda/block/gates.cuh"
#include "cuda/block/inverse.cuh"
#include "cuda/kernels/chunk_forward/chunk.cuh"
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

/// Where sums of log2 decays range over more than kMostDecay, a chunk is walked token by token if less than kLeastThrough of its
/// tokens' largest error (as factors would have it) gets through it: below that, rounding errors would be 2^-11 of what does.
inline constexpr float kMostDecay = 9.0f, kLeastThrough = 0x1p-11f;
/// Where they range over more than kFarDecay (e^-80), also if less than kLeastOfState of the state does.
inline constexpr float kFarDecay = 115.0f, kLeastOfState = 0x1p-99f;

/// Sums of log2 decays of a value head's tokens, and factors of columns. Where there is growth, sums are lowered by h, a whole
/// number above the rise since the lowest sum so far: then no 2^(sum_i - sum_j) with i >= j exceeds 2, and what is taken away
/// comes back as 2^h in the factors of rows. Without growth h is 0.
struct HeadGates {
  float high[kChunkTokens], low[kChunkTokens];
  float column[kChunkTokens];  // beta over beta_power, times what L2 normalisation multiplies the key by
  float beta_power;            // above the largest beta
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
  float rises[kChunkTokens];       // a power of two above each row of scale Q K^T
};

/// The diagonal of a product of rows with themselves, of the warp's 16 rows: body(row, square) on the lane that has it.
template <class Body>
FLASHQLA_DEVICE void for_each_square(const tile::Accumulator (&diagonal)[2], Body body) {
  const int warp = static_cast<int>(threadIdx.x) / 32, row = tile::lane_id() / 4, column = tile::lane_id() % 4 * 2;
  if (row / 2 * 2 != column) return;
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const float* const c = diagonal[upper].c + 2 * upper;
    body(16 * warp + row + 8 * upper, row % 2 == 0 ? c[0] : c[1]);
  }
}

/// Factors of rows, |k|^2, and a power of two above each row of scale Q K^T (rows of zeros: 1).
template <class Element, int kDimK>
FLASHQLA_DEVICE void row_factors(PrepareShared<Element, kDimK>& shared, const ChunkForwardParams& p, int tokens,
                                 const tile::Accumulator (&k_k)[2], const tile::Accumulator (&q_q)[2]) {
  const auto factor = [&](int row, float square) {
    return p.l2norm_eps >= 0.0f && row < tokens ? rsqrtf(square + p.l2norm_eps) : 1.0f;
  };
  for_each_square(k_k, [&](int row, float square) {
    const float f = factor(row, square);
    shared.factors[0][row] = f;
    shared.squares[row] = square * f * f;
  });
  __syncthreads();  // |k|^2, for the largest of them
  const float largest = block::warp_largest(fmaxf(shared.squares[tile::lane_id()], shared.squares[tile::lane_id() + 32]));
  for_each_square(q_q, [&](int row, float square) {
    const float f = factor(row, square), bound = fabsf(p.scale) * f * sqrtf(square) * sqrtf(largest);
    shared.factors[1][row] = f;
    shared.rises[row] = bound > 0.0f ? block::power_above(bound) : 1.0f;
  });
}

/// Gates of one value head by one warp, two tokens a lane, and the factors of its unit.
template <class Element, int kDimK>
FLASHQLA_DEVICE void prepare_gates(const ChunkForwardParams& p, const PreparedChunk& chunk, std::int32_t head,
                                   const PrepareShared<Element, kDimK>& shared, HeadGates& gates, std::byte* unit) {
  const int lane = tile::lane_id();
  const block::TokenGates first = block::token_gates(p, chunk.batch, chunk.token, head, lane, chunk.tokens),
                          second = block::token_gates(p, chunk.batch, chunk.token, head, lane + 32, chunk.tokens);
  const block::DecaySums d = block::decay_sums(first, second);
  const block::TwoFloats all = block::split(d.all);
  const float beta_power = block::power_above(block::warp_largest(fmaxf(fabsf(first.beta), fabsf(second.beta))));
  float strength = 0.0f, squares = 0.0f, reads = 0.0f, writes = 0.0f, lowest = 0.0f, highest = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = lane + 32 * half;
    const double rise = d.rises[half];
    const float power = exp2f(static_cast<float>(rise)), inverse = exp2f(static_cast<float>(-rise));
    const block::TwoFloats sum = block::split(d.sums[half]), lowered = block::split(d.sums[half] - rise);
    const float beta = half == 0 ? first.beta : second.beta, own = beta * shared.squares[token];
    gates.high[token] = lowered.high;
    gates.low[token] = lowered.low;
    const float decay = exp2f(sum.high) * exp2f(sum.low), factor_k = shared.factors[0][token];
    gates.column[token] = beta * block::inverse_power(beta_power) * factor_k;
    const auto store = [&](int offset, float x) { reinterpret_cast<float*>(unit + offset)[token] = x; };
    store(ChunkUnit::kStrength, inverse);
    const float read = inverse * decay * factor_k, write = block::exp2_difference(all, sum) * factor_k * beta * power;
    store(ChunkUnit::kReadK, read);
    store(ChunkUnit::kReadQ, p.scale * decay * shared.factors[1][token]);
    store(ChunkUnit::kRise, shared.rises[token] * beta_power * power);
    store(ChunkUnit::kWriteK, write);
    reads = fmaxf(reads, read);
    writes = fmaxf(writes, fabsf(write));
    lowest = fminf(lowest, sum.high);
    highest = fmaxf(highest, sum.high);
    if (p.kept.gates != nullptr) {
      KeptGates& kept = p.kept.gates[chunk.index * p.heads_v + head];
      kept.high[token] = sum.high;
      kept.low[token] = sum.low;
      kept.beta[token] = beta;
    }
    strength += own;
    squares += own * own;
  }
  // NaN, too. Gradients are made of differences in which the rounding of a state would show.
  const bool precise = p.kept.states != nullptr;
  strength = block::warp_total(strength);
  squares = block::warp_total(squares);
  const float fall = block::warp_largest(-lowest) + block::warp_largest(highest),
              least = fall > kMostDecay ? kLeastThrough : 0.0f;
  reads = block::warp_largest(reads);
  writes = block::warp_largest(writes);
  if (lane == 0) {
    gates.beta_power = beta_power;
    *reinterpret_cast<float*>(unit + ChunkUnit::kLeastForth) = least * writes;
    *reinterpret_cast<float*>(unit + ChunkUnit::kLeastBack) = least * reads;
    *reinterpret_cast<float*>(unit + ChunkUnit::kLeastOfState) = fall > kFarDecay ? kLeastOfState : 0.0f;
    *reinterpret_cast<float*>(unit + ChunkUnit::kTotal) = exp2f(all.high) * exp2f(all.low);
    *reinterpret_cast<float*>(unit + ChunkUnit::kPrecise) = !precise && squares <= kMostStrength * strength ? 0.0f : 1.0f;
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
      const float factor_l = -gates.beta_power * shared.factors[0][i],
                  factor_s = scale * shared.factors[1][i] * block::inverse_power(shared.rises[i]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int j = 16 * block_j + 8 * half + lane % 4 * 2 + c, at = 2 * upper + c;
          const float decay = block::exp2_difference(sum_i, {gates.high[j], gates.low[j]}) * gates.column[j];
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
FLASHQLA_DEVICE void store_solve(const block::InverseExchange<kParts>& exchange, const block::PartsB<kParts>& diagonal,
                                 const tile::FragmentB& transposed, std::byte* unit) {
  const int column = static_cast<int>(threadIdx.x) / 32;
  store_block(unit, ChunkUnit::kSolve, column, column, transposed);
  block::solve_block_column(exchange, diagonal, [&](int i, const tile::Accumulator(&t)[2]) {
    store_block(unit, ChunkUnit::kSolve, i, column, tile::to_b_transposed<ptx::F16>(t[0], t[1]));
  });
}

}  // namespace flashqla::cuda
