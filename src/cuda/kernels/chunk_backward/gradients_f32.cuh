// chunk_gradients for f32, by plain FMA: one block of 256 threads a chunk and q/k head, value heads one after another. Thread (r,
// c) = (thread / 16, thread % 16) has tokens r + 16 i and columns c + 16 j: of products between tokens (lower blocks only), and
// of 64 columns of K in turn. Tensors come 16 columns at a time to two stages (for_each_slice). The order for a value head:
//
//   dO e^T, dV e^T; Q K^T, K K^T            over V, over K
//   dP, dKK to `pairs`, flows into decays   (gradient_gates.cuh has the formulas), summed over rows and columns
//   dO S^T, dV S^T, e dS^T; <S, dS>         over V, for 64 columns of K; factors and dots of rows
//   + dP K, dKK K, dP^T Q, dKK^T K          these columns of dQ and dK, in registers for all value heads of the group
//   dg, dbeta                               by one warp
#pragma once

#include "cuda/block/f32.cuh"
#include "cuda/kernels/chunk_backward/gate_gradients.cuh"
#include "cuda/tile/panel.cuh"

namespace flashqla::cuda {

inline constexpr int kFloatGradientThreads = 256;
inline constexpr int kSlicesOfStage = 5, kColumnsAtOnce = 64;
inline constexpr int kTriangleFloats = 10 * 256;

struct FloatGradientShared {
  alignas(16) float stages[2][kSlicesOfStage][tile::kSliceFloats];
  alignas(16) float pairs[2][kTriangleFloats];  // dP and dKK
  float high[kChunkTokens], low[kChunkTokens], beta[kChunkTokens];
  block::TwoFactors decay[kChunkTokens], rest[kChunkTokens];  // from the chunk's start, to its end
  float factors[2][kChunkTokens];                             // of L2 normalisation, keys and queries
  float dots[3][kChunkTokens];                                // q.(dOg S^T), k.(dU S^T), k.(rest e dS^T)
  float diagonal[kChunkTokens];                               // dV.e
  float columns[kChunkTokens], across[kChunkTokens];          // sums of flows: of a column without beta, across a token
  float state_dots[kFloatGradientThreads / 32];
};

using Products = float[4][4];

struct FloatPlace {
  int r = static_cast<int>(threadIdx.x) / 16, c = static_cast<int>(threadIdx.x) % 16;
};

/// Calls body(step, stage) for `count` steps, each after load(step, stage) has filled its stage.
template <class Load, class Body>
FLASHQLA_DEVICE void for_each_slice(FloatGradientShared& shared, int count, const Load& load, const Body& body) {
  __syncthreads();  // all have left the stages
  load(0, shared.stages[0]);
  ptx::cp_async_commit();
#pragma unroll 1
  for (int step = 0; step < count; ++step) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // this stage is full, from all threads; and all have left the other one
    if (step + 1 < count) load(step + 1, shared.stages[(step + 1) % 2]);
    ptx::cp_async_commit();
    body(shared.stages[step % 2]);
  }
}
using FloatStage = float[kSlicesOfStage][tile::kSliceFloats];

/// Rows of a chunk of the caller's tensor, or of one that has a chunk a batch entry.
FLASHQLA_DEVICE tile::GlobalFloats chunk_rows(const ChunkBackwardParams& p, const TokenTensor& x, const PreparedChunk& chunk,
                                              std::int32_t head, int columns) {
  return {static_cast<const float*>(x.data) + offset_of(x, chunk.batch, chunk.token, head), x.stride_token, chunk.tokens, columns,
          p.aligned != 0};
}
FLASHQLA_DEVICE tile::GlobalFloats kept_rows(const TokenTensor& x, std::int64_t index, std::int32_t head, int columns) {
  return {static_cast<const float*>(x.data) + offset_of(x, index, 0, head), x.stride_token, kChunkTokens, columns, true};
}
FLASHQLA_DEVICE tile::GlobalFloats kept_state(const ChunkBackwardParams& p, const StateTensor& x, std::int64_t index,
                                              std::int32_t head, int first) {
  const float* const rows = static_cast<const float*>(x.data) + index * x.stride_row + head * x.stride_head;
  return {rows + first * x.stride_outer, x.stride_outer, p.dim_k - first, p.dim_v, true};
}

