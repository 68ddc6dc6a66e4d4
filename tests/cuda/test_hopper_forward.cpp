// chunk_forward of Hopper GPUs against the reference in double: what the portable kernels' tests ask, in the sizes that it takes.
#include <gtest/gtest.h>

#include <cmath>

#include "cuda/host/device.hpp"

#include "device/check.hpp"
#include "device/graph.hpp"
#include "harness/parts.hpp"

namespace flashqla::test {
namespace {

constexpr DType kDTypes[] = {DType::bf16, DType::f16};

class HopperForward : public testing::Test {
 protected:
  void SetUp() override {
    ChunkForward d;
    d.problem.dtype = DType::bf16;
    d.problem.heads_v = 16;
    d.problem.device = {DeviceType::cuda, 0};
    for (const ImplementationReport& row : explain(d)) {
      if (row.name == "cuda-hopper" && !row.reason.empty()) GTEST_SKIP() << row.reason;
    }
    cuda_implementation = "cuda-hopper";
  }
};

/// To what the kernels take.
Case with_hopper_widths(Case c) {
  c = with_widths(c);
  c.V = c.V > 128 ? 256 : 128;
  c.K = 128;
  if (c.dtype != DType::f16) c.dtype = DType::bf16;
  return c;
}

TEST_F(HopperForward, Lengths) {
  for (std::int64_t T = 0; T <= 193; ++T) {
    Case c = parse_case("Hq=1 Hv=2 K=128");
    c.T = T;
    c.V = T % 7 == 3 ? 256 : 128;
    c.dtype = kDTypes[T / 2 % 2];
    c.initial = T % 3 == 0;
    c.l2norm = T % 3 == 1;
    c.seed = static_cast<std::uint64_t>(T) + 1;
    EXPECT_EQ(faults_of(c), "");
  }
}

TEST_F(HopperForward, HardData) { expect_hard_data(parse_case("Hq=1 Hv=2 K=128 V=128"), kDTypes); }

TEST_F(HopperForward, Options) { expect_option_pairs(Op::forward, forward_options(), 100, with_hopper_widths); }

TEST_F(HopperForward, Cases) { expect_table_cases(Op::forward, with_hopper_widths); }

TEST_F(HopperForward, APackedSequenceIsTheSequenceAlone) {
  expect_pack_is_its_sequences(parse_case("Hq=2 Hv=4 K=128 V=128 initial=1"), kDTypes, {"o"}, "final_state");
}

TEST_F(HopperForward, ASplitSequenceIsTheWhole) {
  expect_split_is_the_whole(parse_case("Hq=1 Hv=2 K=128 V=128 initial=1"), kDTypes);
}

/// Longer than the ring of stages many times over.
TEST_F(HopperForward, Long) {
  for (const char* lengths : {"T=3000", "T=3000 B=2"}) {
    EXPECT_EQ(faults_of(parse_case(std::string("Hq=1 Hv=2 K=128 V=128 dtype=bf16 initial=1 ") + lengths)), "");
  }
}

/// A NaN in a sequence's rows does not reach the sequences beside it, whose last chunks are copied together with rows of the
/// next.
TEST_F(HopperForward, NanStaysInItsSequence) {
  Case c = with_lengths(parse_case("Hq=1 Hv=2 K=128 V=128 dtype=bf16 initial=1"), {70, 70, 70}, 0);
  Tensors inputs = make_inputs(c);
  const Values clean = run_on_cuda(c, inputs);
  for (const char* name : {"q", "k", "v"}) {
    Tensors poisoned = inputs;
    poisoned[name] = inputs.at(name).clone();
    Tensor& x = poisoned.at(name);
    for (std::int64_t i = x.count() / 3; i < x.count() / 3 * 2; ++i) x.set(i, std::nan(""));
    const Values values = run_on_cuda(c, poisoned);
    for (std::int64_t n : {0, 2}) {
      EXPECT_EQ(rows_of(values.at("o"), c.T, c.begin(n), 70), rows_of(clean.at("o"), c.T, c.begin(n), 70)) << name;
      EXPECT_EQ(rows_of(values.at("final_state"), 3, n, 1), rows_of(clean.at("final_state"), 3, n, 1)) << name;
    }
  }
}

TEST_F(HopperForward, AGraphFollowsTheContents) {
  for (const char* dtype : {"bf16", "f16"}) {
    expect_graph_follows(parse_case(std::string("Hq=1 Hv=2 K=128 V=128 initial=1 stored=every states_every=64 dtype=") + dtype));
  }
}

/// Offsets that decrease or lead outside: nothing outside the tensors is touched, and the call ends.
TEST_F(HopperForward, WrongOffsetsStayInside) {
  Case c = with_lengths(parse_case("Hq=1 Hv=2 K=128 V=128 dtype=bf16 initial=1"), {64, 36, 100}, 0);
  Tensors inputs = make_inputs(c);
  inputs.at("cu_seqlens").set_values({-50, 900, 100, 1 << 20});
  EXPECT_NO_THROW(run_on_cuda(c, inputs));
}

}  // namespace
}  // namespace flashqla::test
