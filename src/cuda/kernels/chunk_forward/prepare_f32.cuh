// What prepare_chunks_f32 and write_extras_f32 are made of: the units in f32 (FloatUnit), by plain FMA. One block of 256 threads
// a chunk and q/k head; thread (r, c) = (thread / 16, thread % 16) has rows r + 16 i and columns c + 16 j of K K^T and Q K^T in
// its registers for all value heads of the group. 64 threads a value head then solve (I + L) T = I, a column each: no power of L
// and no product of rounded inverses.
#pragma once

#include "cuda/block/f32.cuh"
#include "cuda/kernels/chunk_forward/chunk.cuh"
#include "cuda/tile/panel.cuh"

namespace flashqla::cuda {

inline constexpr int kFloatPrepareThreads = 256;
inline constexpr int kHeadsAtOnce = kFloatPrepareThreads / kChunkTokens;

/// Sums of log2 decays of a value head's tokens, and beta times what L2 normalisation multiplies the key by.
struct FloatGates {
  float high[kChunkTokens], low[kChunkTokens], column[kChunkTokens];
};

/// The panels are gone when the first head's memory is written.
struct FloatPrepareShared {
  struct Heads {
    float lower[kHeadsAtOnce][FloatUnit::kTriangle];  // L
    FloatGates gates[kHeadsAtOnce];
  };
  union {
    alignas(16) float panels[2][2][tile::kPanelFloats];  // two stages of keys and queries
    alignas(16) Heads heads;
  };
  float factors[2][kChunkTokens];  // what L2 normalisation multiplies keys and queries by
};

/// Products of all rows with keys, on and below the diagonal of blocks.
using FloatProducts = float[4][4];

/// Calls body(i, j, row, column) for the thread's elements of the lower triangle of blocks.
template <class Body>
FLASHQLA_DEVICE void for_each_product(Body body) {
  const int r = static_cast<int>(threadIdx.x) / 16, c = static_cast<int>(threadIdx.x) % 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j <= i) body(i, j, r + 16 * i, c + 16 * j);
    }
  }
}

/// Sums of squares of a quarter of a row's columns in a panel.
FLASHQLA_DEVICE float panel_squares(const float* panel) {
  const float* const row = panel + static_cast<int>(threadIdx.x) / 4 * tile::kPanelStride + static_cast<int>(threadIdx.x) % 4 * 8;
  const float4 x = tile::load_float4(row), y = tile::load_float4(row + 4);
  return ((x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w)) + ((y.x * y.x + y.y * y.y) + (y.z * y.z + y.w * y.w));
}

FLASHQLA_DEVICE tile::GlobalFloats token_rows(const ChunkForwardParams& p, const TokenTensor& x, const PreparedChunk& chunk) {
  return {static_cast<const float*>(x.data) + offset_of(x, chunk.batch, chunk.token, chunk.head_qk), x.stride_token, chunk.tokens,
          p.dim_k, p.aligned != 0};
}

/// K K^T and Q K^T, and the factors of rows. kQueries: false leaves Q out.
template <bool kQueries>
FLASHQLA_DEVICE void multiply_keys(const ChunkForwardParams& p, const PreparedChunk& chunk, FloatPrepareShared& shared,
                                   FloatProducts& kk, FloatProducts& qk) {
  constexpr int kStep = 16 * tile::kPanelStride;
  const tile::GlobalFloats keys = token_rows(p, p.k, chunk), queries = kQueries ? token_rows(p, p.q, chunk) : keys;
  const int thread = static_cast<int>(threadIdx.x), panels = (p.dim_k + tile::kPanelColumns - 1) / tile::kPanelColumns;
  const auto load = [&](int panel) {
    float(&stage)[2][tile::kPanelFloats] = shared.panels[panel % 2];
    tile::copy_panel<kFloatPrepareThreads>(stage[0], keys, panel * tile::kPanelColumns);
    if (kQueries) tile::copy_panel<kFloatPrepareThreads>(stage[1], queries, panel * tile::kPanelColumns);
    ptx::cp_async_commit();
  };
  float squares[2] = {0.0f, 0.0f};
  tile::clear(kk);
  tile::clear(qk);
  load(0);
#pragma unroll 1
  for (int panel = 0; panel < panels; ++panel) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // this panel is full, from all threads; and all have left the other stage
    if (panel + 1 < panels) load(panel + 1);
    const float(&stage)[2][tile::kPanelFloats] = shared.panels[panel % 2];
    const float *const own = stage[0] + thread / 16 * tile::kPanelStride, *const column =
                                                                              stage[0] + thread % 16 * tile::kPanelStride;
    tile::multiply_dots<tile::kPanelColumns, kStep, kStep, true>(kk, own, column);
    if (kQueries) tile::multiply_dots<tile::kPanelColumns, kStep, kStep, true>(qk, own + tile::kPanelFloats, column);
    if (p.l2norm_eps < 0.0f) continue;
    for (int part = 0; part < (kQueries ? 2 : 1); ++part) squares[part] += panel_squares(stage[part]);
  }
  for (int part = 0; part < (kQueries ? 2 : 1); ++part) {
    for (int step = 1; step < 4; step *= 2) squares[part] += __shfl_xor_sync(0xffffffffu, squares[part], step);
    const bool normalised = p.l2norm_eps >= 0.0f && thread / 4 < chunk.tokens;
    if (thread % 4 == 0) shared.factors[part][thread / 4] = normalised ? 1.0f / sqrtf(squares[part] + p.l2norm_eps) : 1.0f;
  }
}

