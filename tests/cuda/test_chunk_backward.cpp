// chunk_backward on the device against the reference in double.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "device/check.hpp"
#include "harness/parts.hpp"

namespace flashqla::test {
namespace {

const char* const kTokenGradients[] = {"d_q", "d_k", "d_v", "d_g", "d_beta"};

/// The case as the kernels take it.
Case taken(Case c) {
  c = with_widths(c);
  c.saved = false;
  return c;
}
Case backward_case(const std::string& text) { return parse_case("op=backward " + text); }

TEST(ChunkBackward, Lengths) { expect_lengths(backward_case("Hq=1 Hv=2")); }

TEST(ChunkBackward, Widths) { expect_widths(backward_case("T=150 Hq=1 Hv=1 initial=1 d_final=1")); }

TEST(ChunkBackward, HardData) { expect_hard_data(backward_case("Hq=1 Hv=2 K=128 V=64 d_final=1")); }

TEST(ChunkBackward, Options) { expect_option_pairs(Op::backward, backward_options(), 200, taken); }

TEST(ChunkBackward, Cases) { expect_table_cases(Op::backward, taken); }

/// In a pack with many others a block has more columns of V than alone: the shapes give the same bits.
TEST(ChunkBackward, APackedSequenceIsTheSequenceAlone) {
  for (DType dtype : kChunkDTypes) {
    std::vector<std::int64_t> lengths = {64, 0, 130, 1, 17, 300};
    lengths.resize(40, 70);
    Case c = with_lengths(backward_case("Hq=2 Hv=4 K=128 V=128 initial=1 d_final=1"), lengths, 70);
    c.dtype = dtype;
    const Tensors inputs = make_inputs(c);
    const Values packed = run_on_cuda(c, inputs);
    EXPECT_EQ(bit_differences(packed, run_on_cuda(c, inputs)), "") << "a second run";
    for (std::int64_t n = 0; n < 8; ++n) {
      const Part part = sequence_alone(c, inputs, n);
      const Values alone = run_on_cuda(part.c, part.inputs);
      for (const char* name : kTokenGradients) {
        EXPECT_EQ(alone.at(name), rows_of(packed.at(name), c.T, c.begin(n), c.length(n))) << name << " of sequence " << n;
      }
      EXPECT_EQ(alone.at("d_initial_state"), rows_of(packed.at("d_initial_state"), c.sequences(), n, 1)) << "sequence " << n;
    }
  }
}

/// Numbers far from 1, as for the forward, and gradients.
TEST(ChunkBackward, FarFromOne) {
  const auto times = [](Tensor& x, double factor) {
    for (std::int64_t i = 0; i < x.count(); ++i) x.set(i, x.get(i) * factor);
  };
  for (std::int64_t T : {64, 150}) {
    Case c = backward_case("Hq=1 Hv=2 K=64 V=32 dtype=bf16 initial=1 d_final=1");
    c.T = T;
    const Tensors usual = make_inputs(c);
    for (double factor : {1e-6, 1e6}) {
      for (const char* name : {"q", "v", "d_o", "beta"}) {
        Tensors inputs = usual;
        inputs[name] = usual.at(name).clone();
        if (std::string(name) == "beta" && factor > 1) continue;
        times(inputs.at(name), factor);
        if (std::string(name) == "v") times(inputs["initial_state"] = usual.at("initial_state").clone(), factor);
        if (std::string(name) == "d_o") times(inputs["d_final_state"] = usual.at("d_final_state").clone(), factor);
        EXPECT_EQ(faults_of(c, inputs), "") << name << " times " << factor;
      }
    }
  }
}

/// Without outputs (scale 0) all that goes back is the gradient of the final state, however little of it decays leave: the
/// gradient of the initial state is as accurate when it is 1e-30. One head, since a larger one would hide it.
TEST(ChunkBackward, LittleOfTheFinalGradientIsLeft) {
  for (const char* data : {"strong_decay", "usual", "forget"}) {
    for (const char* dtype : {"f32", "bf16", "f16"}) {
      for (const char* gate : {"log_decay", "computed"}) {
        for (std::int64_t T : {3, 17, 40, 64, 130}) {
          Case c = backward_case(std::string("scale=0 Hv=1 K=64 V=64 initial=1 d_final=1 data=") + data + " dtype=" + dtype +
                                 " gate=" + gate);
          c.T = T;
          Tensors inputs = make_inputs(c);
          Values expected = truth(c, inputs);
          double norm = 0;
          for (double x : expected.at("d_initial_state")) norm += x * x;
          if (norm < 1e-65) continue;  // in part below the smallest normal number
          const Values values = run_on_cuda(c, inputs);
          EXPECT_LE(relative_rms(values.at("d_initial_state"), expected.at("d_initial_state")),
                    bound_of(c, "d_initial_state", c.dtype, 0))
              << to_text(c) << ", " << std::sqrt(norm);
        }
      }
    }
  }
}

void expect_nan_stays(DType dtype) {
  Case c = with_lengths(backward_case("Hq=2 Hv=2 K=64 V=32 initial=1 d_final=1"), {100, 64, 30});
  c.dtype = dtype;
  const Tensors usual = make_inputs(c);
  const Values clean = run_on_cuda(c, usual);
  Tensors inputs = usual;
  inputs["d_o"] = usual.at("d_o").clone();
  inputs.at("d_o").set((110 * 2 + 1) * 32 + 5, std::nan(""));  // sequence 1, head 1
  const Values values = run_on_cuda(c, inputs);
  for (const char* name : kTokenGradients) {
    const std::size_t row = clean.at(name).size() / static_cast<std::size_t>(c.T * 2);
    for (std::size_t i = 0; i < clean.at(name).size(); ++i) {
      const std::size_t token = i / row / 2, head = i / row % 2;
      if (head == 1 && token >= 100 && token < 164) continue;
      ASSERT_EQ(values.at(name)[i], clean.at(name)[i]) << name << " token " << token << " head " << head;
    }
  }
}

TEST(ChunkBackward, NanStaysInItsHeadAndSequence) {
  for (DType dtype : {DType::bf16, DType::f32}) expect_nan_stays(dtype);
}

TEST(ChunkBackward, RowsOfNoSequenceAreZero) {
  for (DType dtype : {DType::bf16, DType::f32}) {
    Case c = with_lengths(backward_case("Hq=3 Hv=6 K=64 V=32"), {0}, 130);
    c.dtype = dtype;
    const Values values = run_on_cuda(c, make_inputs(c));
    for (const char* name : kTokenGradients) {
      for (double x : values.at(name)) ASSERT_EQ(x, 0) << name;
    }
  }
}

/// As on a card with 99 KB of shared memory a block.
TEST(ChunkBackward, LittleSharedMemory) {
  for (DType dtype : {DType::bf16, DType::f32}) {
    for (std::int64_t K : {64, 128, 256}) {
      Case c = backward_case("T=200 Hq=1 Hv=2 V=128 initial=1 d_final=1");
      c.dtype = dtype;
      c.K = K;
      const Tensors inputs = make_inputs(c);
      setenv("FLASHQLA_CUDA_SHARED_KB", "99", 1);
      const Values small = run_on_cuda(c, inputs);
      unsetenv("FLASHQLA_CUDA_SHARED_KB");
      EXPECT_EQ(bit_differences(small, run_on_cuda(c, inputs)), "") << "K=" << K;
    }
  }
}

/// float32 works on the q/k heads in two halves: an odd number of them, and one.
TEST(ChunkBackward, HalvesOfHeads) {
  for (const std::int64_t heads : {1, 2, 3, 5}) {
    Case c =
        with_lengths(backward_case("K=32 V=48 initial=1 d_final=1 gate=computed l2norm=1 beta=sigmoid"), {100, 0, 64, 30}, 20);
    c.Hq = heads;
    c.Hv = 2 * heads;
    EXPECT_EQ(faults_of(c), "");
  }
}

/// Offsets that decrease or lead outside: nothing outside the tensors is touched, and the call ends.
TEST(ChunkBackward, WrongOffsetsStayInside) {
  for (DType dtype : {DType::bf16, DType::f32}) {
    Case c = with_lengths(backward_case("Hq=1 Hv=2 K=64 V=64 initial=1 d_final=1"), {64, 36, 100}, 0);
    c.dtype = dtype;
    Tensors inputs = make_inputs(c);
    inputs.at("cu_seqlens").set_values({-50, 900, 100, 1 << 20});
    EXPECT_NO_THROW(run_on_cuda(c, inputs));
  }
}

}  // namespace
}  // namespace flashqla::test
