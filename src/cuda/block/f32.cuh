// What only kernels for f32 need of decays: factors that are no normal f32, applied in two steps to numbers so large that the
// product is one.
#pragma once

#include "cuda/block/gates.cuh"

namespace flashqla::cuda::block {

/// A chunk whose sums of log2 decays range over more than this (e^-80) may have factors that are no normal f32.
inline constexpr float kMostRange = 115.0f;
/// And loses nothing by it, if without growth, as long as states and values are below this: then it is less than 2^-130.
inline constexpr float kLargestOfFar = 0x1p16f;
inline constexpr float kAnySize = 0x1.fffffep127f;

/// The largest state, value or gradient of one that a chunk may have before it has to be walked token by token, from the log
/// decays and their sums in log2 of the lane's two tokens.
FLASHQLA_DEVICE float largest_kept(const TokenGates (&token)[2], const DecaySums& d) {
  const auto first = static_cast<float>(d.sums[0]), second = static_cast<float>(d.sums[1]);
  const float range =
      warp_largest_positive(fmaxf(0.0f, fmaxf(first, second))) + warp_largest_positive(fmaxf(0.0f, fmaxf(-first, -second)));
  const auto rise = static_cast<float>(fmax(token[0].log_decay, token[1].log_decay));
  const bool grows = warp_largest_positive(fmaxf(0.0f, rise)) > 0.0f;
  return !(range > kMostRange) ? kAnySize : grows ? 0.0f : kLargestOfFar;
}

/// A factor as near * far, which are to be applied one after the other. Those above 2^-32 are near alone.
struct TwoFactors {
  float near, far;
};
inline constexpr float kNearPower = -32.0f;

/// 2^x.
FLASHQLA_DEVICE TwoFactors two_factors(const TwoFloats& x) {
  if (x.high > kNearPower) return {exp2f(x.high) * exp2f(x.low), 1.0f};
  const float half = truncf(0.5f * x.high);
  return {exp2f(half), exp2f(x.high - half) * exp2f(x.low)};
}
/// 2^(a - b).
FLASHQLA_DEVICE TwoFactors two_factors(const TwoFloats& a, const TwoFloats& b) {
  const float high = a.high - b.high;
  if (high > kNearPower) return {exp2_difference(a, b), 1.0f};
  const float taken = high - a.high, rest = (a.high - (high - taken)) - (b.high + taken);  // of what rounding `high` left out
  return two_factors({high, (a.low - b.low) + rest});
}

/// e^x of a token for a walk: the nearest float as far as that goes, since a state takes the same one again and again.
FLASHQLA_DEVICE TwoFactors token_factors(double x) {
  constexpr float kMostOfNear = 80.0f;
  const auto all = static_cast<float>(x);
  const float low = static_cast<float>(x - static_cast<double>(all)), near = fminf(fmaxf(all, -kMostOfNear), kMostOfNear);
  const float far = expf(all - near);
  return {nearest_exp(near), fmaf(far, low, far)};
}

/// The sum over the four lanes that share a row or column.
FLASHQLA_DEVICE float sum_of_four(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

}  // namespace flashqla::cuda::block
