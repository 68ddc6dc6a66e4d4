// From gradients of a chunk's log decays and betas to those of what was given, whatever made them; and the rows of no sequence.
#pragma once

#include "cuda/block/gates.cuh"
#include "cuda/kernels/chunk_backward/params.hpp"
#include "cuda/kernels/chunk_forward/chunk.cuh"

namespace flashqla::cuda {

/// Below it beta is not divided by: its token's dV has lost digits to larger ones of its row of V.
inline constexpr float kLeastBeta = 1.0f / 16;

/// Sums over the tokens from each one on: x of the lane's tokens, lane and lane + 32.
FLASHQLA_DEVICE void sum_from(double (&x)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const double second = __shfl_sync(0xffffffffu, x[1], 31 - lane), first = __shfl_sync(0xffffffffu, x[0], 31 - lane);
  const double late = block::warp_sums(second);
  const double early = block::warp_sums(first) + __shfl_sync(0xffffffffu, late, 31);
  x[0] = __shfl_sync(0xffffffffu, early, 31 - lane);
  x[1] = __shfl_sync(0xffffffffu, late, 31 - lane);
}
/// Sums over the tokens before each one.
FLASHQLA_DEVICE void sum_before(double (&x)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const double first = block::warp_sums(x[0]), second = block::warp_sums(x[1]);
  const double left = __shfl_up_sync(0xffffffffu, first, 1), right = __shfl_up_sync(0xffffffffu, second, 1);
  const double half = __shfl_sync(0xffffffffu, first, 31);
  x[0] = lane > 0 ? left : 0.0;
  x[1] = half + (lane > 0 ? right : 0.0);
}

/// From the gradient of a token's log decay to that of g as given; adds to sums[0] and sums[1] those of a_log and dt_bias.
FLASHQLA_DEVICE double gate_gradient(const ChunkBackwardParams& p, const block::RawGates& raw, double d_decay,
                                     double (&sums)[2]) {
  if (p.gate != Gate::computed || d_decay == 0.0) return d_decay;  // zero stays zero however steep the gate is
  const float x = raw.g + raw.bias;
  sums[0] += d_decay * static_cast<double>(raw.log_decay(p));
  const float slope = x < -80.0f ? -expf(raw.a_log + x) : -expf(raw.a_log) * block::sigmoid(x);
  const double d_g = d_decay * static_cast<double>(slope);
  sums[1] += d_g;
  return d_g;
}
FLASHQLA_DEVICE float beta_slope(Beta kind, float beta) {
  if (kind == Beta::one || kind == Beta::given) return 1.0f;
  return (kind == Beta::sigmoid ? 1.0f : 2.0f) * block::sigmoid(beta) * block::sigmoid(-beta);
}

/// dg and dbeta of a value head's tokens, lane and lane + 32 of a warp, from the gradients of their log decays and betas. `unit`:
/// of the chunk and head.
FLASHQLA_DEVICE void store_gate_gradients(const ChunkBackwardParams& p, const PreparedChunk& chunk, std::int32_t head,
                                          std::int64_t unit, const double (&d_decay)[2], const float (&d_beta)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  double head_sums[2] = {0.0, 0.0};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = lane + 32 * half;
    if (t >= chunk.tokens) continue;
    const std::int64_t row = chunk.token + t;
    const block::RawGates raw = block::load_gates(p, chunk.batch, row, head);
    const double d_g = gate_gradient(p, raw, d_decay[half], head_sums);
    if (p.d_g.data != nullptr) {
      store_scalar(p.d_g.data, p.d_g.dtype, offset_of(p.d_g, chunk.batch, row, head), static_cast<float>(d_g));
    }
    if (p.d_beta.data != nullptr) {
      store_scalar(p.d_beta.data, p.d_beta.dtype, offset_of(p.d_beta, chunk.batch, row, head),
                   d_beta[half] * beta_slope(p.beta_kind, raw.beta));
    }
  }
  if (p.head_sums == nullptr) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const double sum = block::warp_sums(head_sums[i]);
    if (lane == 31) p.head_sums[2 * unit + i] = sum;
  }
}

/// Rows past the last offset belong to no sequence: their gradients are zero. Blocks past the last chunk take 64 of them each.
FLASHQLA_DEVICE void zero_gradients(const ChunkBackwardParams& p, std::int64_t idle, std::int32_t head_qk) {
  if (p.sequences.offsets == nullptr) return;
  const std::int64_t first = p.sequences.offsets[p.sequences.count] + idle * kChunkTokens;
  const std::int64_t left = p.sequences.tokens - first, rows = left < kChunkTokens ? left : kChunkTokens;
  const auto clear = [&](const TokenTensor& x, std::int32_t first_head, std::int32_t heads, std::int32_t columns) {
    if (x.data == nullptr) return;
    for (std::int64_t at = threadIdx.x; at < rows * heads * columns; at += blockDim.x) {
      const std::int64_t column = at % columns, head = first_head + at / columns % heads, row = at / columns / heads;
      store_scalar(x.data, x.dtype, offset_of(x, 0, first + row, head) + column, 0.0f);
    }
  };
  clear(p.d_q, head_qk, 1, p.dim_k);
  clear(p.d_k, head_qk, 1, p.dim_k);
  clear(p.d_v, head_qk * p.group, p.group, p.dim_v);
  clear(p.d_g, head_qk * p.group, p.group, 1);
  clear(p.d_beta, head_qk * p.group, p.group, 1);
}

}  // namespace flashqla::cuda
