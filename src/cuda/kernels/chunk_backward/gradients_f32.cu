#include "cuda/host/start.cuh"
#include "cuda/kernels/chunk_backward/gradients_f32.cuh"
#include "cuda/kernels/chunk_backward/start.hpp"

namespace flashqla::cuda {

/// dQ and dK of the thread's tokens, kTiles times 64 columns of K.
template <int kTiles>
struct FloatTotals {
  Products query[kTiles], key[kTiles];
};

/// Element (token, 16 j + c) of 64 columns of keys (or, four slices on, queries).
FLASHQLA_DEVICE float row_element(const float* slices, int token, int j) {
  return slices[j * tile::kSliceFloats + token * tile::kSliceStride + static_cast<int>(threadIdx.x) % 16];
}

/// dO S^T (rows 0 to 3), dV S^T (4 to 7) and e dS^T over V, in 64 columns of K from `first` on, and the thread's part of <S, dS>.
FLASHQLA_DEVICE void multiply_states(const ChunkBackwardParams& p, const PreparedChunk& chunk, std::int32_t head, int first,
                                     FloatGradientShared& shared, float (&reads)[8][4], Products& writes, float& state_dot) {
  constexpr int kStep = 16 * tile::kSliceStride, kSkip = tile::kSliceFloats - 4 * kStep;
  const FloatPlace place;
  const int row = place.r * tile::kSliceStride, column = place.c * tile::kSliceStride;
  const int piece = static_cast<int>(threadIdx.x) / 4 * tile::kSliceStride + static_cast<int>(threadIdx.x) % 4 * 4;
  const tile::GlobalFloats rows[kSlicesOfStage] = {
      chunk_rows(p, p.d_o, chunk, head, p.dim_v), kept_rows(p.d_kept_values, chunk.index, head, p.dim_v),
      kept_rows(p.kept_errors, chunk.index, head, p.dim_v), kept_state(p, p.kept_states, chunk.index, head, first),
      kept_state(p, p.d_kept_states, chunk.index, head, first)};
  tile::clear(reads);
  tile::clear(writes);
  for_each_slice(
      shared, p.dim_v / tile::kSliceColumns,
      [&](int step, FloatStage& stage) {
#pragma unroll
        for (int i = 0; i < kSlicesOfStage; ++i) tile::copy_slice(stage[i], rows[i], step * tile::kSliceColumns);
      },
      [&](const FloatStage& stage) {
        tile::multiply_dots<tile::kSliceColumns, kStep, kStep, false, kSkip>(reads, stage[0] + row, stage[3] + column);
        tile::multiply_dots<tile::kSliceColumns, kStep, kStep, false>(writes, stage[2] + row, stage[4] + column);
        const float4 x = tile::load_float4(stage[3] + piece), y = tile::load_float4(stage[4] + piece);
        state_dot += (x.x * y.x + x.y * y.y) + (x.z * y.z + x.w * y.w);
      });
}

/// Factors of rows, dots with keys and queries, and what the states give to dQ and dK.
FLASHQLA_DEVICE void take_states(const float* slices, float scale, const FloatGradientShared& shared, const float (&reads)[8][4],
                                 const Products& writes, float (&dots)[3][4], Products& query, Products& key) {
  const float* const queries = slices + 4 * tile::kSliceFloats;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = FloatPlace().r + 16 * i;
    const block::TwoFactors decay = shared.decay[token], rest = shared.rest[token];
    const float beta = shared.beta[token];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float k = row_element(slices, token, j), q = row_element(queries, token, j);
      const float of_query = scale * decay.near * reads[i][j] * decay.far, of_key = -decay.near * reads[4 + i][j] * decay.far,
                  written = rest.near * writes[i][j] * rest.far;
      dots[0][i] = fmaf(of_query, q, dots[0][i]);
      dots[1][i] = fmaf(of_key, k, dots[1][i]);
      dots[2][i] = fmaf(written, k, dots[2][i]);
      query[i][j] += of_query;
      key[i][j] += fmaf(beta, written, of_key);
    }
  }
}

