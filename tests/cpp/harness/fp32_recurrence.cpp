#include "harness/fp32_recurrence.hpp"

#include <algorithm>
#include <cmath>

#include "harness/compare.hpp"

namespace flashqla::test {

namespace {

double softplus(double x) { return std::fmax(x, 0) + std::log1p(std::exp(-std::fabs(x))); }

/// Gates and beta in double, everything else in Real.
template <class Real>
class Recurrence {
 public:
  Recurrence(const Case& c, const Tensors& inputs) : c_(c), inputs_(inputs) {}

  /// o of every row that belongs to a sequence, and the last states.
  void run(std::vector<double>& o, std::vector<double>& states) {
    o.assign(static_cast<std::size_t>(c_.B * c_.used() * c_.Hv * c_.V), 0);
    for (std::int64_t n = 0; n < c_.sequences(); ++n) {
      const std::int64_t first = (c_.packed() ? 0 : n * c_.T) + c_.begin(n);  // without packing there is no slack
      for (std::int64_t h = 0; h < c_.Hv; ++h) {
        std::vector<Real> S = initial_state(n, h);
        for (std::int64_t t = 0; t < c_.length(n); ++t) token(first, t, h, S, o);
        states.insert(states.end(), S.begin(), S.end());
      }
    }
  }

 private:
  double value(const char* name, std::int64_t index) const { return inputs_.at(name).get(index); }

  std::vector<Real> initial_state(std::int64_t n, std::int64_t h) const {
    const std::int64_t size = c_.K * c_.V;
    std::vector<Real> S(static_cast<std::size_t>(size), Real(0));
    std::int64_t row = n;
    if (inputs_.count("initial_state") == 0) return S;
    if (inputs_.count("accepted") > 0) {
      row = static_cast<std::int64_t>(value("read", n * c_.drafts + static_cast<std::int64_t>(value("accepted", n)) - 1));
    } else if (inputs_.count("read") > 0) {
      row = static_cast<std::int64_t>(value("read", n));
    }
    if (row < 0) return S;
    for (std::int64_t i = 0; i < size; ++i) {
      const std::int64_t at = c_.layout == StateLayout::key_value ? i : i % c_.V * c_.K + i / c_.V;
      S[static_cast<std::size_t>(i)] = static_cast<Real>(value("initial_state", (row * c_.Hv + h) * size + at));
    }
    return S;
  }

  double log_decay(std::int64_t first, std::int64_t t, std::int64_t h) const {
    if (c_.gate == Gate::none) return 0;
    const double g = value("g", (first + t) * c_.Hv + h);
    if (c_.gate == Gate::computed) {
      return -std::exp(value("a_log", h)) * softplus(g + (inputs_.count("dt_bias") > 0 ? value("dt_bias", h) : 0));
    }
    if (c_.gate == Gate::cumulative) return t % kTokensPerChunk == 0 ? g : g - value("g", (first + t - 1) * c_.Hv + h);
    return g;
  }

  double beta(std::int64_t at) const {
    if (c_.beta == Beta::one) return 1;
    const double x = value("beta", at);
    if (c_.beta == Beta::given) return x;
    return (c_.beta == Beta::sigmoid ? 1 : 2) / (1 + std::exp(-x));
  }

  std::vector<Real> row(const char* name, std::int64_t at, std::int64_t size, bool normalise) const {
    std::vector<Real> x(static_cast<std::size_t>(size));
    Real sum = 0;
    for (std::int64_t d = 0; d < size; ++d) {
      Real& element = x[static_cast<std::size_t>(d)];
      element = static_cast<Real>(value(name, at * size + d));
      sum += element * element;
    }
    if (!normalise) return x;
    const Real factor = 1 / std::sqrt(sum + static_cast<Real>(1e-6));
    for (Real& element : x) element *= factor;
    return x;
  }

  void token(std::int64_t first, std::int64_t t, std::int64_t h, std::vector<Real>& S, std::vector<double>& o) const {
    const std::int64_t at = (first + t) * c_.Hv + h, at_qk = (first + t) * c_.Hq + h / (c_.Hv / c_.Hq);
    const auto K = static_cast<std::size_t>(c_.K), V = static_cast<std::size_t>(c_.V);
    const auto q = row("q", at_qk, c_.K, c_.l2norm), k = row("k", at_qk, c_.K, c_.l2norm);
    auto e = row("v", at, c_.V, false);
    const Real decay = static_cast<Real>(std::exp(log_decay(first, t, h))), strength = static_cast<Real>(beta(at));
    const Real scale = static_cast<Real>(c_.scale ? *c_.scale : 1 / std::sqrt(static_cast<double>(c_.K)));
    for (std::size_t i = 0; i < K; ++i) {
      for (std::size_t j = 0; j < V; ++j) {
        S[i * V + j] *= decay;
        e[j] -= k[i] * S[i * V + j];
      }
    }
    std::vector<Real> row_o(V, Real(0));
    for (std::size_t i = 0; i < K; ++i) {
      for (std::size_t j = 0; j < V; ++j) {
        S[i * V + j] += k[i] * (strength * e[j]);
        row_o[j] += q[i] * S[i * V + j];
      }
    }
    for (std::size_t j = 0; j < V; ++j) o[static_cast<std::size_t>(at) * V + j] = static_cast<double>(scale * row_o[j]);
  }

  const Case& c_;
  const Tensors& inputs_;
};

}  // namespace

void double_recurrence(const Case& c, const Tensors& inputs, std::vector<double>& o, std::vector<double>& states) {
  Recurrence<double>(c, inputs).run(o, states);
}

double fp32_recurrence_against_double(const Case& c, const Tensors& inputs) {
  std::vector<double> o_float, states_float, o_double, states_double;
  Recurrence<float>(c, inputs).run(o_float, states_float);
  Recurrence<double>(c, inputs).run(o_double, states_double);
  return std::max(relative_rms(o_float, o_double), relative_rms(states_float, states_double));
}

}  // namespace flashqla::test
