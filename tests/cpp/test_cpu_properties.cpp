// What must hold whatever the numbers are.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "harness/compare.hpp"
#include "harness/parts.hpp"
#include "harness/run.hpp"

namespace flashqla::test {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

Case usual(Op op, DType dtype) {
  Case c = parse_case("T=256 Hq=2 Hv=4 K=32 V=48 initial=1 d_final=1 l2norm=1");
  c.op = op;
  c.dtype = dtype;
  return c;
}

/// Calls test(case, implementation) for every implementation and dtype. The reference carries states in double, so it is held to
/// double problems.
template <class Test>
void for_all(Op op, const Test& test) {
  for (DType dtype : kDTypes) {
    for (const std::string& implementation : cpu_implementations(op, dtype)) test(usual(op, dtype), implementation);
  }
  test(in_double(usual(op, DType::f32)), std::string("reference"));
}

Tensor tensor_of(const std::vector<double>& values, const Tensor& like) {
  Tensor tensor(like.dtype(), like.sizes());
  tensor.set_values(values);
  return tensor;
}

TEST(Properties, ASplitSequenceIsTheWhole) {
  for_all(Op::forward, [](const Case& c, const std::string& implementation) {
    const RunOptions options{implementation, 1};
    const Tensors inputs = make_inputs(c);
    const Values whole = run_case(c, inputs, options);
    for (std::int64_t at : {0, 1, 50, 64, 100, 128, 192, 255, 256}) {
      Part first = token_range(c, inputs, 0, at), second = token_range(c, inputs, at, c.T - at);
      const Values a = run_case(first.c, first.inputs, options);
      second.inputs["initial_state"] = tensor_of(a.at("final_state"), inputs.at("initial_state"));
      const Values b = run_case(second.c, second.inputs, options);
      Values joined = b;
      joined["o"] = a.at("o");
      joined["o"].insert(joined["o"].end(), b.at("o").begin(), b.at("o").end());
      if (at % 64 == 0) {
        EXPECT_EQ(bit_differences(joined, whole), "") << implementation << " split at " << at;
      } else {
        const double recurrence = c.dtype == DType::f32 ? fp32_recurrence_error(c, inputs) : 0;
        EXPECT_EQ(differences(c, inputs, joined, truth(c, inputs), recurrence), "") << implementation << " split at " << at;
      }
    }
  });
}

/// Products with a state that is known to be zero are left out, and so are states that nobody reads: no value may depend on it.
TEST(Properties, AnAbsentStateIsAZeroState) {
  for (Op op : {Op::forward, Op::backward}) {
    for_all(op, [](Case c, const std::string& implementation) {
      for (std::int64_t tokens : {1, 20, 33, 64, 170}) {
        for (bool saved : {false, true}) {
          if (saved && (c.op == Op::forward || implementation == "reference")) continue;
          c.T = tokens;
          c.saved = saved;
          Tensors inputs = make_inputs(c);
          for (const char* name : {"initial_state", "d_final_state"}) {
            if (inputs.contains(name)) inputs.at(name).set_values(std::vector<double>(inputs.at(name).values().size(), 0.0));
          }
          const Values with = run_case(c, inputs, {implementation, 1});
          Case without = c;
          without.initial = without.d_final = without.final = false;
          Tensors fewer = inputs;
          fewer.erase("initial_state");
          fewer.erase("d_final_state");
          for (const auto& [name, values] : run_case(without, fewer, {implementation, 1})) {
            EXPECT_TRUE(values == with.at(name)) << implementation << " " << name << ", " << tokens << " tokens";  // -0 == 0
          }
        }
      }
    });
  }
}

TEST(Properties, DecodingStepByStepIsTheWhole) {
  for_all(Op::recurrent, [](Case c, const std::string& implementation) {
    c.T = 6;
    const RunOptions options{implementation, 1};
    const Tensors inputs = make_inputs(c);
    const Values whole = run_case(c, inputs, options);
    Tensor state = inputs.at("initial_state");
    std::vector<double> o, last;
    for (std::int64_t t = 0; t < c.T; ++t) {
      Part step = token_range(c, inputs, t, 1);
      step.inputs["initial_state"] = state;
      const Values values = run_case(step.c, step.inputs, options);
      o.insert(o.end(), values.at("o").begin(), values.at("o").end());
      last = values.at("final_state");
      state = tensor_of(last, state);
    }
    EXPECT_EQ(bit_differences({{"o", o}, {"final_state", last}}, whole), "") << implementation;
  });
}

TEST(Properties, APackedSequenceIsTheSequenceAlone) {
  for (Op op : {Op::forward, Op::backward, Op::recurrent}) {
    for_all(op, [](const Case& base, const std::string& implementation) {
      Case c = with_lengths(base, {64, 0, 130, 1, 17}, 8);
      if (c.op == Op::recurrent) c = with_lengths(base, {1, 0, 3, 5}, 2);
      const Tensors inputs = make_inputs(c);
      const Values packed = run_case(c, inputs, {implementation, 2});
      for (std::int64_t n = 0; n < c.sequences(); ++n) {
        const Part part = sequence_alone(c, inputs, n);
        Values expected;
        for (const auto& [name, values] : packed) {
          const bool state = name == "final_state" || name == "d_initial_state";
          expected[name] = state ? rows_of(values, c.sequences(), n, 1) : rows_of(values, c.T, c.begin(n), c.length(n));
        }
        EXPECT_EQ(bit_differences(run_case(part.c, part.inputs, {implementation, 1}), expected), "")
            << implementation << " sequence " << n;
      }
    });
  }
}

TEST(Properties, ThreadsAndRepeatsDoNotChangeABit) {
  for (Op op : {Op::forward, Op::backward, Op::recurrent}) {
    for_all(op, [](const Case& base, const std::string& implementation) {
      Case wide = base;
      wide.K = 128;
      wide.V = 200;
      wide.T = 70;
      for (const Case& c : {base, with_lengths(base, {70, 0, 64, 3, 129}, 1), wide}) {
        const Tensors inputs = make_inputs(c);
        const Values one = run_case(c, inputs, {implementation, 1});
        for (int threads : {1, 2, 3, 16}) {
          EXPECT_EQ(bit_differences(run_case(c, inputs, {implementation, threads}), one), "")
              << implementation << threads << to_text(c);
        }
      }
    });
  }
}

TEST(Properties, MoreSequencesDoNotChangeABit) {
  for_all(Op::backward, [](const Case& base, const std::string& implementation) {
    const Case c = with_lengths(base, std::vector<std::int64_t>(9, 40));
    const Tensors inputs = make_inputs(c);
    const Values many = run_case(c, inputs, {implementation, 4});
    const Part alone = sequence_alone(c, inputs, 7);
    const Values one = run_case(alone.c, alone.inputs, {implementation, 4});
    for (const char* name : {"d_q", "d_k", "d_v", "d_g", "d_beta"}) {
      EXPECT_EQ(rows_of(many.at(name), c.T, c.begin(7), 40), one.at(name)) << implementation << name;
    }
  });
}

/// What one implementation saves in its own order is nothing to another.
TEST(Properties, SavedByAnotherImplementationIsComputedAgain) {
  for_all(Op::backward, [](const Case& base, const std::string& implementation) {
    if (implementation == "reference") return;
    Case c = base;
    c.T = 150;
    const Tensors inputs = make_inputs(c);
    const Values alone = run_case(c, inputs, {implementation, 1});
    c.saved = true;
    for (const std::string& other : cpu_implementations(Op::forward, c.dtype)) {
      if (other.substr(0, 10) == implementation.substr(0, 10)) continue;  // the same vectors: it is read
      EXPECT_EQ(bit_differences(run_case(c, inputs, {implementation, 2, other}), alone), "") << implementation << " " << other;
    }
  });
}

/// States go past the caches only to memory on a 64-byte boundary; the numbers are those.
TEST(Properties, SavedMayBeginAtAnyElement) {
  for_all(Op::backward, [](const Case& base, const std::string& implementation) {
    if (implementation == "reference") return;
    for (Case c : {with_lengths(base, {150}), with_lengths(base, {70, 0, 129, 1}, 5)}) {
      const Tensors inputs = make_inputs(c);
      c.saved = true;
      const Values aligned = run_case(c, inputs, {implementation, 1});
      for (const std::int64_t shift : {1, 3, 8}) {
        EXPECT_EQ(bit_differences(run_case(c, inputs, {implementation, 2, {}, shift}), aligned), "")
            << implementation << " " << shift << " " << to_text(c);
      }
    }
  });
}

/// Groups of heads in another order give the same numbers in that order.
TEST(Properties, HeadsArePermutedWithTheirInputs) {
  for (Op op : {Op::forward, Op::backward, Op::recurrent}) {
    for_all(op, [](const Case& base, const std::string& implementation) {
      Case c = base;
      c.T = 70;
      const Tensors inputs = make_inputs(c);
      const Values straight = run_case(c, inputs, {implementation, 1});
      const auto swap_halves = [](const Tensor& tensor, int dim) {
        const std::vector<double> values = tensor.values();
        const std::int64_t half = tensor.sizes()[static_cast<std::size_t>(dim)] / 2;
        Tensor result(tensor.dtype(), tensor.sizes());
        const auto d = static_cast<std::size_t>(dim);
        result.slice(dim, 0, half).set_values(cut(values, tensor.sizes(), d, half, half));
        result.slice(dim, half, half).set_values(cut(values, tensor.sizes(), d, 0, half));
        return result;
      };
      Tensors swapped;
      for (const auto& [name, tensor] : inputs)
        swapped[name] = swap_halves(tensor, name.find("state") != std::string::npos ? 1 : 2);
      Tensors outputs = make_outputs(c, swapped);
      run_case_into(c, swapped, {implementation, 2}, outputs);
      for (const auto& [name, tensor] : outputs) {
        const Tensor back = swap_halves(tensor, name.find("state") != std::string::npos ? 1 : 2);
        EXPECT_EQ(back.values(), straight.at(name)) << implementation << " " << name;
      }
    });
  }
}

/// sum(o do) + sum(S_T dS_T) = sum(v dv) + sum(S_0 dS_0).
TEST(Properties, OutputsAndStatesAreLinearInValuesAndInitialState) {
  for_all(Op::backward, [](const Case& c, const std::string& implementation) {
    for (Data data : {Data::usual, Data::strong_decay, Data::beta_two}) {
      Case backward = c, forward = c;
      backward.data = forward.data = data;
      forward.op = Op::forward;
      backward.f32_gradients = true;
      const Tensors inputs = make_inputs(backward);
      const Values gradients = run_case(backward, inputs, {implementation, 1}),
                   values = run_case(forward, inputs, {implementation, 1});
      double difference = 0, size = 0;
      const auto add = [&](const std::vector<double>& a, const std::vector<double>& b, double sign) {
        for (std::size_t i = 0; i < a.size(); ++i) {
          difference += sign * a[i] * b[i];
          size += a[i] * a[i] * b[i] * b[i];
        }
      };
      add(values.at("o"), inputs.at("d_o").values(), 1);
      add(values.at("final_state"), inputs.at("d_final_state").values(), 1);
      add(inputs.at("v").values(), gradients.at("d_v"), -1);
      add(inputs.at("initial_state").values(), gradients.at("d_initial_state"), -1);
      // Independent relative errors of the terms add up like sqrt(size).
      const double bound = bound_of(c, "d_v", c.dtype, 1e-6);
      EXPECT_LT(std::fabs(difference), 4 * bound * std::sqrt(size)) << implementation << " " << to_text(backward);
    }
  });
}

TEST(Properties, NaNStaysInItsSequence) {
  for (Op op : {Op::forward, Op::backward, Op::recurrent}) {
    for_all(op, [](const Case& base, const std::string& implementation) {
      const Case c = with_lengths(base, {40, 65, 30}, 3);
      const Tensors clean = make_inputs(c);
      const Values expected = run_case(c, clean, {implementation, 2});
      for (const char* name : {"q", "k", "v", "g", "beta", "initial_state", "d_o"}) {
        if (clean.count(name) == 0) continue;
        Tensors inputs = clean;
        Tensor& spoiled = inputs[name] = clean.at(name).clone();
        const bool is_state = std::string(name) == "initial_state";
        const std::int64_t row = spoiled.count() / (is_state ? 3 : c.T);
        spoiled.set(row * (is_state ? 1 : 60) + 1, std::numeric_limits<double>::quiet_NaN());
        for (const auto& [output, values] : run_case(c, inputs, {implementation, 2})) {
          const bool state = output == "final_state" || output == "d_initial_state";
          const std::int64_t rows = state ? 3 : c.T;
          for (std::int64_t n : {0, 2}) {
            const std::int64_t first = state ? n : c.begin(n), length = state ? 1 : c.length(n);
            EXPECT_EQ(rows_of(values, rows, first, length), rows_of(expected.at(output), rows, first, length))
                << implementation << ": NaN in " << name << " is seen in " << output;
          }
        }
      }
    });
  }
}

TEST(Properties, NaNStaysInItsHead) {
  for (Op op : {Op::forward, Op::backward, Op::recurrent}) {
    for_all(op, [](const Case& base, const std::string& implementation) {
      Case c = base;
      c.T = 80;
      const Tensors clean = make_inputs(c);
      const Values expected = run_case(c, clean, {implementation, 1});
      for (const char* name : {"v", "g", "beta", "d_o"}) {
        if (clean.count(name) == 0) continue;
        Tensors inputs = clean;
        Tensor& spoiled = inputs[name] = clean.at(name).clone();
        const std::int64_t row = spoiled.count() / (c.T * c.Hv);
        spoiled.set((37 * c.Hv + 1) * row, std::numeric_limits<double>::quiet_NaN());  // head 1: q/k head 0
        Tensors outputs = make_outputs(c, inputs);
        run_case_into(c, inputs, {implementation, 1}, outputs);
        for (const auto& [output, tensor] : outputs) {
          const std::size_t dim = output.find("state") != std::string::npos ? 1 : 2;
          const std::int64_t heads = tensor.sizes()[dim], first = heads == c.Hv ? 2 : 1;
          EXPECT_EQ(cut(tensor.values(), tensor.sizes(), dim, first, heads - first),
                    cut(expected.at(output), tensor.sizes(), dim, first, heads - first))
              << implementation << ": NaN in " << name << " is seen in " << output;
        }
      }
    });
  }
}

}  // namespace
}  // namespace flashqla::test
