// chunk_forward in a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "cuda/host/device.hpp"

#include "device/check.hpp"
#include "harness/parts.hpp"

namespace flashqla::test {

/// Copies a case's inputs over those of another that have been placed.
inline void replace(DeviceMover& mover, const Tensors& placed, const Tensors& by) {
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
inline void expect_graph_follows(const Case& base) {
  const Case first = with_lengths(base, {64, 0, 130, 1, 17, 300}, 70);
  Case second = with_lengths(first, {0, 200, 12, 80, 200, 20}, 70);
  second.seed = 2;
  const Tensors inputs = make_inputs(first), others = make_inputs(second);
  Tensors outputs = make_outputs(first, inputs);
  DeviceMover mover;
  setenv("FLASHQLA_IMPL", cuda_implementation, 1);
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

}  // namespace flashqla::test