/// c += x rows for the lower triangle x of pairs.
template <int kBlock>
FLASHQLA_DEVICE void add_block(const float* pairs, const float* slices, Products& c) {
#pragma unroll 1
  for (int k = 16 * kBlock; k < 16 * kBlock + 16; k += 4) {
    float right[4][4];
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
#pragma unroll
      for (int j = 0; j < 4; ++j) right[kk][j] = row_element(slices, k + kk, j);
    }
#pragma unroll
    for (int i = kBlock; i < 4; ++i) {
      const float4 left = tile::load_float4(pairs + tile::triangle_row(FloatPlace().r + 16 * i) + k);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        c[i][j] = fmaf(left.x, right[0][j], c[i][j]);
        c[i][j] = fmaf(left.y, right[1][j], c[i][j]);
        c[i][j] = fmaf(left.z, right[2][j], c[i][j]);
        c[i][j] = fmaf(left.w, right[3][j], c[i][j]);
      }
    }
  }
}
FLASHQLA_DEVICE void add_lower(const float* pairs, const float* slices, Products& c) {
  add_block<0>(pairs, slices, c);
  add_block<1>(pairs, slices, c);
  add_block<2>(pairs, slices, c);
  add_block<3>(pairs, slices, c);
}

/// c += x^T rows, the rows of 16 tokens.
template <int kBlock>
FLASHQLA_DEVICE void add_block_transposed(const float* pairs, const float* slices, Products& c) {
#pragma unroll 2
  for (int t = 16 * kBlock; t < 16 * kBlock + 16; ++t) {
    const float* const left = pairs + tile::triangle_row(t) + FloatPlace().r;
    float right[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) right[j] = row_element(slices, t, j);
#pragma unroll
    for (int i = 0; i <= kBlock; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) c[i][j] = fmaf(left[16 * i], right[j], c[i][j]);
    }
  }
}
FLASHQLA_DEVICE void add_transposed(const float* pairs, const float* slices, Products& c) {
  add_block_transposed<0>(pairs, slices, c);
  add_block_transposed<1>(pairs, slices, c);
  add_block_transposed<2>(pairs, slices, c);
  add_block_transposed<3>(pairs, slices, c);
}

/// The sum over the 16 lanes that share tokens, in all of them.
FLASHQLA_DEVICE float sum_of_row(float x) {
#pragma unroll
  for (int step = 1; step < 16; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

/// dg and dbeta of a value head, by one warp.
FLASHQLA_DEVICE void finish_gates(const ChunkBackwardParams& p, const PreparedChunk& chunk, std::int32_t head,
                                  const FloatGradientShared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  double reads[2], writes[2], d_decay[2];
  float d_beta[2];
  for (int half = 0; half < 2; ++half) {
    const int t = lane + 32 * half;
    reads[half] = shared.dots[0][t] + shared.dots[1][t];
    writes[half] = shared.dots[2][t] * shared.beta[t];
    const float beta = shared.beta[t];
    d_beta[half] = fabsf(beta) >= kLeastBeta ? shared.diagonal[t] / beta : shared.dots[2][t] + shared.columns[t];
  }
  sum_from(reads);
  sum_before(writes);
  float states = lane < kFloatGradientThreads / 32 ? shared.state_dots[lane] : 0.0f;
  const block::TwoFactors total = shared.decay[kChunkTokens - 1];
  states = block::warp_total(states) * total.near * total.far;
  for (int half = 0; half < 2; ++half) {
    d_decay[half] =
        static_cast<double>(states) + writes[half] + reads[half] + static_cast<double>(shared.across[lane + 32 * half]);
  }
  store_gate_gradients(p, chunk, head, chunk.index * p.heads_v + head, d_decay, d_beta);
}

template <int kTiles>
FLASHQLA_DEVICE void add_value_head(const ChunkBackwardParams& p, const PreparedChunk& chunk, std::int32_t head,
                                    FloatGradientShared& shared, FloatTotals<kTiles>& totals) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  __syncthreads();  // factors, from all; the last head's gates and sums have been read
  if (warp == 0) take_gates(p, chunk, head, shared);
  {
    PairProducts sums;
    multiply_pairs(p, chunk, head, shared, sums);
    __syncthreads();  // all have left the stages: their memory is that of the flows now
    take_pairs(sums, p.scale, shared, shared.stages[0][0]);
  }
  sum_flows(shared, shared.stages[0][0]);
  float dots[3][4], state_dot = 0.0f;
  for (float(&row)[4] : dots) {
    for (float& x : row) x = 0.0f;
  }
#pragma unroll
  for (int turn = 0; turn < kTiles; ++turn) {
    float reads[8][4];
    Products writes;
    multiply_states(p, chunk, head, turn * kColumnsAtOnce, shared, reads, writes, state_dot);
    const float* const slices = load_rows(p, chunk, turn * kColumnsAtOnce, shared);
    take_states(slices, p.scale, shared, reads, writes, dots, totals.query[turn], totals.key[turn]);
    add_lower(shared.pairs[0], slices, totals.query[turn]);
    add_lower(shared.pairs[1], slices, totals.key[turn]);
    add_transposed(shared.pairs[0], slices + 4 * tile::kSliceFloats, totals.key[turn]);
    add_transposed(shared.pairs[1], slices, totals.key[turn]);
  }
  const FloatPlace place;
  for (int which = 0; which < 3; ++which) {
    for (int i = 0; i < 4; ++i) {
      const float dot = sum_of_row(dots[which][i]);
      if (place.c == 0) shared.dots[which][place.r + 16 * i] = dot;
    }
  }
  state_dot = block::warp_total(state_dot);
  if (threadIdx.x % 32 == 0) shared.state_dots[warp] = state_dot;
  __syncthreads();  // dots, for one warp
  if (warp == 0) finish_gates(p, chunk, head, shared);
}

/// Gradients of q and k as given, past L2 normalisation, to the caller's rows.
template <int kTiles>
FLASHQLA_DEVICE void store_row_gradients(const ChunkBackwardParams& p, const PreparedChunk& chunk, FloatGradientShared& shared,
                                         const FloatTotals<kTiles>& totals) {
  const FloatPlace place;
  float along[2][4] = {};  // of keys and queries
#pragma unroll
  for (int turn = 0; turn < kTiles; ++turn) {
    if (p.l2norm_eps < 0.0f) continue;
    const float* const slices = load_rows(p, chunk, turn * kColumnsAtOnce, shared);
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        along[0][i] = fmaf(row_element(slices, place.r + 16 * i, j), totals.key[turn][i][j], along[0][i]);
        along[1][i] =
            fmaf(row_element(slices + 4 * tile::kSliceFloats, place.r + 16 * i, j), totals.query[turn][i][j], along[1][i]);
      }
    }
  }
  for (float(&row)[4] : along) {
    for (float& x : row) x = sum_of_row(x);
  }
