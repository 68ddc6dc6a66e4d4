// Chunks of f32 and bf16 in which a decay below e^-80 meets a state, or a gradient of one, so large that they are walked token by
// token.
#include <gtest/gtest.h>

#include "device/check.hpp"
#include "harness/parts.hpp"

namespace flashqla::test {
namespace {

constexpr double kFar = -95;  // e^-95 has 12 bits as a f32

/// The first token of every sequence decays by e^-95, and what comes before it is so large that it counts as much as the rest.
void make_far(const Case& c, Tensors& inputs) {
  const std::int64_t decaying = c.gate == Gate::cumulative ? kTokensPerChunk : 1;  // tokens that it shows in
  for (std::int64_t n = 0; n < c.sequences(); ++n) {
    const std::int64_t first = c.packed() ? c.begin(n) : n * c.T;
    for (std::int64_t i = first * c.Hv; i < (first + std::min(decaying, c.length(n))) * c.Hv; ++i) {
      inputs.at("g").set(i, inputs.at("g").get(i) + kFar);
    }
  }
}
/// Elements of a tensor, of `columns` columns of its last dimension's V, times a factor.
void scale_columns(Tensor& x, double factor, std::int64_t width, std::int64_t first, std::int64_t last) {
  std::vector<double> values = x.values();
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::int64_t column = static_cast<std::int64_t>(i) % width;
    if (column >= first && column < last) values[i] *= factor;
  }
  x.set_values(values);
}
void scale_all(Tensor& x, double factor) { scale_columns(x, factor, 1, 0, 1); }

/// All but the gradients that the decay takes below the smallest normal number.
std::string faults_but(const Case& c, const Tensors& inputs, const std::string& output) {
  Values expected = truth(c, inputs);
  expected.erase(output);
  const std::string lines = differences(c, inputs, run_on_cuda(c, inputs), expected, fp32_recurrence_error(c, inputs));
  return lines.empty() ? "" : to_text(c) + "\n" + lines;
}

constexpr const char* kOptions[] = {"T=150 Hv=3 K=144 V=80",
                                    "T=64 K=256 V=128 l2norm=1",
                                    "T=130 Hq=2 Hv=4 K=64 V=48 layout=value_key beta=sigmoid",
                                    "T=130 K=32 V=16 gate=cumulative",
                                    "lengths=100+1+64+0+30 slack=9 Hv=2 K=64 V=64 l2norm=1",
                                    "B=2 T=70 Hv=2 K=48 V=32 strides=transposed"};

TEST(FarDecays, LargeStates) {
  for (const char* op : {"op=forward", "op=backward d_final=1", "dtype=bf16 op=forward", "dtype=bf16 op=backward d_final=1"}) {
    for (const char* options : kOptions) {
      const Case c = parse_case(std::string(op) + " initial=1 " + options);
      if (c.op == Op::forward && c.gate == Gate::cumulative) continue;  // not taken
      Tensors inputs = make_inputs(c);
      make_far(c, inputs);
      scale_all(inputs.at("initial_state"), 1e36);
      scale_all(inputs.at("v"), 1e-5);
      EXPECT_EQ(faults_but(c, inputs, "d_initial_state"), "");
    }
  }
}

/// Walked heads beside others in a group of more than a block has the gates of together.
TEST(FarDecays, LargeStatesOfSomeHeads) {
  for (const char* options : {"T=100 Hv=6 K=64 V=80", "T=70 Hv=3 K=256 V=32 l2norm=1", "T=70 Hv=5 K=32 V=16"}) {
    const Case c = parse_case(std::string("op=backward d_final=1 initial=1 dtype=bf16 ") + options);
    Tensors inputs = make_inputs(c);
    for (std::int64_t head = 1; head < c.Hv; head += 2) inputs.at("g").set(head, kFar);
    std::vector<double> states = inputs.at("initial_state").values();
    for (std::size_t i = 0; i < states.size(); ++i) {
      if (static_cast<std::int64_t>(i) / (c.K * c.V) % 2 == 1) states[i] *= 1e36;
    }
    inputs.at("initial_state").set_values(states);
    EXPECT_EQ(faults_but(c, inputs, "d_initial_state"), "");
  }
}

TEST(FarDecays, LargeStatesOfPrefixesAndPools) {
  for (const char* options :
       {"lengths=100+30+64 stored=every states_every=64 prefix=1", "lengths=100+30+64 pool=separate state=bf16"}) {
    const Case c = parse_case(std::string("Hv=2 K=64 V=64 initial=1 ") + options);
    Tensors inputs = make_inputs(c);
    make_far(c, inputs);
    scale_all(inputs.at("initial_state"), 1e36);
    scale_all(inputs.at("v"), 1e-5);
    EXPECT_EQ(faults_of(c, inputs), "");
  }
}

TEST(FarDecays, LargeGradients) {
  for (const char* dtype : {"f32", "bf16"}) {
    for (const char* options : kOptions) {
      const Case c = parse_case(std::string("op=backward d_final=1 initial=1 dtype=") + dtype + " " + options);
      Tensors inputs = make_inputs(c);
      make_far(c, inputs);
      for (const char* name : {"d_o", "d_final_state"}) scale_all(inputs.at(name), 1e33);
      EXPECT_EQ(faults_of(c, inputs), "");
    }
  }
}

/// Alone a sequence has narrower slabs of V than in a pack of many. Some columns are walked, and that shows in no other.
TEST(FarDecays, TheSameBitsInEverySlab) {
  for (const char* op : {"op=forward", "op=backward d_final=1"}) {
    std::vector<std::int64_t> lengths = {64, 0, 130, 1, 17};
    lengths.resize(24, 70);
    const Case c = with_lengths(parse_case(std::string(op) + " Hq=1 Hv=2 K=64 V=128 initial=1"), lengths, 70);
    Tensors inputs = make_inputs(c);
    make_far(c, inputs);
    const Values usual = run_on_cuda(c, inputs);
    scale_columns(inputs.at("initial_state"), 1e36, c.V, 40, 60);
    const Values packed = run_on_cuda(c, inputs);
    if (c.op == Op::forward) {
      for (std::size_t i = 0; i < usual.at("o").size(); ++i) {
        if (i % 128 / 32 == 1) continue;
        ASSERT_EQ(packed.at("o")[i], usual.at("o")[i]) << "element " << i;
      }
    }
    for (std::int64_t n = 0; n < 6; ++n) {
      const Part part = sequence_alone(c, inputs, n);
      Values expected;
      for (const auto& [name, x] : run_on_cuda(part.c, part.inputs)) {
        const bool state = name.find("state") != std::string::npos;
        expected[name] =
            state ? rows_of(packed.at(name), c.sequences(), n, 1) : rows_of(packed.at(name), c.T, c.begin(n), c.length(n));
        EXPECT_EQ(bit_differences({{name, x}}, {{name, expected[name]}}), "") << to_text(c) << ", sequence " << n;
      }
    }
  }
}

}  // namespace
}  // namespace flashqla::test
