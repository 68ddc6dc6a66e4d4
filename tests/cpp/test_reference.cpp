// The reference against cases worked out by hand, and against a second recurrence written on its own.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "harness/compare.hpp"
#include "harness/fp32_recurrence.hpp"
#include "harness/options.hpp"
#include "harness/run.hpp"

namespace flashqla::test {
namespace {

const RunOptions kReference{"reference", 1};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// K = V = 1, one head: every tensor is a list of numbers.
Case scalar_case(Op op, std::int64_t tokens) {
  Case c = in_double(Case{});
  c.op = op;
  c.K = c.V = 1;
  c.T = tokens;
  c.scale = 1.0;
  c.initial = true;
  return c;
}

Tensors scalar_inputs(const Case& c, const std::vector<std::pair<const char*, std::vector<double>>>& values) {
  Tensors inputs = make_inputs(c);
  for (const auto& [name, numbers] : values) inputs.at(name).set_values(numbers);
  return inputs;
}

TEST(Reference, ForwardByHand) {
  const Case c = scalar_case(Op::forward, 2);
  const Tensors inputs = scalar_inputs(
      c, {{"q", {2, 3}}, {"k", {1, 0.5}}, {"v", {4, 1}}, {"g", {std::log(0.5), 0}}, {"beta", {0.5, 1}}, {"initial_state", {8}}});
  // S = 4; e = 0.5 (4 - 4) = 0; S = 4; o = 8.   e = 1 - 2 = -1; S = 4 - 0.5 = 3.5; o = 10.5.
  const Values values = run_case(c, inputs, kReference);
  EXPECT_DOUBLE_EQ(values.at("o")[0], 8);
  EXPECT_DOUBLE_EQ(values.at("o")[1], 10.5);
  EXPECT_DOUBLE_EQ(values.at("final_state")[0], 3.5);
}

TEST(Reference, BackwardByHand) {
  Case c = scalar_case(Op::backward, 1);
  c.d_final = true;
  const Tensors inputs = scalar_inputs(c, {{"q", {2}},
                                           {"k", {0.5}},
                                           {"v", {3}},
                                           {"g", {std::log(0.5)}},
                                           {"beta", {0}},
                                           {"initial_state", {8}},
                                           {"d_o", {1}},
                                           {"d_final_state", {1}}});
  // beta = 0: S = S' = 4, v - k S' = 1; dS = 1 + 2 = 3; de = 1.5; dbeta = 1.5; dv = dk = 0; dq = 4; dg = 3 * 4; dS0 = 1.5.
  const Values values = run_case(c, inputs, kReference);
  EXPECT_DOUBLE_EQ(values.at("d_q")[0], 4);
  EXPECT_DOUBLE_EQ(values.at("d_k")[0], 0);
  EXPECT_DOUBLE_EQ(values.at("d_v")[0], 0);
  EXPECT_DOUBLE_EQ(values.at("d_beta")[0], 1.5);
  EXPECT_DOUBLE_EQ(values.at("d_g")[0], 12);
  EXPECT_DOUBLE_EQ(values.at("d_initial_state")[0], 1.5);
}

TEST(Reference, ForgettingIsAFreshStart) {
  Case c = scalar_case(Op::backward, 2);
  const Tensors inputs = scalar_inputs(c, {{"q", {1, 1}},
                                           {"k", {1, 1}},
                                           {"v", {5, 7}},
                                           {"g", {0, -kInfinity}},
                                           {"beta", {1, 1}},
                                           {"initial_state", {8}},
                                           {"d_o", {0, 1}}});
  const Values gradients = run_case(c, inputs, kReference);
  EXPECT_EQ(gradients.at("d_g"), (std::vector<double>{0, 0}));
  EXPECT_EQ(gradients.at("d_v"), (std::vector<double>{0, 1}));
  c.op = Op::forward;
  EXPECT_EQ(run_case(c, inputs, kReference).at("o"), (std::vector<double>{5, 7}));
}

TEST(Reference, ComputedGateIsExactAtBothEnds) {
  Case c = scalar_case(Op::forward, 1);
  c.gate = Gate::computed;
  c.gate_dtype = DType::f64;
  const auto log_decay = [&](double a_log, double g) {
    c.extras = true;
    const Tensors inputs = scalar_inputs(c, {{"g", {g}}, {"dt_bias", {0}}, {"a_log", {a_log}}});
    return run_case(c, inputs, kReference).at("g_cumulative")[0];
  };
  EXPECT_NEAR(log_decay(0, 0), -std::log(2.0), 1e-15);
  EXPECT_DOUBLE_EQ(log_decay(0, 50), -50);
  EXPECT_NEAR(log_decay(100, -200) / -std::exp(-100.0), 1, 1e-13);
  EXPECT_NEAR(log_decay(0, -200) / -std::exp(-200.0), 1, 1e-13);
  EXPECT_NEAR(log_decay(0, -30) / -std::log1p(std::exp(-30.0)), 1, 1e-13);
  EXPECT_EQ(log_decay(1000, -1e9), 0);
  EXPECT_EQ(log_decay(kInfinity, -kInfinity), 0);
  EXPECT_EQ(log_decay(-kInfinity, kInfinity), 0);
  EXPECT_EQ(log_decay(1000, 0), -128);  // clamped in g_cumulative
  EXPECT_TRUE(std::isnan(log_decay(std::nan(""), 0)));
}

TEST(Reference, ComputedGateHasFiniteGradientsAtBothEnds) {
  Case c = scalar_case(Op::backward, 1);
  c.gate = Gate::computed;
  for (const auto& [a_log, g] :
       {std::pair{100.0, -200.0}, {800.0, -700.0}, {800.0, 5.0}, {0.0, -1e6}, {-800.0, 1e6}, {kInfinity, 1.0}}) {
    const Tensors inputs = scalar_inputs(c, {{"g", {g}}, {"dt_bias", {0}}, {"a_log", {a_log}}});
    for (const auto& [name, gradient] : run_case(c, inputs, kReference)) EXPECT_TRUE(std::isfinite(gradient[0])) << name << a_log;
  }
}

TEST(Reference, AgreesWithASecondRecurrence) {
  for (Case c : pairwise({}, forward_options(), 5)) {
    if (c.data == Data::growth) continue;
    c = in_double(c);
    const Tensors inputs = in_double(make_inputs(c));
    const Values values = run_case(c, inputs, kReference);
    std::vector<double> o, states;
    double_recurrence(c, inputs, o, states);
    std::vector<double> used;
    for (std::int64_t b = 0; b < c.B; ++b) {
      for (std::int64_t i = 0; i < c.T * c.Hv * c.V; ++i) {
        const double x = values.at("o")[static_cast<std::size_t>(b * c.T * c.Hv * c.V + i)];
        if (i < c.used() * c.Hv * c.V) {
          used.push_back(x);
        } else {
          EXPECT_EQ(x, 0) << "slack row";
        }
      }
    }
    if (c.pool == Pool::none) {
      EXPECT_LT(relative_rms(used, o), 1e-13) << to_text(c);
    }
  }
}

/// A (I + stril(beta k k^T)) = I.
TEST(Reference, AIsTheInverse) {
  Case c = in_double(parse_case("T=100 Hq=1 Hv=2 K=8 extras=1"));
  const Tensors inputs = make_inputs(c);
  const std::vector<double> a = run_case(c, inputs, kReference).at("a");
  const auto key_dot = [&](std::int64_t i, std::int64_t j) {
    double dot = 0;
    for (std::int64_t d = 0; d < c.K; ++d) dot += inputs.at("k").get(i * c.K + d) * inputs.at("k").get(j * c.K + d);
    return dot;
  };
  for (std::int64_t h = 0; h < c.Hv; ++h) {
    for (std::int64_t t = 0; t < c.T; ++t) {
      const std::int64_t first = t / 64 * 64;
      for (std::int64_t column = 0; column < 64; ++column) {
        double sum = 0;
        for (std::int64_t j = 0; j < 64; ++j) {
          const double element = a[static_cast<std::size_t>((t * c.Hv + h) * 64 + j)];
          if (j > t - first) {
            EXPECT_EQ(element, 0);
          }
          if (first + j >= c.T) continue;
          const double beta = inputs.at("beta").get((first + j) * c.Hv + h);
          sum += element * (j == column ? 1 : column < j ? beta * key_dot(first + j, first + column) : 0);
        }
        EXPECT_NEAR(sum, column == t - first ? 1 : 0, 1e-13);
      }
    }
  }
}

}  // namespace
}  // namespace flashqla::test
