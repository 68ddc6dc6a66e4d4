// One token after another on a slab of a state that stays in registers.
// With d = exp(g) and the state S before the token,
//   e = beta (v - d k S)    o = scale (d q S + (k.q) e)    S <- d S + k^T e
// so that one pass over S gives k S and q S, and another updates it. All in f32.
//
// Sums over K: value_key: a lane's own k, then across the lanes of a row. key_value: the thread's own k, the 4 lanes of its
// columns, the warps in order. Across lanes, the sums of several columns are halved at each step, until a lane has one column:
// its own, of which it makes e, to be fetched by the lanes that update the column.
#pragma once

#include "cuda/kernels/recurrent_forward/token.cuh"

namespace flashqla::cuda {

/// key_value: what a block's warps tell each other of a token, each over its own k. Two tokens' worth, so that a barrier a token
/// is enough.
struct RecurrentShared {
  float2 columns[2][kRecurrentWarps][32];  // k S and q S of a lane's own column
  float4 sums[2][kRecurrentWarps];         // TokenSums
};

/// What all columns of a token share; L2 normalisation is factors of k and q.
struct TokenNumbers {
  float decay, beta, factor_k, factor_q;
  float k_dot_q;  // of k and q with their factors
};

FLASHQLA_DEVICE float from_lane_xor(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }

/// Over lanes whose numbers differ in the bits kLast, 2 kLast ... kFirst.
template <int kFirst, int kLast>
FLASHQLA_DEVICE TokenSums sum_of_lanes(TokenSums sums) {
#pragma unroll
  for (int step = kFirst; step >= kLast; step /= 2) {
    sums.k_k += from_lane_xor(sums.k_k, step);
    sums.q_q += from_lane_xor(sums.q_q, step);
    sums.k_q += from_lane_xor(sums.k_q, step);
  }
  return sums;
}

/// The same for each of kCount pairs: which of them a lane gets is the number in the uppermost of these bits of its own number.
template <int kCount, int kFirst, int kLast>
FLASHQLA_DEVICE float2 scatter_sums(float2 (&x)[kCount]) {
  int step = kFirst;
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2, step /= 2) {
    const bool upper = (thread_lane() & step) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float2 kept = upper ? x[i + half] : x[i], given = upper ? x[i] : x[i + half];
      x[i] = {kept.x + from_lane_xor(given.x, step), kept.y + from_lane_xor(given.y, step)};
    }
  }
#pragma unroll
  for (; step >= kLast; step /= 2) x[0] = {x[0].x + from_lane_xor(x[0].x, step), x[0].y + from_lane_xor(x[0].y, step)};
  return x[0];
}

/// A stronger decay, or growth, is taken in two factors: its exponential alone may be no normal number, while the state may be of
/// a size that makes the product one.
constexpr float kFarDecay = 80.0f;

/// exp of the token's log decay up to kFarDecay; what is beyond is taken from the state here.
template <int kGroups, int kOuter, int kInner>
FLASHQLA_DEVICE float take_decay(const RecurrentParams& p, const Token<kGroups>& token, float4 (&s)[kOuter][kInner]) {
  float log_decay = log_decay_of(p, token);
  if (fabsf(log_decay) > kFarDecay) {
    const float near = copysignf(kFarDecay, log_decay), factor = expf(log_decay - near);
    log_decay = near;
#pragma unroll
    for (auto& vectors : s) {
#pragma unroll
      for (float4& x : vectors) x = {factor * x.x, factor * x.y, factor * x.z, factor * x.w};
    }
  }
  return block::nearest_exp(log_decay);
}

template <int kGroups>
FLASHQLA_DEVICE TokenNumbers token_numbers(const RecurrentParams& p, float decay, const Token<kGroups>& token,
                                           const TokenSums& sums) {
  TokenNumbers numbers{decay, beta_of(p, token), 1.0f, 1.0f, sums.k_q};
  if (p.l2norm_eps >= 0.0f) {
    numbers.factor_k = rsqrtf(sums.k_k + p.l2norm_eps);
    numbers.factor_q = rsqrtf(sums.q_q + p.l2norm_eps);
    numbers.k_dot_q = sums.k_q * numbers.factor_k * numbers.factor_q;
  }
  return numbers;
}

/// k S and q S of a column, of k and q as given, to its o, and to e times k's factor.
struct Column {
  float o, e;
};
FLASHQLA_DEVICE Column finish_column(const RecurrentParams& p, const TokenNumbers& numbers, float v, float2 kq_s) {
  const float e = numbers.beta * fmaf(-numbers.decay, numbers.factor_k * kq_s.x, v);
  return {p.scale * fmaf(numbers.decay, numbers.factor_q * kq_s.y, numbers.k_dot_q * e), numbers.factor_k * e};
}

template <int kDimK, StateLayout kLayout>
struct Step;

template <int kDimK>
struct Step<kDimK, StateLayout::value_key> {
  using Where = SlabVectors<kDimK, StateLayout::value_key>;
  static constexpr int kTop = Where::kAcross / 2;

  /// The lane's own column: rows of scatter_sums are Where::kOuter neighbours of the lanes of a row of K.
  static FLASHQLA_DEVICE int own_column() { return static_cast<int>(threadIdx.x / 4); }
  static FLASHQLA_DEVICE bool stores() { return threadIdx.x % 4 == 0; }

