// What the recurrence reads at one token, in double: the gate, beta and row formulas, and their derivatives.
#pragma once

#include <cmath>
#include <limits>

#include "common/arguments.hpp"

namespace flashqla::reference {

/// Hands out pieces of the workspace.
class Scratch {
 public:
  explicit Scratch(std::byte* workspace) : next_(reinterpret_cast<double*>(workspace)) {}
  double* take(std::int64_t count) {
    double* piece = next_;
    next_ += count;
    return piece;
  }

 private:
  double* next_;
};

inline double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }

/// log(sigmoid(x)), exact for large x of either sign.
inline double log_sigmoid(double x) { return std::fmin(x, 0) - std::log1p(std::exp(-std::fabs(x))); }

/// log(softplus(x)). Below -40, softplus(x) = e^x to the last bit of a double.
inline double log_softplus(double x) { return x < -40 ? x : std::log(std::fmax(x, 0) + std::log1p(std::exp(-std::fabs(x)))); }

/// exp(a + b) that is 0 when either factor e^a, e^b is 0, whatever the other.
inline double exp_product(double a, double b) {
  constexpr double kZero = -std::numeric_limits<double>::infinity();
  return a == kZero || b == kZero ? 0 : std::exp(a + b);
}

/// Value head `head` of sequence n. Tokens t count from the start of the sequence; rows go to the caller's buffers.
struct HeadTokens {
  const InputArguments& inputs;
  std::int64_t head;
  std::int64_t batch, begin, length;

  HeadTokens(const InputArguments& inputs_, std::int64_t n, std::int64_t head_)
      : inputs(inputs_),
        head(head_),
        batch(inputs.sequences.batch(n)),
        begin(inputs.sequences.begin(n)),
        length(inputs.sequences.length(n)) {}

  static void load_row(const ConstTokenView& view, std::int64_t batch, std::int64_t token, std::int64_t head, std::int64_t size,
                       double* row) {
    for (std::int64_t d = 0; d < size; ++d) row[d] = view.load(batch, token, head, d);
  }

  /// 1 / |x|, or 1 when the rows are not normalised.
  double inverse_norm(const double* row) const {
    if (!inputs.problem.qk_l2norm) return 1;
    double sum = 0;
    for (std::int64_t d = 0; d < inputs.problem.dim_k; ++d) sum += row[d] * row[d];
    return 1 / std::sqrt(sum + inputs.problem.l2norm_eps);
  }

  /// Returns the factor that has been applied to the row.
  double load_qk(const ConstTokenView& view, std::int64_t t, double* row) const {
    const std::int64_t dim_k = inputs.problem.dim_k;
    load_row(view, batch, begin + t, head / inputs.group, dim_k, row);
    const double factor = inverse_norm(row);
    for (std::int64_t d = 0; d < dim_k; ++d) row[d] *= factor;
    return factor;
  }
  double load_q(std::int64_t t, double* row) const { return load_qk(inputs.q, t, row); }
  double load_k(std::int64_t t, double* row) const { return load_qk(inputs.k, t, row); }
  void load_v(std::int64_t t, double* row) const { load_row(inputs.v, batch, begin + t, head, inputs.problem.dim_v, row); }

  /// Argument of the softplus of Gate::computed.
  double gate_input(std::int64_t t) const {
    return inputs.g.load(batch, begin + t, head) + (inputs.dt_bias.present() ? inputs.dt_bias.load(head) : 0);
  }

  double log_decay(std::int64_t t) const {
    switch (inputs.problem.gate) {
      case Gate::none:
        return 0;
      case Gate::log_decay:
        return inputs.g.load(batch, begin + t, head);
      case Gate::computed:
        return -exp_product(inputs.a_log.load(head), log_softplus(gate_input(t)));
      case Gate::cumulative:
        return inputs.g.load(batch, begin + t, head) - (t % kTokensPerChunk == 0 ? 0 : inputs.g.load(batch, begin + t - 1, head));
    }
    return 0;
  }

  double beta(std::int64_t t) const {
    switch (inputs.problem.beta) {
      case Beta::one:
        return 1;
      case Beta::given:
        return inputs.beta.load(batch, begin + t, head);
      case Beta::sigmoid:
        return sigmoid(inputs.beta.load(batch, begin + t, head));
      case Beta::doubled_sigmoid:
        return 2 * sigmoid(inputs.beta.load(batch, begin + t, head));
    }
    return 0;
  }

  /// d beta / d (beta as given).
  double beta_slope(std::int64_t t) const {
    if (inputs.problem.beta != Beta::sigmoid && inputs.problem.beta != Beta::doubled_sigmoid) return 1;
    const double x = inputs.beta.load(batch, begin + t, head);
    return (inputs.problem.beta == Beta::sigmoid ? 1 : 2) * sigmoid(x) * sigmoid(-x);
  }
};

inline std::int64_t state_size(const Problem& problem) { return problem.dim_k * problem.dim_v; }

/// S [K,V] of `row`, or zero when row is -1.
inline void load_state(const ConstStateView& view, std::int64_t row, std::int64_t head, const Problem& problem, double* S) {
  for (std::int64_t i = 0; i < problem.dim_k; ++i) {
    for (std::int64_t j = 0; j < problem.dim_v; ++j) S[i * problem.dim_v + j] = row < 0 ? 0 : view.load(row, head, i, j);
  }
}

/// Does nothing when row is -1.
inline void store_state(const MutableStateView& view, std::int64_t row, std::int64_t head, const Problem& problem,
                        const double* S) {
  if (row < 0) return;
  for (std::int64_t i = 0; i < problem.dim_k; ++i) {
    for (std::int64_t j = 0; j < problem.dim_v; ++j) view.store(row, head, i, j, S[i * problem.dim_v + j]);
  }
}

/// S <- exp(g) S; e = beta (v - k S); S <- S + k^T e. `next` may be `S`; `error` [V] receives v - k S.
inline void step(const Problem& problem, double decay, double beta, const double* k, const double* v, const double* S,
                 double* next, double* error) {
  const std::int64_t dim_k = problem.dim_k, dim_v = problem.dim_v;
  for (std::int64_t j = 0; j < dim_v; ++j) error[j] = v[j];
  for (std::int64_t i = 0; i < dim_k; ++i) {
    for (std::int64_t j = 0; j < dim_v; ++j) {
      next[i * dim_v + j] = decay * S[i * dim_v + j];
      error[j] -= k[i] * next[i * dim_v + j];
    }
  }
  for (std::int64_t i = 0; i < dim_k; ++i) {
    for (std::int64_t j = 0; j < dim_v; ++j) next[i * dim_v + j] += k[i] * (beta * error[j]);
  }
}

/// Zero the rows [first, last) of one batch entry.
inline void zero_rows(const MutableTokenView& view, std::int64_t batch, std::int64_t first, std::int64_t last, std::int64_t heads,
                      std::int64_t size) {
  if (!view.present()) return;
  for (std::int64_t t = first; t < last; ++t) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t d = 0; d < size; ++d) view.store(batch, t, h, d, 0);
    }
  }
}

}  // namespace flashqla::reference
