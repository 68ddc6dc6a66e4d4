// Decay and beta of a run of tokens of one value head. Included inside an instruction set's namespace, after math.inl.
#pragma once

#include "cpu/kernels/far_decay.inl"
#include "cpu/kernels/math.inl"

/// Raw log decays are raised to this at least, so that -inf (forget all) leaves differences of cumulative sums defined. Its
/// exponential is 0 anyway.
inline constexpr double kLeastDecay = -1000.0;

/// n elements of one head, dtype f32, bf16 or f16, a token apart, as f32.
inline void load_tokens(const ConstTokenView& view, std::int64_t batch, std::int64_t token, std::int64_t head, std::int64_t n,
                        float* out) {
  const std::byte* first = view.row(batch, token, head);
  const std::int64_t stride = view.stride_token;
  if (view.dtype == DType::f32) {
    const float* p = reinterpret_cast<const float*>(first);
    for (std::int64_t i = 0; i < n; ++i) out[i] = p[i * stride];
  } else {
    const std::uint16_t* p = reinterpret_cast<const std::uint16_t*>(first);
    for (std::int64_t i = 0; i < n; ++i)
      out[i] = view.dtype == DType::bf16 ? bf16_to_float(p[i * stride]) : f16_to_float(p[i * stride]);
  }
}

/// Raw log decay of n <= 64 tokens, in double and at least kLeastDecay; with Gate::cumulative differences of what is given.
/// `position` is the first token's in its sequence. `out` has room for 64.
inline void load_decays(const InputArguments& in, std::int64_t batch, std::int64_t token, std::int64_t position,
                        std::int64_t head, std::int64_t n, double* out) {
  alignas(64) float g[64];
  if (in.problem.gate == Gate::none) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = 0.0;
    return;
  }
  load_tokens(in.g, batch, token, head, n, g);
  switch (in.problem.gate) {
    case Gate::log_decay:
    case Gate::none:
      for (std::int64_t i = 0; i < n; ++i) out[i] = static_cast<double>(g[i]);
      break;
    case Gate::cumulative: {
      double before = position % kTokensPerChunk == 0 ? 0.0 : in.g.load(batch, token - 1, head);
      for (std::int64_t i = 0; i < n; ++i) {
        if ((position + i) % kTokensPerChunk == 0) before = 0.0;
        out[i] = static_cast<double>(g[i]) - before;
        before = static_cast<double>(g[i]);
      }
      break;
    }
    case Gate::computed: {
      const double a_log = in.a_log.load(head), rate = __builtin_exp(a_log);
      const float bias = in.dt_bias.present() ? static_cast<float>(in.dt_bias.load(head)) : 0.0f;
      alignas(64) float smooth[64];
      for (std::int64_t i = n; i < (n + kWidth - 1) / kWidth * kWidth; ++i) g[i] = 0.0f;
      for (std::int64_t i = 0; i < n; i += kWidth) {
        const Vec x = add(load(g + i), set1(bias));
        store(g + i, x);
        store(smooth + i, softplus(x));
      }
      for (std::int64_t i = 0; i < n;
           ++i) {  // far below 0 softplus is e^x: one exponential of the sum cannot become infinity times 0
        const double x = static_cast<double>(g[i]);
        out[i] = x < -80.0 ? -__builtin_exp(a_log + x) : -rate * static_cast<double>(smooth[i]);
      }
      break;
    }
  }
  for (std::int64_t i = 0; i < n; ++i) out[i] = out[i] < kLeastDecay ? kLeastDecay : out[i];
}

/// beta of n <= 64 tokens as the operation uses it. `out` has room for 64.
inline void load_betas(const InputArguments& in, std::int64_t batch, std::int64_t token, std::int64_t head, std::int64_t n,
                       float* out) {
  if (in.problem.beta == Beta::one) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = 1.0f;
    return;
  }
  load_tokens(in.beta, batch, token, head, n, out);
  if (in.problem.beta == Beta::given) return;
  const Vec factor = set1(in.problem.beta == Beta::doubled_sigmoid ? 2.0f : 1.0f);
  for (std::int64_t i = n; i < (n + kWidth - 1) / kWidth * kWidth; ++i) out[i] = 0.0f;
  for (std::int64_t i = 0; i < n; i += kWidth) store(out + i, mul(factor, sigmoid(load(out + i))));
}

/// Gates of one chunk of at most kTokens tokens of one value head. Token i has seen the decay of tokens 0..i of the chunk. Past
/// the chunk's n tokens beta is 0 and the cumulative decay stays what it was, so that entry kTokens - 1 is the chunk's total.
template <int kTokens>
struct ChunkGates {
  alignas(64) float high[kTokens],
      low[kTokens];  // the cumulative log decay is their sum: differences keep their digits under strong decay
  alignas(64) float beta[kTokens];
  alignas(64) float decay[kTokens];  // e^(cumulative): from the chunk's start to the token
  alignas(64) float rest[kTokens];   // e^(total - cumulative): from the token to the chunk's end
  float total;                       // decay[kTokens - 1]
  /// Whether some decay inside the chunk is far (far_decay.inl). Then what `decay`, `rest` and `total` multiply is to be
  /// multiplied by these too, which are 1 where the factor is not far, and decays between tokens have a far part. Else the arrays
  /// are not set.
  bool far;
  alignas(64) float decay_again[kTokens], rest_again[kTokens];
  float total_again;
};

template <int kTokens>
inline void prepare_gates(const InputArguments& in, std::int64_t batch, std::int64_t token, std::int64_t position,
                          std::int64_t head, std::int64_t n, ChunkGates<kTokens>& out) {
  double raw[64];
  load_decays(in, batch, token, position, head, n, raw);
  load_betas(in, batch, token, head, n, out.beta);
  double cumulative = 0.0, highest = 0.0, deepest = 0.0;
  for (std::int64_t i = 0; i < kTokens; ++i) {
    if (i < n) {
      cumulative += raw[i];
      highest = cumulative > highest ? cumulative : highest;
      deepest = cumulative - highest < deepest ? cumulative - highest : deepest;
    } else {
      out.beta[i] = 0.0f;
    }
    out.high[i] = static_cast<float>(cumulative);
    out.low[i] = static_cast<float>(cumulative - static_cast<double>(out.high[i]));
  }
  out.far = deepest < static_cast<double>(kFarDecay);
  const Decay end{set1(out.high[kTokens - 1]), set1(out.low[kTokens - 1])};
  for (int i = 0; i < kTokens; i += kWidth) {
    const Decay decay{load(out.high + i), load(out.low + i)}, rest = difference(end, decay);
    if (out.far) {
      store_factors(decay, out.decay + i, out.decay_again + i);
      store_factors(rest, out.rest + i, out.rest_again + i);
    } else {
      store(out.decay + i, exp_sum(decay.high, decay.low));
      store(out.rest + i, exp_sum(rest.high, rest.low));
    }
  }
  out.total = out.decay[kTokens - 1];
  out.total_again = out.far ? out.decay_again[kTokens - 1] : 1.0f;
}

/// e^(cumulative_i - cumulative_j) for kWidth columns j from j0 on; the caller masks j > i, where it may be infinite.
template <int kTokens>
FLASHQLA_INLINE Vec decay_between(const ChunkGates<kTokens>& gates, int i, int j0) {
  const Vec high = sub(set1(gates.high[i]), load(gates.high + j0));
  const Vec low = sub(set1(gates.low[i]), load(gates.low + j0));
  return exp(add(high, low));
}
