// chunk_forward on the device against the reference in double.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cuda/host/device.hpp"

#include "device/check.hpp"
#include "device/graph.hpp"
#include "harness/parts.hpp"

namespace flashqla::test {
namespace {

TEST(ChunkForward, Lengths) { expect_lengths(parse_case("Hq=1 Hv=2")); }

TEST(ChunkForward, Widths) { expect_widths(parse_case("T=150 Hq=1 Hv=1 initial=1")); }

TEST(ChunkForward, HardData) { expect_hard_data(parse_case("Hq=1 Hv=2 K=128 V=64")); }

TEST(ChunkForward, Options) { expect_option_pairs(Op::forward, forward_options(), 100, with_widths); }

TEST(ChunkForward, Cases) { expect_table_cases(Op::forward, with_widths); }

/// In a pack with many others a block has more columns of V than alone: the shapes give the same bits.
TEST(ChunkForward, APackedSequenceIsTheSequenceAlone) {
  expect_pack_is_its_sequences(parse_case("Hq=2 Hv=4 K=128 V=128 initial=1"), kChunkDTypes, {"o"}, "final_state");
}

TEST(ChunkForward, ASplitSequenceIsTheWhole) {
  expect_split_is_the_whole(parse_case("Hq=1 Hv=2 K=64 V=48 initial=1"), kChunkDTypes);
}

/// Numbers far from 1: growth of e^16 a chunk, tiny and huge queries, scales and strengths. Products are in f16, but nothing may
/// be lost to its range.
TEST(ChunkForward, FarFromOne) {
  const auto times = [](Tensor& x, double factor) {
    for (std::int64_t i = 0; i < x.count(); ++i) x.set(i, x.get(i) * factor);
  };
  for (std::int64_t T : {64, 100, 190}) {
    Case c = parse_case("Hq=1 Hv=2 K=64 V=32 dtype=bf16 initial=1");
    c.T = T;
    const Tensors usual = make_inputs(c);
    for (double factor : {1e-6, 1e-4, 1e6}) {
      for (const char* name : {"q", "v", "beta"}) {
        Tensors inputs = usual;
        inputs[name] = usual.at(name).clone();
        if (std::string(name) == "beta" && factor > 1) continue;
        times(inputs.at(name), factor);
        if (std::string(name) == "v") times(inputs["initial_state"] = usual.at("initial_state").clone(), factor);
        EXPECT_EQ(faults_of(c, inputs), "") << name << " times " << factor;
      }
      Case scaled = c;
      scaled.scale = factor;
      EXPECT_EQ(faults_of(scaled, usual), "");
    }
    for (double growth : {0.1, 0.25, 0.5}) {
      if (growth * static_cast<double>(T) > 60) continue;  // o leaves the range of f32
      Tensors inputs = usual;
      inputs["g"] = usual.at("g").clone();
      inputs.at("g").fill(growth);
      EXPECT_EQ(faults_of(c, inputs), "") << "growth " << growth;
    }
  }
}

void expect_nan_stays(DType dtype) {
  Case c = with_lengths(parse_case("Hq=1 Hv=2 K=64 V=32 initial=1"), {100, 64, 30});
  c.dtype = dtype;
  const Tensors usual = make_inputs(c);
  const Values clean = run_on_cuda(c, usual);
  Tensors inputs = usual;
  inputs["v"] = usual.at("v").clone();
  inputs.at("v").set((110 * 2 + 1) * 32 + 5, std::nan(""));  // sequence 1, value head 1
  const Values values = run_on_cuda(c, inputs);
  for (std::int64_t t = 0; t < c.T; ++t) {
    for (std::int64_t head = 0; head < 2; ++head) {
      if (head == 1 && t >= 100 && t < 164) continue;
      for (std::int64_t i = 0; i < 32; ++i) {
        const auto at = static_cast<std::size_t>((t * 2 + head) * 32 + i);
        EXPECT_EQ(values.at("o")[at], clean.at("o")[at]) << "token " << t << " head " << head;
      }
    }
  }
  for (std::int64_t n = 0; n < 3; ++n) {
    if (n == 1) continue;
    EXPECT_EQ(rows_of(values.at("final_state"), 3, n, 1), rows_of(clean.at("final_state"), 3, n, 1));
  }
}

TEST(ChunkForward, NanStaysInItsHeadAndSequence) {
  for (DType dtype : {DType::bf16, DType::f32}) expect_nan_stays(dtype);
}

/// A pack without sequences: all rows lie past the last offset.
TEST(ChunkForward, RowsOfNoSequenceAreZero) {
  Case c = with_lengths(parse_case("Hq=1 Hv=2 K=64 V=32 dtype=bf16"), {0}, 130);
  const Tensors inputs = make_inputs(c);
  const Values values = run_on_cuda(c, inputs);
  for (double x : values.at("o")) EXPECT_EQ(x, 0);
}

/// Prefixes and offsets that promise more stored states than there are rows for.
TEST(ChunkForward, WrongPrefixesStayInside) {
  Case c = with_lengths(parse_case("Hq=1 Hv=2 K=64 V=64 dtype=bf16 stored=every states_every=64 stored_rows=1 prefix=1"),
                        {64, 36, 100}, 0);
  Tensors inputs = make_inputs(c);
  const std::vector<std::vector<double>> wrong = {{9.2e18, 5, 63}, {-1e18, 4e18, 1e9}, {63, 63, 63}};
  for (const std::vector<double>& prefixes : wrong) {
    Tensors hostile = inputs;
    hostile["prefix_lengths"] = inputs.at("prefix_lengths").clone();
    hostile.at("prefix_lengths").set_values(prefixes);
    Tensors outputs = make_outputs(c, inputs);
    DeviceMover mover;
    RunOptions options{cuda_implementation};
    options.mover = &mover;
    EXPECT_NO_THROW(run_case_into(c, hostile, options, outputs));
  }
}

/// As on a card with 99 KB of shared memory a block.
TEST(ChunkForward, LittleSharedMemory) {
  for (DType dtype : {DType::bf16, DType::f32}) {
    for (std::int64_t K : {64, 128, 256}) {
      for (std::int64_t V : {16, 128}) {
        Case c = parse_case("T=200 Hq=1 Hv=2 initial=1");
        c.dtype = dtype;
        c.K = K;
        c.V = V;
        const Tensors inputs = make_inputs(c);
        setenv("FLASHQLA_CUDA_SHARED_KB", "99", 1);
        const Values small = run_on_cuda(c, inputs);
        EXPECT_EQ(faults_of(c), "");
        unsetenv("FLASHQLA_CUDA_SHARED_KB");
        EXPECT_EQ(bit_differences(small, run_on_cuda(c, inputs)), "") << "K=" << K << " V=" << V;
      }
    }
  }
}

TEST(ChunkForward, AGraphFollowsTheContents) {
  for (const char* dtype : {"bf16", "f32"}) {
    expect_graph_follows(parse_case(std::string("Hq=1 Hv=2 K=64 V=64 initial=1 stored=every states_every=64 dtype=") + dtype));
  }
}

/// Offsets that decrease or lead outside: nothing outside the tensors is touched, and the call ends.
TEST(ChunkForward, WrongOffsetsStayInside) {
  for (DType dtype : {DType::bf16, DType::f32}) {
    Case c = with_lengths(parse_case("Hq=1 Hv=2 K=64 V=64 initial=1"), {64, 36, 100}, 0);
    c.dtype = dtype;
    Tensors inputs = make_inputs(c);
    inputs.at("cu_seqlens").set_values({-50, 900, 100, 1 << 20});
    EXPECT_NO_THROW(run_on_cuda(c, inputs));
  }
}

}  // namespace
}  // namespace flashqla::test