#pragma unroll
  for (int turn = 0; turn < kTiles; ++turn) {
    const float* const slices = load_rows(p, chunk, turn * kColumnsAtOnce, shared);
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const TokenTensor& to = which == 0 ? p.d_k : p.d_q;
      if (to.data == nullptr) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = place.r + 16 * i;
        if (token >= chunk.tokens) continue;
        const std::int64_t at = offset_of(to, chunk.batch, chunk.token + token, chunk.head_qk) + turn * kColumnsAtOnce + place.c;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (turn * kColumnsAtOnce + 16 * j >= p.dim_k) continue;
          const float x = which == 0 ? totals.key[turn][i][j] : totals.query[turn][i][j];
          const float row = row_element(slices + 4 * which * tile::kSliceFloats, token, j);
          store_scalar(to.data, to.dtype, at + 16 * j, shared.factors[which][token] * fmaf(-along[which][i], row, x));
        }
      }
    }
  }
}

template <int kTiles>
__global__ void __launch_bounds__(kFloatGradientThreads, 1) chunk_gradients_f32(const __grid_constant__ ChunkBackwardParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<FloatGradientShared*>(memory);
  PreparedChunk chunk;
  if (!find_chunk(p, chunk)) return zero_gradients(p, chunk.index - chunk_count(p.sequences), chunk.head_qk);
  take_factors(p, chunk, shared);
  FloatTotals<kTiles> totals;
#pragma unroll
  for (int turn = 0; turn < kTiles; ++turn) {
    tile::clear(totals.query[turn]);
    tile::clear(totals.key[turn]);
  }
#pragma unroll 1
  for (std::int32_t h = 0; h < p.group; ++h) add_value_head<kTiles>(p, chunk, chunk.head_qk * p.group + h, shared, totals);
  store_row_gradients<kTiles>(p, chunk, shared, totals);
}

int start_gradients_f32(const ChunkBackwardParams& params, std::int32_t padded_k, std::int64_t blocks, void* stream) {
  constexpr std::size_t kMostShared = 99 * 1024;  // of a block on any device
  static_assert(sizeof(FloatGradientShared) <= kMostShared);
  const KernelLaunch launch{blocks, kFloatGradientThreads, sizeof(FloatGradientShared), stream};
  if (padded_k == 64) return start_kernel(chunk_gradients_f32<1>, launch, params);
  if (padded_k == 128) return start_kernel(chunk_gradients_f32<2>, launch, params);
  return start_kernel(chunk_gradients_f32<4>, launch, params);
}

}  // namespace flashqla::cuda
