// Faults that users have reported for such kernels, by number: numerics.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "harness/compare.hpp"
#include "harness/parts.hpp"
#include "harness/run.hpp"
#include "harness/tested.hpp"

namespace flashqla::test {
namespace {

constexpr Op kChunkOps[] = {Op::forward, Op::backward};
constexpr Op kAllOps[] = {Op::forward, Op::backward, Op::recurrent};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Runs every cpu implementation on given numbers.
void expect_right(const Case& c, const Tensors& inputs) {
  const double recurrence = c.dtype == DType::f32 ? fp32_recurrence_error(c, inputs) : 0;
  const Values expected = truth(c, inputs);
  for (const std::string& implementation : tested_implementations(c.op, c.dtype)) {
    EXPECT_EQ(differences(c, inputs, run_case(c, inputs, {implementation, 1}), expected, recurrence), "")
        << implementation << " on " << to_text(c);
  }
}

/// g = -A softplus(x + 1), A up to 16, judged per head, in log space, and through A_log and dt_bias (B13).
TEST(Faults, B01_dg_under_strong_decay) {
  for (const char* layout : {"T=300", "lengths=100+37+163", "lengths=64+128+60 slack=48"}) {
    for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (int initial = 0; initial < 2; ++initial) {
        Case c = parse_case(std::string(layout) + " op=backward Hq=2 Hv=6 K=64 V=64 gate=computed l2norm=1");
        c.dtype = dtype;
        c.initial = c.d_final = initial == 1;
        Tensors inputs = make_inputs(c);
        for (std::int64_t h = 0; h < c.Hv; ++h) {
          inputs.at("a_log").set(h, std::log(0.1 + 3.1 * static_cast<double>(h)));
          inputs.at("dt_bias").set(h, 1);
        }
        expect_right(c, inputs);
      }
    }
  }
}

TEST(Faults, B01_dg_of_a_first_token_without_initial_state_is_zero) {
  const Case c = parse_case("op=backward lengths=64+1+65 Hv=2 K=64 V=64 dtype=bf16 data=strong_decay");
  for (const std::string& implementation : tested_implementations(Op::backward, c.dtype)) {
    const std::vector<double> d_g = run_case(c, make_inputs(c), {implementation, 1}).at("d_g");
    for (std::int64_t n = 0; n < c.sequences(); ++n) {
      for (std::int64_t h = 0; h < c.Hv; ++h)
        EXPECT_LT(std::fabs(d_g[static_cast<std::size_t>(c.begin(n) * c.Hv + h)]), 1e-6) << implementation;
    }
  }
}

TEST(Faults, B02_extreme_gates) {
  for (Op op : kAllOps) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      Case c = parse_case("T=130 Hq=1 Hv=2 K=32 V=32 initial=1 d_final=1");
      c.op = op;
      c.dtype = dtype;
      const auto with_gate = [&](auto gate) {
        Tensors inputs = make_inputs(c);
        for (std::int64_t i = 0; i < inputs.at("g").count(); ++i) inputs.at("g").set(i, gate(i / c.Hv));
        expect_right(c, inputs);
      };
      with_gate([](std::int64_t) { return -30.0; });
      with_gate([](std::int64_t t) { return t % 2 == 0 ? 0.0 : -50.0; });
      with_gate([](std::int64_t) { return 0.0; });
      with_gate([](std::int64_t t) { return t == 70 ? -1e4 : -0.1; });
      with_gate([](std::int64_t t) { return t == 70 ? -kInfinity : -0.1; });
      with_gate([](std::int64_t t) { return t % 64 == 0 || t == 63 ? -kInfinity : 0.0; });
      with_gate([](std::int64_t) { return -kInfinity; });
      with_gate([](std::int64_t) { return -1e30; });
    }
  }
}

/// exp(-inf) resets: the rest equals a sequence of its own.
TEST(Faults, B02_forgetting_is_a_fresh_start) {
  for (Op op : {Op::forward, Op::recurrent}) {
    Case c = parse_case("T=100 Hv=2 K=32 V=32 initial=1");
    c.op = op;
    Tensors inputs = make_inputs(c);
    for (std::int64_t h = 0; h < c.Hv; ++h) inputs.at("g").set(41 * c.Hv + h, -kInfinity);
    Part rest = token_range(c, inputs, 41, 59);
    rest.inputs.erase("initial_state");
    const Values expected = truth(rest.c, rest.inputs);
    for (const std::string& implementation : tested_implementations(op, DType::f32)) {
      const Values values = run_case(c, inputs, {implementation, 1});
      EXPECT_LT(relative_rms(rows_of(values.at("o"), c.T, 41, 59), expected.at("o")), 2e-6) << implementation;
      EXPECT_LT(relative_rms(values.at("final_state"), expected.at("final_state")), 2e-6) << implementation;
    }
  }
}

TEST(Faults, B02_no_decay_equals_the_ungated_rule) {
  for (Op op : kAllOps) {
    for (const std::string& implementation : tested_implementations(op, DType::f32)) {
      Case zero = parse_case("T=130 Hv=2 K=32 V=32 data=no_decay initial=1 d_final=1"), none = zero;
      zero.op = none.op = op;
      none.gate = Gate::none;
      Tensors inputs = make_inputs(zero);
      const Values gated = run_case(zero, inputs, {implementation, 1});
      inputs.erase("g");
      for (const auto& [name, values] : run_case(none, inputs, {implementation, 1})) {
        EXPECT_LT(relative_rms(values, gated.at(name)), 1e-6) << implementation << name;
      }
    }
  }
}

