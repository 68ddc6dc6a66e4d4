// Gradients of log decay and beta. With E = dP * Q K^T + dKK * K K^T, what flows into the decays between tokens of the chunk:
//
//   d log decay_t = total <dS, S> + sum_{j<t} k_j.Z_j + sum_{i>=t} (q_i.(dOg S^T)_i + k_i.(dU S^T)_i) + sum_{i>=t>j} E_ij
//   d beta_j = dV_j.e_j / beta_j,  or for a small beta  k_j.(rest e dS^T)_j + sum_i E_ij / beta_j
//
// No term is there to be cancelled by another: under strong decay each is as small as the result.
#pragma once

#include "cuda/kernels/chunk_backward/gradient_products.cuh"

namespace flashqla::cuda {

/// Below it beta is not divided by: its token's dV has lost digits to larger ones of its row of V.
inline constexpr float kLeastBeta = 1.0f / 16;

/// `pairs` holds dO e^T or dV e^T and becomes dP or dKK; `products`, Q K^T or K K^T without factors, becomes E
/// without beta. The diagonal of dV e^T goes to the sums. `log`: of what pairs has been divided by.
template <int kDimK>
FLASHQLA_DEVICE void take_pairs(const GradientShared<kDimK>& shared, const GradientPlace& place, float scale, int log,
                                float (&diagonal)[2], tile::Accumulator (&pairs)[4], tile::Accumulator (&products)[4]) {
  const bool gram = place.gram() != 0;
  const TwoPowers power = two_powers(log);
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int i = place.token(upper);
    const block::TwoFloats sum_i{shared.high[i], shared.low[i]};
    const float factor_i = shared.factors[gram ? 0 : 1][i], size = gram ? shared.fall[i] : shared.d_o_powers[i],
                sign = gram ? -1.0f : scale;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int j = 32 * place.column_half() + 8 * n + place.pair + c, at = 2 * upper + c;
        const float dot = times(pairs[n].c[at], power) * (size * shared.rise[j]);
        if (gram && i == j) diagonal[upper] = dot;
        const bool below = gram ? j < i : j <= i;
        const float flow = sign * block::exp2_difference(sum_i, {shared.high[j], shared.low[j]}) * dot;
        const float factors = factor_i * shared.factors[0][j];
        pairs[n].c[at] = below ? flow * shared.beta[j] : 0.0f;
        products[n].c[at] = below ? flow * (products[n].c[at] * factors) : 0.0f;
      }
    }
  }
}

/// Sums over a column of the lanes' 16 rows, in all lanes that have it.
FLASHQLA_DEVICE float column_total(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

/// Column sums of E without beta, and what E adds across every token, from the warp's 16 x 32 of it.
template <int kDimK>
FLASHQLA_DEVICE void sum_pairs(const GradientShared<kDimK>& shared, const GradientPlace& place,
                               const tile::Accumulator (&flow)[4], GateSums& sums) {
  const int t = place.pair / 2;
  float before[2] = {0.0f, 0.0f};  // of the lane's rows: the columns up to this accumulator's
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int j = 32 * place.column_half() + 8 * n + place.pair;
    const float beta[2] = {shared.beta[j], shared.beta[j + 1]};
    float across[2] = {0.0f, 0.0f};
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const float x = flow[n].c[2 * upper] * beta[0], y = flow[n].c[2 * upper + 1] * beta[1];
      float up_to = x + y;
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, up_to, step);
        if (t >= step) up_to += other;
      }
      const float left = __shfl_up_sync(0xffffffffu, up_to, 1), own = before[upper] + (t > 0 ? left : 0.0f);
      const int i = place.token(upper);
      if (i >= j) across[0] += own;
      if (i >= j + 1) across[1] += own + x;
      before[upper] += __shfl_sync(0xffffffffu, up_to, tile::lane_id() | 3);
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float whole = column_total(across[c]), column = column_total(flow[n].c[c] + flow[n].c[2 + c]);
      if (place.row != 0) continue;
      sums.across[place.gram()][place.tile][j + c] = whole;
      sums.columns[place.gram()][place.tile][j + c] = column;
    }
  }
  if (place.column_half() != 0 || t != 0) return;
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) sums.first_half[place.gram()][place.token(upper)] = before[upper];
}

/// Sums over the tokens from each one on: x of the lane's tokens, lane and lane + 32.
FLASHQLA_DEVICE void sum_from(double (&x)[2]) {
  const int lane = tile::lane_id();
  const double second = __shfl_sync(0xffffffffu, x[1], 31 - lane), first = __shfl_sync(0xffffffffu, x[0], 31 - lane);
  const double late = block::warp_sums(second);
  const double early = block::warp_sums(first) + __shfl_sync(0xffffffffu, late, 31);
  x[0] = __shfl_sync(0xffffffffu, early, 31 - lane);
  x[1] = __shfl_sync(0xffffffffu, late, 31 - lane);
}
/// Sums over the tokens before each one.
FLASHQLA_DEVICE void sum_before(double (&x)[2]) {
  const int lane = tile::lane_id();
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

/// Of the sums of E: what flows across token t, and its column's sum without beta.
FLASHQLA_DEVICE float2 sums_of_pairs(const GateSums& sums, int t) {
  float across = 0.0f, column = 0.0f;
  for (int gram = 0; gram < 2; ++gram) {
    for (int tile = t / 16; tile < kTokenTiles; ++tile) {
      across += sums.across[gram][tile][t];
      column += sums.columns[gram][tile][t];
    }
  }
  return {across, column};
}

/// dg and dbeta of a value head's tokens, by one warp.
template <int kDimK>
FLASHQLA_DEVICE void finish_gates(const ChunkBackwardParams& p, const PreparedChunk& chunk, std::int32_t head, std::int64_t unit,
                                  const GradientShared<kDimK>& shared) {
  const GateSums& sums = shared.end.sums;
  const int lane = tile::lane_id();
  double reads[2], writes[2], halves[2], across[2];
  float d_beta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = lane + 32 * half;
    float read = 0.0f, write = 0.0f;
    for (int group = 0; group < kGroups; ++group) {
      read += sums.query[group][t] + sums.key[group][t];
      write += sums.write[group][t];
    }
    const float2 pairs = sums_of_pairs(sums, t);
    const float beta = shared.beta[t];
    reads[half] = read;
    writes[half] = write * beta;
    halves[half] = sums.first_half[0][t] + sums.first_half[1][t];
    across[half] = pairs.x;
    d_beta[half] = fabsf(beta) >= kLeastBeta ? sums.diagonal[t] / beta : write + pairs.y;
  }
  sum_from(reads);
  sum_before(writes);
  sum_from(halves);
  across[1] += halves[1];
  float states = lane < kGradientWarps ? shared.state_dots[lane] : 0.0f;
  states = block::warp_total(states) * (exp2f(shared.high[kChunkTokens - 1]) * exp2f(shared.low[kChunkTokens - 1]));
  double head_sums[2] = {0.0, 0.0};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = lane + 32 * half;
    if (t >= chunk.tokens) continue;
    const std::int64_t row = chunk.token + t;
    const block::RawGates raw = block::load_gates(p, chunk.batch, row, head);
    const double d_decay = static_cast<double>(states) + writes[half] + reads[half] + across[half];
    const double d_g = gate_gradient(p, raw, d_decay, head_sums);
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

}  // namespace flashqla::cuda
