// Faults that users have reported for such kernels, by number: B04, decays whose exponential is no normal f32 but may multiply
// numbers so large that the product is one.
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

#include "harness/compare.hpp"
#include "harness/parts.hpp"
#include "harness/run.hpp"
#include "harness/tested.hpp"

namespace flashqla::test {
namespace {

/// The tokens that decay, by `sum` together; all others keep everything.
struct Decay {
  double sum;
  std::int64_t first, count;
};

/// What is multiplied by `size`, which keeps every product of a state and a gradient of its time in range. With a large state
/// nothing is written to it, with a large value only that of token 1 is.
enum class Large : std::uint8_t { state, value, d_final_state };

Tensors large_inputs(const Case& c, const Decay& decay, Large large, double size) {
  Tensors inputs = make_inputs(c);
  const auto scale_all = [&](const char* name, auto factor) {
    std::vector<double> values = inputs.at(name).values();
    for (std::size_t i = 0; i < values.size(); ++i) values[i] *= factor(static_cast<std::int64_t>(i));
    inputs.at(name).set_values(values);
  };
  for (std::int64_t i = 0; i < inputs.at("g").count(); ++i) {
    const bool decays = i / c.Hv >= decay.first && i / c.Hv < decay.first + decay.count;
    inputs.at("g").set(i, decays ? decay.sum / static_cast<double>(decay.count) : 0);
  }
  const auto all = [&](std::int64_t) { return size; };
  if (large == Large::state) scale_all("initial_state", all);
  if (large == Large::d_final_state && c.op == Op::backward) scale_all("d_final_state", all);
  if (large == Large::state) scale_all("v", [](std::int64_t) { return 0.0; });
  if (large == Large::value) scale_all("v", [&](std::int64_t i) { return i / (c.Hv * c.V) == 1 ? size : 0.0; });
  return inputs;
}

/// What is below may count as zero: sums of some thousand products, each of which may lack 2^-126.
constexpr double kNothing = 1e-34;

/// Rows [first, last) of an output, against the usual bounds.
std::string compare_rows(const Case& c, const std::string& name, const std::vector<double>& x, const std::vector<double>& truth,
                         std::int64_t rows, std::int64_t first, std::int64_t last, double bound) {
  const std::vector<double> a = rows_of(x, rows, first, last - first), b = rows_of(truth, rows, first, last - first);
  const double smallest = c.dtype == DType::f16 && rows > 1 ? 0x1p-14 : kNothing;
  double most = 0, most_x = 0;
  for (double y : b) most = std::max(most, std::fabs(y));
  for (double y : a) most_x = std::isfinite(y) ? std::max(most_x, std::fabs(y)) : HUGE_VAL;
  const double error = relative_rms(a, b);
  if (error <= bound || (most < smallest && most_x < smallest)) return "";
  std::ostringstream text;
  text << "  " << name << " rows " << first << " to " << last << ": error " << error << " > " << bound << " of " << most << "\n";
  return text.str();
}

/// Every output, in parts whose numbers are equally large: tokens before those that decay, from the last of them on, and states.
void expect_right(const Case& c, const Decay& decay, Large large, double size) {
  const Tensors inputs = large_inputs(c, decay, large, size);
  const Values expected = truth(c, inputs);
  // A single token's decay is no normal f32, so that a recurrence in f32 is no yardstick.
  const double recurrence = c.dtype == DType::f32 && decay.count > 1 ? fp32_recurrence_error(c, inputs) : 0;
  for (const std::string& implementation : tested_implementations(c.op, c.dtype)) {
    std::string lines;
    for (const auto& [name, x] : run_case(c, inputs, {implementation, 1})) {
      const bool state = name == "stored" || name.find("state") != std::string::npos;
      const double bound = bound_of(c, name, name == "token_states" ? c.state_dtype : state ? DType::f32 : c.dtype, recurrence);
      const std::vector<double>& y = expected.at(name);
      if (state) {
        const std::int64_t states = static_cast<std::int64_t>(y.size()) / (c.Hv * c.K * c.V);
        for (std::int64_t n = 0; n < states; ++n) lines += compare_rows(c, name, x, y, states, n, n + 1, bound);
        continue;
      }
      lines += compare_rows(c, name, x, y, c.T, 0, decay.first, bound);
      lines += compare_rows(c, name, x, y, c.T, decay.first + decay.count - 1, c.T, bound);
    }
    EXPECT_EQ(lines, "") << implementation << " on " << to_text(c) << " with " << decay.sum << " in tokens " << decay.first << "+"
                         << decay.count << ", size " << size << " of " << static_cast<int>(large);
  }
}

/// One token or several, in one chunk of any kernel or over the edge of one.
constexpr Decay kDecays[] = {{0, 0, 1}, {0, 3, 1}, {0, 20, 1}, {0, 63, 1}, {0, 0, 8}, {0, 34, 8}, {0, 12, 24}, {0, 0, 64}};

/// The operations; backward also from what forward saves. K and V of 64, since bf16 dot products are not used for less. Without
/// decay d_g is one number for all tokens: with another seed it may be small against the terms of its sum.
std::vector<Case> far_cases(DType dtype) {
  std::vector<Case> cases;
  for (const char* op : {"op=forward stored=before_chunks", "op=backward", "op=backward saved=1", "op=recurrent"}) {
    cases.push_back(parse_case(std::string(op) + " T=70 K=64 V=64 initial=1 d_final=1 seed=2"));
    cases.back().dtype = dtype;
  }
  return cases;
}

TEST(Faults, B04_decay_below_the_smallest_normal_number) {
  for (const Case& c : far_cases(DType::f32)) {
    for (double sum : {-79, -81, -88, -90, -100, -150, -170}) {
      for (Decay decay : kDecays) {
        decay.sum = sum;
        for (double size : {1e10, 1e35}) expect_right(c, decay, Large::state, size);
        expect_right(c, decay, Large::value, 1e35);
        if (c.op == Op::backward) expect_right(c, decay, Large::d_final_state, 1e35);
      }
    }
  }
}

TEST(Faults, B04_decay_below_the_smallest_normal_number_bf16) {
  for (const Case& c : far_cases(DType::bf16)) {
    for (double sum : {-88, -100, -150}) {
      for (Decay decay : kDecays) {
        decay.sum = sum;
        expect_right(c, decay, Large::state, 1e35);
        if (c.op == Op::backward) expect_right(c, decay, Large::d_final_state, 1e35);
      }
    }
  }
}

/// The first token decays: after it all is in the range of f16.
TEST(Faults, B04_decay_below_the_smallest_normal_number_f16) {
  for (const Case& c : far_cases(DType::f16)) {
    for (double sum : {-81, -88, -90, -100}) expect_right(c, {sum, 0, 1}, Large::state, std::fmin(1e37, std::exp(-sum)));
  }
}

/// With growth too: what is far is the way down from the highest token.
TEST(Faults, B04_decay_after_growth) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (const Case& c : far_cases(dtype)) {
      Tensors inputs = make_inputs(c);
      for (std::int64_t t = 0; t < c.T; ++t)
        inputs.at("g").set(t, t == 5 ? 20 : t == 9 ? -130 : t == 12 ? 20 : t == 40 ? -95 : 0);
      const Values expected = truth(c, inputs);
      for (const std::string& implementation : tested_implementations(c.op, dtype))
        EXPECT_EQ(differences(c, inputs, run_case(c, inputs, {implementation, 1}), expected, 0), "")
            << implementation << to_text(c);
    }
  }
}

/// A step works on the caller's memory, or not, and rounds states that it reads again.
TEST(Faults, B04_decay_of_a_step_in_any_memory) {
  for (const char* line : {"K=64 V=64 pool=in_place", "K=64 V=64 pool=in_place layout=value_key", "K=20 V=36 token_states=1",
                           "K=64 V=64 token_states=1 state=bf16", "K=64 V=64 token_states=1 layout=value_key"}) {
    Case c = parse_case(std::string("op=recurrent T=6 Hv=2 initial=1 ") + line);
    c.K = tested_width(c.K);
    c.V = tested_width(c.V);
    for (std::int64_t token : {0, 3, 5}) expect_right(c, {-95, token, 1}, Large::state, 1e35);
  }
}

}  // namespace
}  // namespace flashqla::test
