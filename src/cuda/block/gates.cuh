// Log decays and betas of a chunk's tokens, and what follows from them. All arithmetic on sums of decays is in double, kept as
// two floats: decays of -20 and more a token add up to thousands, of which neighbouring tokens differ by little.
#pragma once

#include "cuda/ptx/exponential.cuh"
#include "cuda/views/views.cuh"
#include "flashqla/problem.hpp"

namespace flashqla::cuda::block {

inline constexpr double kLog2E = 1.4426950408889634;
inline constexpr float kLeastDecay = -1000.0f;  // a token's log decay is raised to it: its exponential is 0 all the same

/// softplus(x) = log(1 + e^x), exact for large arguments of either sign.
FLASHQLA_DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

FLASHQLA_DEVICE float sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return x >= 0.0f ? 1.0f / (1.0f + e) : e / (1.0f + e);
}

/// e^x for |x| <= 80, the nearest float or, one time in 40, the one on the other side of e^x, at most twice as far away. A state
/// is multiplied by the same decay token after token: what expf is off by, up to two units in the last place, would add up.
FLASHQLA_DEVICE float nearest_exp(float x) {
  constexpr float kRound = 12582912.0f + 127.0f;  // 1.5 2^23: sums are whole, with the exponent of 2^n in the lowest bits
  constexpr float kLn2 = 0x1.62e43p-1f, kLn2Rest = -0x1.05c61p-29f;
  const float whole = fmaf(x, static_cast<float>(kLog2E), kRound), n = whole - kRound;
  const float power = __uint_as_float(__float_as_uint(whole) << 23);
  const float r = fmaf(-n, kLn2, x), rest = -kLn2Rest * n;  // r is exact
  const float sum = r + rest;
  float p = fmaf(sum, 0x1.6a23dp-10f, 0x1.123a2p-7f);  // e^r = 1 + r + r^2 p(r), 3e-9 off at most
  p = fmaf(sum, fmaf(sum, fmaf(sum, p, 0x1.5558f2p-5f), 0x1.555492p-3f), 0x1.fffffcp-2f);
  const float high = fmaf(r, power, power), low = fmaf(r, power, power - high);
  return high + fmaf(fmaf(sum * sum, p, rest), power, low);
}

/// -exp(a_log) softplus(x), 0 where one factor is, whatever the other.
FLASHQLA_DEVICE float computed_decay(float a_log, float x) {
  if (x < -80.0f) return -expf(a_log + x);  // softplus is e^x there
  const float rate = expf(a_log);
  return rate == 0.0f ? 0.0f : -rate * softplus(x);
}

/// Natural log decay of one token, raised to kLeastDecay. `a_log`: with Gate::computed. Not for Gate::cumulative.
FLASHQLA_DEVICE float log_decay(Gate gate, float g, float a_log, float bias) {
  if (gate == Gate::none) return 0.0f;
  const float decay = gate == Gate::computed ? computed_decay(a_log, g + bias) : g;
  return decay < kLeastDecay ? kLeastDecay : decay;  // keeps NaN
}

FLASHQLA_DEVICE float strength(Beta kind, float beta) {
  if (kind == Beta::one) return 1.0f;
  if (kind == Beta::given) return beta;
  return kind == Beta::sigmoid ? sigmoid(beta) : 2.0f * sigmoid(beta);
}

/// A token's g and beta as given, and its head's numbers.
struct RawGates {
  float g, beta, a_log, bias;

  FLASHQLA_DEVICE float log_decay(const OperationParams& p) const { return block::log_decay(p.gate, g, a_log, bias); }
  FLASHQLA_DEVICE float strength(const OperationParams& p) const { return block::strength(p.beta_kind, beta); }
};
FLASHQLA_DEVICE RawGates load_gates(const OperationParams& p, std::int64_t batch, std::int64_t row, std::int32_t head) {
  RawGates raw{0.0f, 1.0f, 0.0f, 0.0f};
  if (p.gate != Gate::none) raw.g = load_scalar(p.g.data, p.g.dtype, offset_of(p.g, batch, row, head));
  if (p.beta_kind != Beta::one) raw.beta = load_scalar(p.beta.data, p.beta.dtype, offset_of(p.beta, batch, row, head));
  if (p.gate == Gate::computed) raw.a_log = load_scalar(p.a_log.data, p.a_log.dtype, head * p.a_log.stride);
  if (p.dt_bias.data != nullptr) raw.bias = load_scalar(p.dt_bias.data, p.dt_bias.dtype, head * p.dt_bias.stride);
  return raw;
}