/// Decays and betas of a value head, by one warp.
FLASHQLA_DEVICE void take_gates(const ChunkBackwardParams& p, const PreparedChunk& chunk, std::int32_t head,
                                FloatGradientShared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const block::TokenGates token[2] = {block::token_gates(p, chunk.batch, chunk.token, head, lane, chunk.tokens),
                                      block::token_gates(p, chunk.batch, chunk.token, head, lane + 32, chunk.tokens)};
  const block::DecaySums d = block::decay_sums(token[0], token[1]);
  const block::TwoFloats all = block::split(d.all);
  for (int half = 0; half < 2; ++half) {
    const int t = lane + 32 * half;
    const block::TwoFloats sum = block::split(d.sums[half]);
    shared.high[t] = sum.high;
    shared.low[t] = sum.low;
    shared.beta[t] = token[half].beta;
    shared.decay[t] = block::two_factors(sum);
    shared.rest[t] = block::two_factors(all, sum);
  }
}

/// Factors of L2 normalisation, keys and queries; 1 without it. Four threads a row.
FLASHQLA_DEVICE void take_factors(const ChunkBackwardParams& p, const PreparedChunk& chunk, FloatGradientShared& shared) {
  const int row = static_cast<int>(threadIdx.x) / 4, part = static_cast<int>(threadIdx.x) % 4;
  for (int which = 0; which < 2; ++which) {
    const bool normalised = p.l2norm_eps >= 0.0f && row < chunk.tokens;
    const tile::GlobalFloats rows = chunk_rows(p, which == 0 ? p.k : p.q, chunk, chunk.head_qk, p.dim_k);
    float square = 0.0f;
    for (int k = part; normalised && k < p.dim_k; k += 4) {
      const float x = rows.first[row * rows.stride + k];
      square = fmaf(x, x, square);
    }
    for (int step = 1; step < 4; step *= 2) square += __shfl_xor_sync(0xffffffffu, square, step);
    if (part == 0) shared.factors[which][row] = normalised ? 1.0f / sqrtf(square + p.l2norm_eps) : 1.0f;
  }
}

/// Calls body(i, j, row, column) for the thread's elements of the lower triangle of blocks.
template <class Body>
FLASHQLA_DEVICE void for_each_pair(Body body) {
  const FloatPlace place;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j <= i) body(i, j, place.r + 16 * i, place.c + 16 * j);
    }
  }
}

/// dO e^T and dV e^T, Q K^T and K K^T.
struct PairProducts {
  Products outputs, values, queries, keys;
};
FLASHQLA_DEVICE void multiply_pairs(const ChunkBackwardParams& p, const PreparedChunk& chunk, std::int32_t head,
                                    FloatGradientShared& shared, PairProducts& sums) {
  constexpr int kStep = 16 * tile::kSliceStride;
  const FloatPlace place;
  const int row = place.r * tile::kSliceStride, column = place.c * tile::kSliceStride;
  tile::clear(sums.outputs);
  tile::clear(sums.values);
  tile::clear(sums.queries);
  tile::clear(sums.keys);
  const tile::GlobalFloats d_o = chunk_rows(p, p.d_o, chunk, head, p.dim_v),
                           d_v = kept_rows(p.d_kept_values, chunk.index, head, p.dim_v),
                           e = kept_rows(p.kept_errors, chunk.index, head, p.dim_v);
  for_each_slice(
      shared, p.dim_v / tile::kSliceColumns,
      [&](int step, FloatStage& stage) {
        tile::copy_slice(stage[0], d_o, step * tile::kSliceColumns);
        tile::copy_slice(stage[1], d_v, step * tile::kSliceColumns);
        tile::copy_slice(stage[2], e, step * tile::kSliceColumns);
      },
      [&](const FloatStage& stage) {
        tile::multiply_dots<tile::kSliceColumns, kStep, kStep, true>(sums.outputs, stage[0] + row, stage[2] + column);
        tile::multiply_dots<tile::kSliceColumns, kStep, kStep, true>(sums.values, stage[1] + row, stage[2] + column);
      });
  const tile::GlobalFloats keys = chunk_rows(p, p.k, chunk, chunk.head_qk, p.dim_k),
                           queries = chunk_rows(p, p.q, chunk, chunk.head_qk, p.dim_k);
  for_each_slice(
      shared, p.dim_k / tile::kSliceColumns,
      [&](int step, FloatStage& stage) {
        tile::copy_slice(stage[0], keys, step * tile::kSliceColumns);
        tile::copy_slice(stage[1], queries, step * tile::kSliceColumns);
      },
      [&](const FloatStage& stage) {
        tile::multiply_dots<tile::kSliceColumns, kStep, kStep, true>(sums.keys, stage[0] + row, stage[0] + column);
        tile::multiply_dots<tile::kSliceColumns, kStep, kStep, true>(sums.queries, stage[1] + row, stage[0] + column);
      });
}