  static FLASHQLA_DEVICE float run(const RecurrentParams& p, RecurrentShared&, int, const Token<Where::kGroups>& token,
                                   Slab<kDimK, StateLayout::value_key>& s) {
    const TokenSums sums = sum_of_lanes<kTop, 1>(token.sums);  // before anything that waits for the state
    const float decay = take_decay(p, token, s);
    float2 kq_s[Where::kOuter];
#pragma unroll
    for (int row = 0; row < Where::kOuter; ++row) {
      kq_s[row] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < Where::kInner; ++i) {
        kq_s[row] = {dot(token.k[i], s[row][i], kq_s[row].x), dot(token.q[i], s[row][i], kq_s[row].y)};
      }
    }
    const TokenNumbers numbers = token_numbers(p, decay, token, sums);
    const Column own = finish_column(p, numbers, token.v, scatter_sums<Where::kOuter, kTop, 1>(kq_s));
#pragma unroll
    for (int row = 0; row < Where::kOuter; ++row) {
      const float e = __shfl_sync(0xffffffffu, own.e, thread_lane() / Where::kAcross * Where::kAcross + row * 4);
#pragma unroll
      for (int i = 0; i < Where::kInner; ++i) {
        float4& x = s[row][i];
        const float4& k = token.k[i];
        x = {fmaf(k.x, e, numbers.decay * x.x), fmaf(k.y, e, numbers.decay * x.y), fmaf(k.z, e, numbers.decay * x.z),
             fmaf(k.w, e, numbers.decay * x.w)};
      }
    }
    return own.o;
  }
};

template <int kDimK>
struct Step<kDimK, StateLayout::key_value> {
  using Where = SlabVectors<kDimK, StateLayout::key_value>;

  static FLASHQLA_DEVICE int own_column() { return thread_lane() % 8 * kVector + thread_lane() / 8; }
  static FLASHQLA_DEVICE bool stores() { return thread_warp() == 0; }

  static FLASHQLA_DEVICE float run(const RecurrentParams& p, RecurrentShared& shared, int half,
                                   const Token<Where::kGroups>& token, Slab<kDimK, StateLayout::key_value>& s) {
    const int warp = thread_warp(), lane = thread_lane();
    const TokenSums sums = sum_of_lanes<16, 8>(token.sums);
    if (lane == 0) shared.sums[half][warp] = {sums.k_k, sums.q_q, sums.k_q, 0.0f};
    const float decay = take_decay(p, token, s);
    float2 kq_s[kVector] = {};
    const auto add = [&](float k, float q, const float4& x) {
      kq_s[0] = {fmaf(k, x.x, kq_s[0].x), fmaf(q, x.x, kq_s[0].y)};
      kq_s[1] = {fmaf(k, x.y, kq_s[1].x), fmaf(q, x.y, kq_s[1].y)};
      kq_s[2] = {fmaf(k, x.z, kq_s[2].x), fmaf(q, x.z, kq_s[2].y)};
      kq_s[3] = {fmaf(k, x.w, kq_s[3].x), fmaf(q, x.w, kq_s[3].y)};
    };
#pragma unroll
    for (int i = 0; i < Where::kGroups; ++i) {
      add(token.k[i].x, token.q[i].x, s[4 * i][0]);
      add(token.k[i].y, token.q[i].y, s[4 * i + 1][0]);
      add(token.k[i].z, token.q[i].z, s[4 * i + 2][0]);
      add(token.k[i].w, token.q[i].w, s[4 * i + 3][0]);
    }
    shared.columns[half][warp][lane] = scatter_sums<kVector, 16, 8>(kq_s);
    __syncthreads();  // the warps' sums, for all
    const TokenNumbers numbers = token_numbers(p, decay, token, total_sums(shared, half));
    const Column own = finish_column(p, numbers, token.v, total_columns(shared, half));
    float e[kVector];
#pragma unroll
    for (int c = 0; c < kVector; ++c) e[c] = __shfl_sync(0xffffffffu, own.e, lane % 8 + 8 * c);
    const auto update = [&](float k, float4& x) {
      x = {fmaf(k, e[0], numbers.decay * x.x), fmaf(k, e[1], numbers.decay * x.y), fmaf(k, e[2], numbers.decay * x.z),
           fmaf(k, e[3], numbers.decay * x.w)};
    };
#pragma unroll
    for (int i = 0; i < Where::kGroups; ++i) {
      update(token.k[i].x, s[4 * i][0]);
      update(token.k[i].y, s[4 * i + 1][0]);
      update(token.k[i].z, s[4 * i + 2][0]);
      update(token.k[i].w, s[4 * i + 3][0]);
    }
    return own.o;
  }

 private:
  static FLASHQLA_DEVICE float2 total_columns(const RecurrentShared& shared, int half) {
    const auto of = [&](int warp) { return shared.columns[half][warp][thread_lane()]; };
    const float2 a = of(0), b = of(1), c = of(2), d = of(3);
    return {(a.x + b.x) + (c.x + d.x), (a.y + b.y) + (c.y + d.y)};
  }
  static FLASHQLA_DEVICE TokenSums total_sums(const RecurrentShared& shared, int half) {
    const float4 a = shared.sums[half][0], b = shared.sums[half][1], c = shared.sums[half][2], d = shared.sums[half][3];
    return {(a.x + b.x) + (c.x + d.x), (a.y + b.y) + (c.y + d.y), (a.z + b.z) + (c.z + d.z)};
  }
};

}  // namespace flashqla::cuda
