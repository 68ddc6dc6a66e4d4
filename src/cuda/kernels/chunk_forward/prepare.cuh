// The part of chunk_forward that knows no state, for all chunks at once: one block of 128 threads a chunk and q/k head. With
// Gam_ij = the decay between tokens j and i (i >= j), and everything normalised on the way if asked for:
//   L = stril(Gam_ij k_i.k_j beta_j),  solve = (I + L)^-1,  scores = tril(scale Gam_ij q_i.k_j beta_j),  answers = scores solve
// and the factors of rows, to a ChunkUnit. K K^T and Q K^T are made once and stay in the accumulators for all value heads of the
// group: warp w has their rows 16 w to 16 w + 15.
#pragma once

#include <cstddef>

#include "cuda/block/gates.cuh"
#include "cuda/block/inverse.cuh"
#include "cuda/kernels/chunk_forward/chunk.cuh"
#include "cuda/tile/fragments.cuh"
#include "cuda/tile/rows.cuh"

namespace flashqla::cuda {

inline constexpr int kPrepareThreads = 128, kPrepareWarps = 4;
inline constexpr int kHeadsTogether = 2;  // whose triangles are inverted together

/// Parts of what is solved for in the products of the inverse and in that with scores, and of scores: the bounds of f16 tensors
/// are a quarter of those of bf16.
template <class Element>
inline constexpr int kSolvedParts = std::is_same_v<Element, ptx::F16> ? 2 : 1;

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
struct alignas(16) HeadGates {  // pairs are read at once
  float high[kChunkTokens], low[kChunkTokens];
  float column[kChunkTokens];  // beta over beta_power, times what L2 normalisation multiplies the key by
  float beta_power;            // above the largest beta
};
static_assert(alignof(HeadGates) % alignof(float2) == 0 && offsetof(HeadGates, high) % alignof(float2) == 0 &&
                  offsetof(HeadGates, low) % alignof(float2) == 0 && offsetof(HeadGates, column) % alignof(float2) == 0,
              "gate_below reads two floats at a time, of any head of an array");

/// What needs no keys, of a value head: made while they are on their way. Each lane reads what it has written.
struct TokenSums {
  float high[kChunkTokens], low[kChunkTokens];  // sums of log2 decays
  float rise[kChunkTokens], beta[kChunkTokens];
};

/// Shared memory of prepare_chunks. The keys and queries are gone when the first head's memory is written.
template <class Element, int kDimK>
struct PrepareShared {
  using Rows = tile::SharedTile<kChunkTokens, kDimK>;
  struct Heads {
    block::InverseScratch<kHeadsTogether> scratch[kPrepareWarps];
    block::InverseExchange exchange[kHeadsTogether];
    block::StoredParts<kSolvedParts<Element>> scores[kHeadsTogether][ChunkUnit::kBlocks];
    HeadGates gates[kPrepareWarps];  // of as many value heads as there are warps
  };
  union {
    alignas(128) std::byte rows[2][Rows::kBytes];  // keys, queries
    alignas(128) Heads heads;
  };
  TokenSums sums[kPrepareWarps];
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

/// Sums of one value head by one warp, two tokens a lane.
FLASHQLA_DEVICE void sum_gates(const ChunkForwardParams& p, const PreparedChunk& chunk, std::int32_t head, TokenSums& to) {
  const int lane = tile::lane_id();
  block::RawGates raw[2];  // all loads before anything waits for one
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = lane + 32 * half;  // past the end: the last one's, not used
    raw[half] = block::load_gates(p, chunk.batch, chunk.token + (token < chunk.tokens ? token : chunk.tokens - 1), head);
  }
  const auto gates = [&](int half) {
    return block::token_gates(p, chunk.batch, chunk.token, head, lane + 32 * half, chunk.tokens, raw[half]);
  };
  const block::TokenGates first = gates(0), second = gates(1);
  const block::DecaySums d = block::decay_sums(first, second);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const block::TwoFloats sum = block::split(d.sums[half]);
    const int token = lane + 32 * half;
    to.high[token] = sum.high;
    to.low[token] = sum.low;
    to.rise[token] = static_cast<float>(d.rises[half]);
    to.beta[token] = half == 0 ? first.beta : second.beta;
  }
}

