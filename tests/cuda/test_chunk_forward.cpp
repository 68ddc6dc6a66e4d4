// chunk_forward on the device against the reference in double.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "cuda/host/device.hpp"

#include "harness/compare.hpp"
#include "harness/device_mover.hpp"
#include "harness/options.hpp"
#include "harness/pairwise.hpp"
#include "harness/parts.hpp"

namespace flashqla::test {
namespace {

constexpr DType kDTypes[] = {DType::bf16, DType::f16};
const char* const kImplementation = "cuda-portable";

Values run_on_cuda(const Case& c, const Tensors& inputs) {
  DeviceMover mover;
  RunOptions options{kImplementation};
  options.mover = &mover;
  return run_case(c, inputs, options);
}

/// What is wrong with the results of the case; empty if nothing.
std::string faults_of(const Case& c) {
  const Tensors inputs = make_inputs(c);
  std::string lines;
  try {
    lines = differences(c, inputs, run_on_cuda(c, inputs), truth(c, inputs), 0);
  } catch (const std::exception& error) {
    lines = std::string("  threw: ") + error.what() + "\n";
  }
  return lines.empty() ? "" : to_text(c) + "\n" + lines;
}

/// The case as the kernels take it.
Case taken(Case c) {
  if (c.dtype != DType::f16) c.dtype = DType::bf16;
  c.K = (c.K + 15) / 16 * 16;
  c.V = (c.V + 15) / 16 * 16;
  c.extras = false;
  if (c.strides == Strides::huge) c.strides = Strides::dense;
  return c;
}

TEST(ChunkForward, Lengths) {
  for (std::int64_t T = 0; T <= 193; ++T) {
    Case c = parse_case("Hq=1 Hv=2");
    c.T = T;
    c.K = T % 5 == 4 ? 64 : 16;
    c.V = T % 7 == 3 ? 48 : 16;
    c.dtype = kDTypes[T % 2];
    c.initial = T % 3 == 0;
    c.l2norm = T % 3 == 1;
    c.seed = static_cast<std::uint64_t>(T) + 1;
    EXPECT_EQ(faults_of(c), "");
  }
}

TEST(ChunkForward, Widths) {
  for (std::int64_t K : {16, 48, 64, 80, 128, 144, 192, 256}) {
    for (std::int64_t V : {16, 32, 48, 64, 112, 128, 256}) {
      Case c = parse_case("T=150 Hq=1 Hv=1 initial=1");
      c.K = K;
      c.V = V;
      c.dtype = kDTypes[(K + V) / 16 % 2];
      EXPECT_EQ(faults_of(c), "");
    }
  }
}

TEST(ChunkForward, HardData) {
  for (Data data : {Data::usual, Data::strong_decay, Data::no_decay, Data::growth, Data::forget, Data::beta_zero, Data::beta_two,
                    Data::repeated_keys, Data::unnormalised}) {
    for (DType dtype : kDTypes) {
      for (std::int64_t T : {70, 300}) {
        Case c = parse_case("Hq=1 Hv=2 K=128 V=64");
        c.T = T;
        c.data = data;
        c.dtype = dtype;
        EXPECT_EQ(faults_of(c), "");
      }
    }
  }
}

TEST(ChunkForward, Options) {
  Case base;
  base.op = Op::forward;
  for (const Case& c : pairwise(base, forward_options(), 100)) EXPECT_EQ(faults_of(taken(c)), "");
}

TEST(ChunkForward, Cases) {
  for (const char* tag : {"smoke", "full"}) {
    for (const Case& c : load_cases("problems.txt", tag)) {
      if (c.op != Op::forward) continue;
      EXPECT_EQ(faults_of(taken(c)), "");
    }
  }
}

/// In a pack with many others a block has more columns of V than alone: the shapes give the same bits.
TEST(ChunkForward, APackedSequenceIsTheSequenceAlone) {
  for (DType dtype : kDTypes) {
    std::vector<std::int64_t> lengths = {64, 0, 130, 1, 17, 300};
    lengths.resize(40, 70);
    Case c = with_lengths(parse_case("Hq=2 Hv=4 K=128 V=128 initial=1"), lengths, 70);
    c.dtype = dtype;
    const Tensors inputs = make_inputs(c);
    const Values packed = run_on_cuda(c, inputs);
    EXPECT_EQ(bit_differences(packed, run_on_cuda(c, inputs)), "") << "a second run";
    for (std::int64_t n = 0; n < 8; ++n) {
      const Part part = sequence_alone(c, inputs, n);
      const Values expected = {{"o", rows_of(packed.at("o"), c.T, c.begin(n), c.length(n))},
                               {"final_state", rows_of(packed.at("final_state"), c.sequences(), n, 1)}};
      EXPECT_EQ(bit_differences(run_on_cuda(part.c, part.inputs), expected), "") << "sequence " << n;
    }
  }
}

TEST(ChunkForward, ASplitSequenceIsTheWhole) {
  Case c = parse_case("T=256 Hq=1 Hv=2 K=64 V=48 dtype=bf16 initial=1");
  const Tensors inputs = make_inputs(c);
  const Values whole = run_on_cuda(c, inputs);
  for (std::int64_t at : {0, 64, 128, 192, 256}) {
    Part first = token_range(c, inputs, 0, at), second = token_range(c, inputs, at, c.T - at);
    const Values a = run_on_cuda(first.c, first.inputs);
    second.inputs["initial_state"] = inputs.at("initial_state").clone();
    second.inputs.at("initial_state").set_values(a.at("final_state"));
    Values joined = run_on_cuda(second.c, second.inputs);
    joined.at("o").insert(joined.at("o").begin(), a.at("o").begin(), a.at("o").end());
    EXPECT_EQ(bit_differences(joined, whole), "") << "split at " << at;
  }
}

/// As on a card with 99 KB of shared memory a block.
TEST(ChunkForward, LittleSharedMemory) {
  setenv("FLASHQLA_CUDA_SHARED_KB", "99", 1);
  for (std::int64_t K : {64, 128, 256}) {
    for (std::int64_t V : {16, 128}) {
      Case c = parse_case("T=200 Hq=1 Hv=2 dtype=bf16 initial=1");
      c.K = K;
      c.V = V;
      const Tensors inputs = make_inputs(c);
      const Values small = run_on_cuda(c, inputs);
      unsetenv("FLASHQLA_CUDA_SHARED_KB");
      EXPECT_EQ(bit_differences(small, run_on_cuda(c, inputs)), "") << "K=" << K << " V=" << V;
      setenv("FLASHQLA_CUDA_SHARED_KB", "99", 1);
      EXPECT_EQ(faults_of(c), "");
    }
  }
  unsetenv("FLASHQLA_CUDA_SHARED_KB");
}

/// Copies a case's inputs over those of another that have been placed.
void replace(DeviceMover& mover, const Tensors& placed, const Tensors& by) {
  for (const auto& [name, tensor] : placed) {
    const Tensor& other = by.at(name);
    ASSERT_EQ(tensor.memory_bytes(), other.memory_bytes()) << name;
    const auto shift = static_cast<std::byte*>(tensor.view().data) - tensor.memory().get();
    cuda::check(cudaMemcpy(mover.place(tensor) + shift, other.view().data,
                           static_cast<std::size_t>(tensor.count() * element_bytes(tensor.dtype())), cudaMemcpyHostToDevice),
                "new contents");
  }
}

/// A graph captured at the first call, with no warm-up, and replayed with other offsets and data equals an eager call with those.
TEST(ChunkForward, AGraphFollowsTheContents) {
  const Case first = with_lengths(parse_case("Hq=1 Hv=2 K=64 V=64 dtype=bf16 initial=1 stored=every states_every=64"),
                                  {64, 0, 130, 1, 17, 300}, 70);
  Case second = with_lengths(first, {0, 200, 12, 80, 200, 20}, 70);
  second.seed = 2;
  const Tensors inputs = make_inputs(first), others = make_inputs(second);
  Tensors outputs = make_outputs(first, inputs);
  DeviceMover mover;
  setenv("FLASHQLA_IMPL", kImplementation, 1);
  Problem problem = problem_of(first);
  problem.device = mover.device();
  const Plan<ChunkForward> planned = plan(ChunkForward{problem, first.stored, first.states_every});
  unsetenv("FLASHQLA_IMPL");
  const ChunkForwardTensors views = forward_tensors(first, inputs, outputs, &mover);
  std::byte* const workspace = mover.workspace(planned.workspace_bytes);
  const auto stream = static_cast<cudaStream_t>(mover.stream().handle);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  run(planned, views, {workspace, planned.workspace_bytes}, mover.stream());
  cuda::check(cudaStreamEndCapture(stream, &graph), "capture");
  cuda::check(cudaGraphInstantiate(&replay, graph, 0), "graph");
  cuda::check(cudaGraphLaunch(replay, stream), "replay");
  cuda::check(cudaStreamSynchronize(stream), "replay");
  replace(mover, inputs, others);
  cuda::check(cudaGraphLaunch(replay, stream), "replay");
  mover.finish();
  const Values eager = run_on_cuda(second, others);
  EXPECT_EQ(outputs.at("o").values(), eager.at("o"));
  EXPECT_EQ(outputs.at("final_state").values(), eager.at("final_state"));
  cuda::check(cudaGraphExecDestroy(replay), "graph");
  cuda::check(cudaGraphDestroy(graph), "graph");
}

/// Offsets that decrease or lead outside: nothing outside the tensors is touched, and the call ends.
TEST(ChunkForward, WrongOffsetsStayInside) {
  Case c = with_lengths(parse_case("Hq=1 Hv=2 K=64 V=64 dtype=bf16 initial=1"), {64, 36, 100}, 0);
  Tensors inputs = make_inputs(c);
  inputs.at("cu_seqlens").set_values({-50, 900, 100, 1 << 20});
  EXPECT_NO_THROW(run_on_cuda(c, inputs));
}

}  // namespace
}  // namespace flashqla::test