/// Log decay and beta of a token of a chunk.
struct TokenGates {
  double log_decay;  // natural
  float beta;
};
/// Of token `token` of the chunk of `tokens` tokens whose first is row `row`, with what load_gates says of it; past the end
/// nothing decays and nothing is written.
FLASHQLA_DEVICE TokenGates token_gates(const OperationParams& p, std::int64_t batch, std::int64_t row, std::int32_t head,
                                       int token, int tokens, const RawGates& raw) {
  if (token >= tokens) return {0.0, 0.0f};
  if (p.gate != Gate::cumulative) return {raw.log_decay(p), raw.strength(p)};
  double decay = raw.g;  // sums of these differences are what was given
  if (token > 0) decay -= static_cast<double>(load_scalar(p.g.data, p.g.dtype, offset_of(p.g, batch, row + token - 1, head)));
  return {decay < kLeastDecay ? kLeastDecay : decay, raw.strength(p)};
}

FLASHQLA_DEVICE TokenGates token_gates(const OperationParams& p, std::int64_t batch, std::int64_t row, std::int32_t head,
                                       int token, int tokens) {
  if (token >= tokens) return {0.0, 0.0f};
  return token_gates(p, batch, row, head, token, tokens, load_gates(p, batch, row + token, head));
}

/// A number as the sum of two floats.
struct TwoFloats {
  float high, low;
};
FLASHQLA_DEVICE TwoFloats split(double x) {
  const float high = static_cast<float>(x);
  return {high, static_cast<float>(x - static_cast<double>(high))};
}

/// 2^(a - b).
FLASHQLA_DEVICE float exp2_difference(const TwoFloats& a, const TwoFloats& b) {
  return exp2f((a.high - b.high) + (a.low - b.low));
}

/// The same, 0 where it is below 2^-126.
FLASHQLA_DEVICE float exp2_flushing(const TwoFloats& a, const TwoFloats& b) {
  return ptx::exp2_flushing((a.high - b.high) + (a.low - b.low));
}

/// The sum over the 32 lanes of a warp, in all of them.
FLASHQLA_DEVICE float warp_total(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

/// The largest of the 32 lanes of a warp, in all of them.
FLASHQLA_DEVICE float warp_largest(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

/// The same of numbers that are not negative, in one instruction. NaN if one is.
FLASHQLA_DEVICE float warp_largest_positive(float x) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x)));
}

/// Inclusive sums over the 32 lanes of a warp.
FLASHQLA_DEVICE double warp_sums(double x) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const double before = __shfl_up_sync(0xffffffffu, x, step);
    if (lane >= step) x += before;
  }
  return x;
}

/// Minima up to and with each of the 32 lanes of a warp.
FLASHQLA_DEVICE double warp_minima(double x) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const double before = __shfl_up_sync(0xffffffffu, x, step);
    if (lane >= step) x = fmin(x, before);
  }
  return x;
}

/// Sums of the log2 decays of a chunk's tokens, lane and lane + 32 of a warp. Where there is growth they rise above their lowest
/// value so far: by less than the whole number `rises`.
struct DecaySums {
  double sums[2], rises[2];
  double all;
};
FLASHQLA_DEVICE DecaySums decay_sums(const TokenGates& first, const TokenGates& second) {
  DecaySums d;
  d.sums[0] = warp_sums(first.log_decay * kLog2E);
  d.sums[1] = warp_sums(second.log_decay * kLog2E) + __shfl_sync(0xffffffffu, d.sums[0], 31);
  d.rises[0] = d.rises[1] = 0.0;
  if (!__all_sync(0xffffffffu, first.log_decay <= 0.0 && second.log_decay <= 0.0)) {
    double lowest[2] = {warp_minima(d.sums[0]), warp_minima(d.sums[1])};  // up to and with each token
    lowest[1] = fmin(lowest[1], __shfl_sync(0xffffffffu, lowest[0], 31));
    for (int half = 0; half < 2; ++half) d.rises[half] = ceil(d.sums[half] - lowest[half]);
  }
  d.all = __shfl_sync(0xffffffffu, d.sums[1], 31);
  return d;
}

/// The power of two above x, from 2^-126 to 2^126 (that for infinity too).
FLASHQLA_DEVICE float power_above(float x) {
  const int exponent = min(max(static_cast<int>(__float_as_uint(x) >> 23) + 1, 1), 253);
  return __uint_as_float(static_cast<std::uint32_t>(exponent) << 23);
}
FLASHQLA_DEVICE float inverse_power(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

}  // namespace flashqla::cuda::block