TEST(Faults, B04_gate_computed_at_its_ends) {
  for (Op op : kAllOps) {
    Case c = parse_case("T=70 Hq=1 Hv=6 K=32 V=32 gate=computed initial=1 d_final=1");
    c.op = op;
    Tensors inputs = make_inputs(c);
    const double a_log[] = {100, 0, 0, -60, 80, 3}, g[] = {-200, 200, -200, 200, -80, 88};
    for (std::int64_t h = 0; h < c.Hv; ++h) {
      inputs.at("a_log").set(h, a_log[h]);
      inputs.at("dt_bias").set(h, 0);
    }
    for (std::int64_t i = 0; i < inputs.at("g").count(); ++i) {
      if (i / c.Hv % 3 != 0) inputs.at("g").set(i, g[i % c.Hv]);
      if (i / c.Hv % 3 == 0 && i % c.Hv == 0) inputs.at("g").set(i, -102);
    }
    expect_right(c, inputs);
  }
}

/// sigmoid(0.5) must reach the state as 0.62245935, not as its bf16 neighbour.
TEST(Faults, B06_beta_is_not_rounded) {
  for (const std::string& implementation : tested_implementations(Op::recurrent, DType::bf16)) {
    Case c = parse_case("op=recurrent T=1 K=16 V=16 dtype=bf16 gate_dtype=bf16 beta=sigmoid gate=none");
    Tensors inputs = make_inputs(c);
    inputs.at("beta").set(0, 0.5);
    inputs.at("k").fill(0);
    inputs.at("k").set(3, 1);
    inputs.at("v").fill(1);
    const std::vector<double> state = run_case(c, inputs, {implementation, 1}).at("final_state");
    EXPECT_NEAR(state[3 * 16 + 5], 0.62245933, 1e-7) << implementation;
  }
}

/// 1,024 single steps and a chunked prefill of the same tokens end in the same state.
TEST(Faults, B06_decoding_equals_prefill) {
  for (const std::string& implementation : tested_implementations(Op::recurrent, DType::f32)) {
    Case c = parse_case("op=recurrent T=1024 K=16 V=16 gate_dtype=bf16 beta=sigmoid l2norm=1");
    const Tensors inputs = make_inputs(c);
    Case prefill = c;
    prefill.op = Op::forward;
    const Values expected = truth(prefill, inputs);
    Tensor state(DType::f32, {1, 1, 16, 16});
    state.fill(0);
    std::vector<double> o;
    for (std::int64_t t = 0; t < c.T; ++t) {
      Part step = token_range(c, inputs, t, 1);
      step.inputs["initial_state"] = state;
      const Values values = run_case(step.c, step.inputs, {implementation, 1});
      state.set_values(values.at("final_state"));
      o.insert(o.end(), values.at("o").begin(), values.at("o").end());
    }
    EXPECT_LT(relative_rms(o, expected.at("o")), 2e-6) << implementation;
    EXPECT_LT(relative_rms(state.values(), expected.at("final_state")), 2e-6) << implementation;
  }
}

/// eps is added to the sum of squares, forward and backward, at every amplitude.
TEST(Faults, B08_epsilon_of_the_norm) {
  for (Op op : kAllOps) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      Case c = parse_case("T=12 K=128 V=32 l2norm=1 initial=1 d_final=1");
      c.op = op;
      c.dtype = dtype;
      Tensors inputs = make_inputs(c);
      const double amplitudes[] = {1, 0.1, 0.01, 1e-3, 1e-4, 0};
      for (const char* name : {"q", "k"}) {
        std::vector<double> rows = inputs.at(name).values();
        for (std::size_t i = 0; i < rows.size(); ++i) rows[i] *= amplitudes[i / 128 % 6];
        inputs.at(name).set_values(rows);
      }
      expect_right(c, inputs);
      if (op == Op::backward) continue;
      // Token by token, since the small rows vanish in the norm of the whole.
      const Values expected = truth(c, inputs);
      for (const std::string& implementation : tested_implementations(op, dtype)) {
        const Values values = run_case(c, inputs, {implementation, 1});
        for (std::int64_t t = 0; t < c.T; ++t) {
          EXPECT_LE(relative_rms(rows_of(values.at("o"), c.T, t, 1), rows_of(expected.at("o"), c.T, t, 1)),
                    dtype == DType::f32 ? 1e-5 : 1e-2)
              << implementation << " token " << t;
        }
      }
    }
  }
}

TEST(Faults, B11_position_in_a_pack_does_not_change_a_bit) {
  for (Op op : kChunkOps) {
    for (const std::string& implementation : tested_implementations(op, DType::bf16)) {
      Case c = with_lengths(parse_case("Hq=1 Hv=2 K=32 V=32 dtype=bf16 initial=1 d_final=1"), std::vector<std::int64_t>(62, 20));
      c.lengths.back() = 200;
      c = with_lengths(c, c.lengths);
      c.op = op;
      const Tensors inputs = make_inputs(c);
      const Part alone = sequence_alone(c, inputs, 61);
      const Values pack = run_case(c, inputs, {implementation, 3}), again = run_case(c, inputs, {implementation, 2});
      EXPECT_EQ(bit_differences(pack, again), "") << implementation;
      for (const auto& [name, values] : run_case(alone.c, alone.inputs, {implementation, 1})) {
        const bool state = name.find("state") != std::string::npos;
        EXPECT_EQ(rows_of(pack.at(name), state ? 62 : c.T, state ? 61 : c.begin(61), state ? 1 : 200), values)
            << implementation << " " << name;
      }
    }
  }
}

}  // namespace
}  // namespace flashqla::test