/// Gates of one value head by one warp, from its sums, and the factors of its unit.
template <class Element, int kDimK>
FLASHQLA_DEVICE void prepare_gates(const ChunkForwardParams& p, const PreparedChunk& chunk, std::int32_t head,
                                   const TokenSums& sums, const PrepareShared<Element, kDimK>& shared, HeadGates& gates,
                                   std::byte* unit) {
  const int lane = tile::lane_id();
  const float beta_power =
      block::power_above(block::warp_largest_positive(fmaxf(fabsf(sums.beta[lane]), fabsf(sums.beta[lane + 32]))));
  const block::TwoFloats all{__shfl_sync(0xffffffffu, sums.high[lane + 32], 31),
                             __shfl_sync(0xffffffffu, sums.low[lane + 32], 31)};
  float strength = 0.0f, squares = 0.0f, reads = 0.0f, writes = 0.0f, lowest = 0.0f, highest = 0.0f, growth = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = lane + 32 * half;
    const float rise = sums.rise[token], power = exp2f(rise), inverse = exp2f(-rise);
    const block::TwoFloats sum{sums.high[token], sums.low[token]};
    const block::TwoFloats lowered = block::split(static_cast<double>(sum.high) + sum.low - rise);
    const float beta = sums.beta[token], own = beta * shared.squares[token];
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
    growth = fmaxf(growth, rise);
  }
  // NaN, too. Gradients are made of differences in which the rounding of a state would show.
  const bool precise = p.kept.states != nullptr;
  strength = block::warp_total(strength);
  squares = block::warp_total(squares);
  const float fall = block::warp_largest_positive(fabsf(lowest)) + block::warp_largest_positive(fabsf(highest)),
              least = fall > kMostDecay ? kLeastThrough : 0.0f;
  reads = block::warp_largest_positive(reads);
  writes = block::warp_largest_positive(writes);
  growth = block::warp_largest_positive(growth);
  if (lane == 0) {
    gates.beta_power = beta_power;
    *reinterpret_cast<float*>(unit + ChunkUnit::kLeastForth) = least * writes;
    *reinterpret_cast<float*>(unit + ChunkUnit::kLeastBack) = least * reads;
    *reinterpret_cast<float*>(unit + ChunkUnit::kLeastOfState) = fall > kFarDecay ? kLeastOfState : 0.0f;
    *reinterpret_cast<float*>(unit + ChunkUnit::kGrowth) = growth;
    *reinterpret_cast<float*>(unit + ChunkUnit::kTotal) = exp2f(all.high) * exp2f(all.low);
    *reinterpret_cast<float*>(unit + ChunkUnit::kPrecise) = !precise && squares <= kMostStrength * strength ? 0.0f : 1.0f;
  }
}

FLASHQLA_DEVICE void store_block(const ChunkForwardParams& p, std::byte* unit, int triangle, int block_i, int block_j,
                                 const tile::FragmentB& b) {
  const int lane = tile::lane_id();
  std::byte* const row = unit + triangle + block_i * (block_i + 1) / 2 * 512;
  if (p.pieces == 0) {
    *reinterpret_cast<uint4*>(row + block_j * 512 + lane * 16) = {b.b[0], b.b[1], b.b[2], b.b[3]};
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // a register of all lanes is a piece
    *reinterpret_cast<std::uint32_t*>(row + i / 2 * (block_i + 1) * 256 + block_j * 256 + i % 2 * 128 + lane * 4) = b.b[i];
  }
}

/// The two rows of a block that a lane has: what multiplies them in -L and in scores; and so that what a decay from the warp's
/// first token to them does, for blocks off the diagonal.
struct RowFactors {
  float lower[2], scores[2], lower_decayed[2], scores_decayed[2];
};
template <class Element, int kDimK>
FLASHQLA_DEVICE RowFactors row_factors_of(const PrepareShared<Element, kDimK>& shared, const HeadGates& gates, float scale) {
  const int first = 16 * (static_cast<int>(threadIdx.x) / 32);
  const block::TwoFloats sum_first{gates.high[first], gates.low[first]};
  RowFactors f;
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {  // rows g and g + 8
    const int i = first + tile::lane_id() / 4 + 8 * upper;
    const float decay = block::exp2_flushing({gates.high[i], gates.low[i]}, sum_first);
    f.lower[upper] = -gates.beta_power * shared.factors[0][i];
    f.scores[upper] = scale * shared.factors[1][i] * block::inverse_power(shared.rises[i]);
    f.lower_decayed[upper] = f.lower[upper] * decay;
    f.scores_decayed[upper] = f.scores[upper] * decay;
  }
  return f;
}

/// Blocks of -L and scores below the diagonal. The decay between two tokens is that from the column's to the warp's first token
/// times that from there to the row's: neither exceeds 2.
FLASHQLA_DEVICE void gate_below(const HeadGates& gates, const RowFactors& rows, int block_j, const tile::Accumulator* kk,
                                const tile::Accumulator* qk, tile::Accumulator (&lower)[2], tile::Accumulator (&scores)[2]) {
  const int first = 16 * (static_cast<int>(threadIdx.x) / 32);
  const block::TwoFloats sum_first{gates.high[first], gates.low[first]};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int j = 16 * block_j + 8 * half + tile::lane_id() % 4 * 2;
    const float2 high = *reinterpret_cast<const float2*>(gates.high + j), low = *reinterpret_cast<const float2*>(gates.low + j),
                 column = *reinterpret_cast<const float2*>(gates.column + j);
    const float factors[2] = {column.x * block::exp2_flushing(sum_first, {high.x, low.x}),
                              column.y * block::exp2_flushing(sum_first, {high.y, low.y})};
#pragma unroll
    for (int at = 0; at < 4; ++at) {
      lower[half].c[at] = kk[half].c[at] * factors[at % 2] * rows.lower_decayed[at / 2];
      scores[half].c[at] = qk[half].c[at] * factors[at % 2] * rows.scores_decayed[at / 2];
    }
  }
}

