// The reference's gradients against central differences of the reference's own forward operation, in double, over all options.
#include <gtest/gtest.h>

#include <cmath>

#include "harness/compare.hpp"
#include "harness/options.hpp"
#include "harness/run.hpp"

namespace flashqla::test {
namespace {

const RunOptions kReference{"reference", 1};

/// <o, d_o> + <final state, d_final_state>, over the rows that belong to a sequence.
double loss(const Case& backward, const Tensors& inputs) {
  Case c = backward;
  c.op = Op::forward;
  const Values values = run_case(c, inputs, kReference);
  double sum = 0;
  const auto add = [&](const char* gradient, const char* output) {
    if (inputs.count(gradient) == 0) return;
    const std::vector<double> weight = inputs.at(gradient).values();
    for (std::size_t i = 0; i < weight.size(); ++i) {
      if (!std::isnan(weight[i])) sum += weight[i] * values.at(output)[i];
    }
  };
  add("d_o", "o");
  add("d_final_state", "final_state");
  return sum;
}

std::vector<double> central_differences(const Case& c, const Tensors& inputs, const std::string& name) {
  constexpr double kStep = 1e-5;
  std::vector<double> result;
  const Tensor& original = inputs.at(name);
  for (std::int64_t i = 0; i < original.count(); ++i) {
    const double x = original.get(i);
    if (!std::isfinite(x)) {  // a row of no sequence, or a decay to nothing
      result.push_back(0);
      continue;
    }
    Tensors moved = inputs;
    moved[name] = original.clone();
    moved[name].set(i, x + kStep);
    const double up = loss(c, moved);
    moved[name].set(i, x - kStep);
    result.push_back((up - loss(c, moved)) / (2 * kStep));
  }
  return result;
}

void expect_gradients(const Case& c) {
  const Tensors inputs = in_double(make_inputs(c));
  const Values values = run_case(c, inputs, kReference);
  for (const auto& [name, gradient] : values) {
    const std::string input = name.substr(2);
    EXPECT_LT(relative_rms(gradient, central_differences(c, inputs, input)), 2e-7) << name << " of " << to_text(c);
  }
}

/// Small enough for two forward runs per input element.
Case small(Case c) {
  c = in_double(c);
  c.K = 3;
  c.V = 2;
  c.Hq = c.Hv > c.Hq ? 1 : 2;
  c.Hv = 2;
  if (c.packed()) return with_lengths(c, {3, 0, 2, 1}, 2);
  c.T = 4;
  c.B = std::min<std::int64_t>(c.B, 2);
  return c;
}

TEST(ReferenceGradient, EqualsCentralDifferencesForEveryPairOfOptions) {
  Case base;
  base.op = Op::backward;
  for (const Case& c : pairwise(base, backward_options(), 11)) {
    // The forward operation does not take cumulative gates, and differences of a function with a kink at forgotten states mean
    // nothing.
    if (c.gate == Gate::cumulative) continue;
    expect_gradients(small(c));
  }
}

TEST(ReferenceGradient, EqualsCentralDifferencesAcrossBlocks) {
  Case c = parse_case("op=backward K=2 V=2 T=131 Hq=1 Hv=2 initial=1 d_final=1 dtype=f64 gate_dtype=f64 state=f64");
  expect_gradients(c);
}

TEST(ReferenceGradient, OfCumulativeGatesIsThatOfTheirDifferences) {
  for (const char* text : {"op=backward T=70 K=3 V=2 B=2 initial=1", "op=backward lengths=65+0+3 slack=2 K=3 V=2 d_final=1"}) {
    Case c = in_double(parse_case(text));
    Tensors inputs = in_double(make_inputs(c));
    const Values expected = run_case(c, inputs, kReference);
    const std::vector<double> g = inputs.at("g").values();
    std::vector<double> sums = g;
    for (std::int64_t n = 0; n < c.sequences(); ++n) {
      const std::int64_t first = n * (c.packed() ? 0 : c.T) + c.begin(n);
      for (std::int64_t t = 0; t < c.length(n); ++t) {
        if (t % 64 != 0) sums[static_cast<std::size_t>(first + t)] += sums[static_cast<std::size_t>(first + t - 1)];
      }
    }
    inputs["g"].set_values(sums);
    c.gate = Gate::cumulative;
    for (const auto& [name, gradient] : run_case(c, inputs, kReference)) {
      EXPECT_LT(relative_rms(gradient, expected.at(name)), 1e-12) << name;
    }
  }
}

}  // namespace
}  // namespace flashqla::test
