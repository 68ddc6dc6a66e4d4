// Gradients of log decay and beta. With E = dP * Q K^T + dKK * K K^T, what flows into the decays between tokens of the chunk:
//
//   d log decay_t = total <dS, S> + sum_{j<t} k_j.Z_j + sum_{i>=t} (q_i.(dOg S^T)_i + k_i.(dU S^T)_i) + sum_{i>=t>j} E_ij
//   d beta_j = dV_j.e_j / beta_j,  or for a small beta  k_j.(rest e dS^T)_j + sum_i E_ij / beta_j
//
// No term is there to be cancelled by another: under strong decay each is as small as the result.
#pragma once

#include "cuda/kernels/chunk_backward/dots.cuh"
#include "cuda/kernels/chunk_backward/gate_gradients.cuh"
#include "cuda/kernels/chunk_backward/gradient_products.cuh"

namespace flashqla::cuda {

FLASHQLA_DEVICE float2 two_floats(const float* at) { return *reinterpret_cast<const float2*>(at); }

/// `pairs` holds dO e^T or dV e^T and becomes dP or dKK; `products`, Q K^T or K K^T without factors, becomes E
/// without beta. The diagonal of dV e^T goes to the sums. `logs`: of what its
/// blocks have been divided by.
template <int kDimK>
FLASHQLA_DEVICE void take_pairs(const GradientShared<kDimK>& shared, const ValueHead& head, const GradientPlace& place,
                                float scale, const int (&logs)[2], float (&diagonal)[2], tile::Accumulator (&pairs)[4],
                                tile::Accumulator (&products)[4]) {
  static_assert(offsetof(GradientShared<kDimK>, factors) % alignof(float2) == 0);
  const bool gram = place.gram() != 0;
  const TwoPowers powers[2] = {two_powers(logs[0]), two_powers(logs[1])};
  block::TwoFloats sum_i[2];
  float factor_i[2], size[2];
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int i = place.token(upper);
    sum_i[upper] = {head.high[i], head.low[i]};
    factor_i[upper] = shared.factors[gram ? 0 : 1][i];
    size[upper] = gram ? head.fall[i] : head.d_o_powers[i];
  }
  const float sign = gram ? -1.0f : scale;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int first = 32 * place.column_half() + 8 * n + place.pair;
    const float2 high = two_floats(head.high + first), low = two_floats(head.low + first), rise = two_floats(head.rise + first),
                 beta = two_floats(head.beta + first), factors = two_floats(shared.factors[0] + first);
#pragma unroll
    for (int at = 0; at < 4; ++at) {
      const int i = place.token(at / 2), j = first + at % 2;
      const auto of = [&](const float2& x) { return at % 2 == 0 ? x.x : x.y; };
      const float dot = times(pairs[n].c[at], powers[n / 2]) * size[at / 2] * of(rise);
      if (gram && i == j) diagonal[at / 2] = dot;
      const bool below = gram ? j < i : j <= i;
      const float root = block::exp2_flushing(sum_i[at / 2], {of(high), of(low)});
      const float flow = below ? root * dot * (sign * root) : 0.0f;
      pairs[n].c[at] = flow * of(beta);
      products[n].c[at] = flow * (products[n].c[at] * (factor_i[at / 2] * of(factors)));
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
FLASHQLA_DEVICE void sum_pairs(const ValueHead& head, const GradientPlace& place, const tile::Accumulator (&flow)[4],
                               GateSums& sums) {
  const int t = place.pair / 2;
  float before[2] = {0.0f, 0.0f};  // of the lane's rows: the columns up to this accumulator's
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int j = 32 * place.column_half() + 8 * n + place.pair;
    const float2 betas = two_floats(head.beta + j);
    const float beta[2] = {betas.x, betas.y};
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

/// dg and dbeta of a value head's tokens, by one warp. With kKeepsRests sums that have a state's gradient in them come from the
/// way back (dots.cuh).
template <class Element, int kDimK>
FLASHQLA_DEVICE void finish_gates(const ChunkBackwardParams& p, const PreparedChunk& chunk, std::int32_t head,
                                  const ValueHead& gates, const GradientShared<kDimK>& shared) {
  const GateSums& sums = shared.end().sums;
  const std::int64_t unit = chunk.index * p.heads_v + head;
  const int lane = tile::lane_id();
  double reads[2], writes[2], halves[2], across[2];
  float d_beta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = lane + 32 * half;
    float read = 0.0f, write = 0.0f;
    for (int group = 0; group < kGroups; ++group) {
      read += sums.reads[group][t];
      if constexpr (!kKeepsRests<Element>) write += sums.writes[group][t];
    }
    if constexpr (kKeepsRests<Element>) {
      write = row_dot(p, unit, t) * gates.rest[t] * (gates.rest[t] * gates.rise[t] * shared.factors[0][t]);
    }
    const float2 pairs = sums_of_pairs(sums, t);
    const float beta = gates.beta[t];
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
  float states = 0.0f;
  if constexpr (kKeepsRests<Element>) {
    states = state_dot(p, unit);
  } else {
    states = block::warp_total(lane < kGradientWarps ? shared.state_dots[lane] : 0.0f);
  }
  const float total = gates.decay[kChunkTokens - 1];
  states = states * total * total;
  double d_decay[2];
  for (int half = 0; half < 2; ++half) d_decay[half] = static_cast<double>(states) + writes[half] + reads[half] + across[half];
  store_gate_gradients(p, chunk, head, unit, d_decay, d_beta);
}

}  // namespace flashqla::cuda