/// The block on the diagonal: zeros above it, and on it in -L.
FLASHQLA_DEVICE void gate_diagonal(const HeadGates& gates, const RowFactors& rows, const tile::Accumulator* kk,
                                   const tile::Accumulator* qk, tile::Accumulator (&lower)[2], tile::Accumulator (&scores)[2]) {
  const int first = 16 * (static_cast<int>(threadIdx.x) / 32), row = tile::lane_id() / 4, column = tile::lane_id() % 4 * 2;
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int i = row + 8 * upper;
    const block::TwoFloats sum_i{gates.high[first + i], gates.low[first + i]};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int j = 8 * half + column + c, at = 2 * upper + c;
        const float decay = block::exp2_flushing(sum_i, {gates.high[first + j], gates.low[first + j]}) * gates.column[first + j];
        lower[half].c[at] = j < i ? rows.lower[upper] * decay * kk[half].c[at] : 0.0f;
        scores[half].c[at] = j <= i ? rows.scores[upper] * decay * qk[half].c[at] : 0.0f;
      }
    }
  }
}

/// From this warp's rows of K K^T and Q K^T: -L and scores for all warps, L_ii to the scratch; `matrix` of those inverted
/// together.
template <class Element, int kDimK>
FLASHQLA_DEVICE void gate_products(PrepareShared<Element, kDimK>& shared, const HeadGates& gates, float scale,
                                   const tile::Accumulator (&kk)[8], const tile::Accumulator (&qk)[8], int matrix) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = tile::lane_id();
  const RowFactors rows = row_factors_of(shared, gates, scale);
#pragma unroll
  for (int block_j = 0; block_j < 4; ++block_j) {
    if (block_j > warp) break;
    tile::Accumulator scores[2], lower[2];
    if (block_j < warp) {
      gate_below(gates, rows, block_j, kk + 2 * block_j, qk + 2 * block_j, lower, scores);
      block::store_parts(shared.heads.exchange[matrix].minus_lower[warp * (warp - 1) / 2 + block_j],
                         block::to_parts_a<block::kInverseParts>(lower[0], lower[1]));
    } else {
      gate_diagonal(gates, rows, kk + 2 * block_j, qk + 2 * block_j, lower, scores);
#pragma unroll
      for (int at = 0; at < 4; ++at) {  // a pair of columns of a row each
        const tile::Accumulator& half = lower[at % 2];
        float* const to = shared.heads.scratch[warp].lower[matrix] + (lane / 4 + 8 * (at / 2)) * block::kInverseStride +
                          8 * (at % 2) + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = {-half.c[at / 2 * 2], -half.c[at / 2 * 2 + 1]};
      }
    }
    block::store_parts(shared.heads.scores[matrix][warp * (warp + 1) / 2 + block_j],
                       block::to_parts_a<kSolvedParts<Element>>(scores[0], scores[1]));
  }
}

/// `solve` and `answers`, a column of blocks, to the unit, after a barrier. The first columns are the most work: a warp has of
/// two matrices two that together are as much as any other warp's.
template <class Element, int kDimK>
FLASHQLA_DEVICE void store_solve(const ChunkForwardParams& p, const PrepareShared<Element, kDimK>& shared, int matrix,
                                 std::byte* unit) {
  const int warp = static_cast<int>(threadIdx.x) / 32, j = matrix == 0 ? warp : kPrepareWarps - 1 - warp;
  const auto& scratch = shared.heads.scratch;
  store_block(p, unit, ChunkUnit::kSolve, j, j, block::diagonal_transposed(scratch[j], matrix));
  block::PartsB<kSolvedParts<Element>> solve[4];
  block::solve_block_column(
      shared.heads.exchange[matrix], scratch, matrix, j,
      [&](int i, const tile::Accumulator(&t)[2]) {
        store_block(p, unit, ChunkUnit::kSolve, i, j, tile::to_b_transposed<ptx::F16>(t[0], t[1]));
      },
      solve);
#pragma unroll
  for (int below = 0; below < 4; ++below) {
    const int i = j + below;
    if (i >= 4) break;
    tile::Accumulator answers[2];
    tile::clear(answers);
#pragma unroll
    for (int l = 0; l <= below; ++l) {
      block::multiply(answers, block::load_parts(shared.heads.scores[matrix][i * (i + 1) / 2 + j + l]), solve[l]);
    }
    store_block(p, unit, ChunkUnit::kAnswers, i, j, tile::to_b_transposed<ptx::F16>(answers[0], answers[1]));
  }
}

}  // namespace flashqla::cuda