/// Gates of one value head by one warp, two tokens a lane, and the factors of its unit.
FLASHQLA_DEVICE void prepare_gates(const ChunkForwardParams& p, const PreparedChunk& chunk, std::int32_t head,
                                   const float (&factors)[2][kChunkTokens], FloatGates& gates, float* unit) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const block::TokenGates token[2] = {block::token_gates(p, chunk.batch, chunk.token, head, lane, chunk.tokens),
                                      block::token_gates(p, chunk.batch, chunk.token, head, lane + 32, chunk.tokens)};
  const block::DecaySums d = block::decay_sums(token[0], token[1]);
  const block::TwoFloats all = block::split(d.all);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = lane + 32 * half;
    const block::TwoFloats sum = block::split(d.sums[half]);
    const float decay = exp2f(sum.high) * exp2f(sum.low);
    gates.high[t] = sum.high;
    gates.low[t] = sum.low;
    gates.column[t] = token[half].beta * factors[0][t];
    unit[FloatUnit::kReadK + t] = decay * factors[0][t];
    unit[FloatUnit::kReadQ + t] = p.scale * decay * factors[1][t];
    unit[FloatUnit::kWriteK + t] = block::exp2_difference(all, sum) * gates.column[t];
  }
  const float largest = block::largest_kept(token, d);
  if (lane != 0) return;
  unit[FloatUnit::kTotal] = exp2f(all.high) * exp2f(all.low);
  unit[FloatUnit::kLargest] = largest;
}

/// L to shared memory, scores to the unit.
FLASHQLA_DEVICE void gate_products(const float (&factors)[2][kChunkTokens], const FloatGates& gates, float scale,
                                   const FloatProducts& kk, const FloatProducts& qk, float* lower, float* unit) {
  for_each_product([&](int i, int j, int row, int column) {
    const float decay =
        block::exp2_difference({gates.high[row], gates.low[row]}, {gates.high[column], gates.low[column]}) * gates.column[column];
    const int at = tile::triangle_row(row) + column;
    lower[at] = column < row ? factors[0][row] * decay * kk[i][j] : 0.0f;
    unit[FloatUnit::kScores + at] = column <= row ? scale * factors[1][row] * decay * qk[i][j] : 0.0f;
  });
}

/// Column `column` of (I + L)^-1 by forward substitution: store(row, x) for every row.
template <class Store>
FLASHQLA_DEVICE void invert_column(const float* lower, int column, const Store& store) {
  const bool late = column >= 32;  // of all lanes of the warp: its upper half is zero
  float x[kChunkTokens];
#pragma unroll
  for (int i = 0; i < kChunkTokens; ++i) {
    x[i] = 0.0f;
    if (late && i < 32) continue;
    const float* const row = lower + tile::triangle_row(i);
    float sums[4] = {column == i ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};  // four chains of additions, not one
    const auto subtract = [&](int m) {
      const float4 l = tile::load_float4(row + m);
      sums[0] = fmaf(-l.x, x[m], sums[0]);
      if (m + 1 < i) sums[1] = fmaf(-l.y, x[m + 1], sums[1]);
      if (m + 2 < i) sums[2] = fmaf(-l.z, x[m + 2], sums[2]);
      if (m + 3 < i) sums[3] = fmaf(-l.w, x[m + 3], sums[3]);
    };
    if (!late) {
#pragma unroll
      for (int m = 0; m < (i < 32 ? i : 32); m += 4) subtract(m);
    }
#pragma unroll
    for (int m = 32; m < i; m += 4) subtract(m);
    x[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
#pragma unroll
  for (int i = 0; i < kChunkTokens; ++i) store(i, x[i]);
}

}  // namespace flashqla::cuda
