// chunk_backward on the device against the reference in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "device/check.hpp"
#include "harness/parts.hpp"

namespace flashqla::test {
namespace {

const std::vector<const char*> kTokenGradients = {"d_q", "d_k", "d_v", "d_g", "d_beta"};

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
  expect_pack_is_its_sequences(backward_case("Hq=2 Hv=4 K=128 V=128 initial=1 d_final=1"), kChunkDTypes, kTokenGradients,
                               "d_initial_state");
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

/// Where decays are strong, dg of a head is a sum of few terms and may by chance be small: what is rounded in them has to be far
/// below the bound, so that hardly a head comes near it.
TEST(ChunkBackward, GateGradientsOfFewTerms) {
  for (const char* text : {"T=63", "T=65 beta=one initial=1", "T=130 beta=doubled_sigmoid"}) {
    for (const char* dtype : {"bf16", "f16"}) {
      std::vector<double> errors;
      for (std::uint64_t seed = 1; seed <= 4; ++seed) {
        Case c = backward_case(std::string("Hq=2 Hv=8 K=64 V=128 gate=computed scale=0 d_final=1 dtype=") + dtype + " " + text);
        c.seed = seed;
        const Tensors inputs = make_inputs(c);
        const std::vector<double> d_g = run_on_cuda(c, inputs).at("d_g"), expected = truth(c, inputs).at("d_g");
        for (std::size_t head = 0; head < 8; ++head) {
          std::vector<double> x, y;
          for (std::size_t i = head; i < d_g.size(); i += 8) {
            x.push_back(d_g[i]);
            y.push_back(expected[i]);
          }
          errors.push_back(relative_rms(x, y) / bound_of(c, "d_g", c.dtype, 0));
        }
      }
      std::sort(errors.begin(), errors.end());
      EXPECT_LT(errors[errors.size() * 9 / 10], 0.25) << text << " " << dtype << ", of the bound";
      EXPECT_LT(errors.back(), 1) << text << " " << dtype << ", of the bound";
    }
  }
}

/// Chunks that f16 inputs leave to be walked token by token, on the way forth (states above 2^15) or back (gradients below
/// 2^-14): what the gates' gradients need of them is the same.
TEST(ChunkBackward, WalkedWithF16) {
  for (const char* text : {"T=64", "T=150 gate=computed", "T=150 gate=log_decay beta=sigmoid l2norm=1"}) {
    Case c = backward_case(std::string("Hq=1 Hv=2 K=64 V=48 dtype=f16 scale=0 initial=1 d_final=1 ") + text);
    const Tensors usual = make_inputs(c);
    for (const char* name : {"initial_state", "d_final_state"}) {
      for (double factor : {1e-6, 1e6}) {
        Tensors inputs = usual;
        Tensor& x = inputs[name] = usual.at(name).clone();
        for (std::int64_t i = 0; i < x.count(); ++i) x.set(i, x.get(i) * factor);
        const Values values = run_on_cuda(c, inputs), expected = truth(c, inputs);  // f16 would not hold all others
        for (const char* gradient : {"d_g", "d_beta"}) {
          EXPECT_LT(relative_rms(values.at(gradient), expected.at(gradient)), bound_of(c, gradient, c.dtype, 0))
              << gradient << " of " << to_text(c) << ", " << name << " times " << factor;
        }
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