/// dP and dKK to `pairs`, what flows into the decays between tokens (without beta) to `flows`.
FLASHQLA_DEVICE void take_pairs(const PairProducts& sums, float scale, FloatGradientShared& shared, float* flows) {
  for_each_pair([&](int i, int j, int row, int column) {
    const block::TwoFactors decay =
        block::two_factors({shared.high[row], shared.low[row]}, {shared.high[column], shared.low[column]});
    const float of_scores = column <= row ? scale * decay.near * sums.outputs[i][j] * decay.far : 0.0f;
    const float of_keys = column < row ? -decay.near * sums.values[i][j] * decay.far : 0.0f;
    const int at = tile::triangle_row(row) + column;
    shared.pairs[0][at] = of_scores * shared.beta[column];
    shared.pairs[1][at] = of_keys * shared.beta[column];
    const float of_queries = of_scores * (sums.queries[i][j] * shared.factors[1][row]);
    flows[at] = fmaf(of_keys * sums.keys[i][j], shared.factors[0][row], of_queries) * shared.factors[0][column];
    if (row == column) shared.diagonal[row] = sums.values[i][j];
  });
}

/// Sums of flows over columns, and across every token. Four threads a column, a row, a token.
FLASHQLA_DEVICE void sum_flows(FloatGradientShared& shared, float* flows) {
  const int own = static_cast<int>(threadIdx.x) / 4, part = static_cast<int>(threadIdx.x) % 4;
  __syncthreads();  // flows, from all
  float column = 0.0f;
  for (int i = own / 16 * 16 + part; i < kChunkTokens; i += 4) column += flows[tile::triangle_row(i) + own];
  column = block::sum_of_four(column);
  if (part == 0) shared.columns[own] = column;
  __syncthreads();  // all have read the flows: they become sums over a row's columns up to each
  float sums[16], before = 0.0f;
  float* const row = flows + tile::triangle_row(own) + 16 * part;
  const bool there = part <= own / 16;
  for (int j = 0; j < 16; ++j) {
    if (there) before = fmaf(row[j], shared.beta[16 * part + j], before);
    sums[j] = before;
  }
  float left = 0.0f;  // what the lanes before have
  for (int lane = 1; lane < 4; ++lane) {
    const float other = __shfl_up_sync(0xffffffffu, before, lane);
    if (part >= lane) left += other;
  }
  for (int j = 0; there && j < 16; ++j) row[j] = left + sums[j];
  __syncthreads();  // sums over rows, for all
  float across = 0.0f;
  for (int i = own + part; own > 0 && i < kChunkTokens; i += 4) across += flows[tile::triangle_row(i) + own - 1];
  across = block::sum_of_four(across);
  if (part == 0) shared.across[own] = across;
}

/// 64 columns of keys and queries, as the recurrence takes them, to the stages: slices 0 to 3 and 4 to 7.
FLASHQLA_DEVICE const float* load_rows(const ChunkBackwardParams& p, const PreparedChunk& chunk, int first,
                                       FloatGradientShared& shared) {
  float* const slices = shared.stages[0][0];
  __syncthreads();  // all have left the stages
  for (int which = 0; which < 2; ++which) {
    const tile::GlobalFloats rows = chunk_rows(p, which == 0 ? p.k : p.q, chunk, chunk.head_qk, p.dim_k);
    for (int i = 0; i < 4; ++i) {
      tile::copy_slice(slices + (4 * which + i) * tile::kSliceFloats, rows, first + i * tile::kSliceColumns);
    }
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  if (p.l2norm_eps >= 0.0f) {  // every thread what it has copied itself
    const int row = static_cast<int>(threadIdx.x) / 4, piece = static_cast<int>(threadIdx.x) % 4 * 4;
    for (int i = 0; i < 8; ++i) {
      float* const x = slices + i * tile::kSliceFloats + row * tile::kSliceStride + piece;
      for (int j = 0; j < 4; ++j) x[j] *= shared.factors[i / 4][row];
    }
  }
  __syncthreads();  // the rows, for all
  return slices;
}

}  // namespace flashqla::cuda
