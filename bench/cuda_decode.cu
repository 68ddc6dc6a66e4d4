// Times recurrent_forward on a CUDA device: one token for each of B requests, states in place in a pool, f32:
// `flashqla_bench_cuda_decode`, one JSON line a row. A graph has a call for each of so many layers that their states are several
// times the second-level cache; the time is that of a call, the median of 30 replays. `gbytes`: all that a call reads and writes,
// a second; `copy_gbytes`: what a copy of as many states reads and writes a second, in the same run; `of_copy`: the share.
#include <algorithm>

#include "cuda_data.cuh"
#include "flashqla/flashqla.hpp"

namespace {

using namespace flashqla;
using namespace flashqla::bench;

constexpr std::int64_t kHeadsQk = 16, kHeadsV = 32, kDim = 128;
constexpr std::int64_t kPoolBytes = std::int64_t{1} << 30;

/// Median milliseconds of a replay of what `record` puts on a stream.
template <class Record>
float replay_time(const Record& record) {
  const std::vector<float> times = replay_times(record);
  return times[times.size() / 2];
}

void measure(std::int64_t requests, StateLayout layout) {
  const std::int64_t state = requests * kHeadsV * kDim * kDim, state_bytes = state * 4;
  const std::int64_t layers = std::clamp<std::int64_t>(kPoolBytes / state_bytes, 1, 64);
  Memory memory;
  RecurrentForward d;
  Problem& p = d.problem;
  p.device = {DeviceType::cuda, 0};
  p.batch = requests;
  p.tokens = 1;
  p.heads_qk = kHeadsQk;
  p.heads_v = kHeadsV;
  p.dtype = DType::bf16;
  p.qk_l2norm = true;
  p.state_layout = layout;
  auto* q = memory.take<__nv_bfloat16>(requests * kHeadsQk * kDim);
  auto* k = memory.take<__nv_bfloat16>(requests * kHeadsQk * kDim);
  auto* v = memory.take<__nv_bfloat16>(requests * kHeadsV * kDim);
  auto* o = memory.take<__nv_bfloat16>(requests * kHeadsV * kDim);
  auto* g = memory.take<float>(requests * kHeadsV);
  auto* beta = memory.take<float>(requests * kHeadsV);
  auto* states = memory.take<float>(layers * state);
  fill_rows<<<blocks(requests * kHeadsQk * 32), 256>>>(q, requests * kHeadsQk, 1, false);
  fill_rows<<<blocks(requests * kHeadsQk * 32), 256>>>(k, requests * kHeadsQk, 2, false);
  fill_rows<<<blocks(requests * kHeadsV * 32), 256>>>(v, requests * kHeadsV, 3, false);
  fill_gates<<<blocks(requests * kHeadsV), 256>>>(g, beta, requests, kHeadsV);
  fill_states<<<blocks(layers * state), 256>>>(states, layers * state);
  std::vector<std::int32_t> rows(static_cast<std::size_t>(requests));
  for (std::int64_t i = 0; i < requests; ++i) rows[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i);
  auto* index = memory.take<std::int32_t>(requests);
  check(cudaMemcpy(index, rows.data(), rows.size() * 4, cudaMemcpyHostToDevice), "copy");
  check(cudaDeviceSynchronize(), "data");
  RecurrentForwardTensors t;
  t.inputs.q = TensorView(q, DType::bf16, {requests, 1, kHeadsQk, kDim});
  t.inputs.k = TensorView(k, DType::bf16, {requests, 1, kHeadsQk, kDim});
  t.inputs.v = TensorView(v, DType::bf16, {requests, 1, kHeadsV, kDim});
  t.inputs.g = TensorView(g, DType::f32, {requests, 1, kHeadsV});
  t.inputs.beta = TensorView(beta, DType::f32, {requests, 1, kHeadsV});
  t.states.read = TensorView(index, DType::i32, {requests});
  t.states.write = TensorView(index, DType::i32, {requests});
  t.o = TensorView(o, DType::bf16, {requests, 1, kHeadsV, kDim});
  const Plan<RecurrentForward> made = plan(d);
  const float steps = replay_time([&](cudaStream_t stream) {
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      t.states.final_state = TensorView(states + layer * state, DType::f32, {requests, kHeadsV, kDim, kDim});
      t.states.initial_state = t.states.final_state;
      run(made, t, {}, Stream{stream});
    }
  });
  const std::int64_t half = layers * state / 2;
  const float copy = replay_time([&](cudaStream_t stream) {
    check(cudaMemcpyAsync(states, states + half, static_cast<std::size_t>(half) * 4, cudaMemcpyDeviceToDevice, stream), "copy");
  });
  const double us = 1e3 * static_cast<double>(steps) / static_cast<double>(layers);
  const double copy_us = 2e3 * static_cast<double>(copy) / static_cast<double>(layers);
  const std::int64_t vectors = 2 * requests * kDim * (2 * kHeadsQk + 2 * kHeadsV), gates = 2 * 4 * requests * kHeadsV;
  const std::int64_t bytes = 2 * state_bytes + vectors + gates + 2 * 4 * requests;
  const double gbytes = 1e-3 * static_cast<double>(bytes) / us;
  const double copy_gbytes = 2e-3 * static_cast<double>(state_bytes) / copy_us;
  std::printf(
      "{\"row\": \"decode B=%lld %s\", \"implementation\": \"%s\", \"us\": %.2f, \"copy_us\": %.2f, \"bytes\": %lld, "
      "\"gbytes\": %.0f, \"copy_gbytes\": %.0f, \"of_copy\": %.3f}\n",
      static_cast<long long>(requests), layout == StateLayout::key_value ? "key_value" : "value_key", made.implementation.c_str(),
      us, copy_us, static_cast<long long>(bytes), gbytes, copy_gbytes, gbytes / copy_gbytes);
  std::fflush(stdout);
}

}  // namespace

int main() {
  for (std::int64_t requests : {1, 32, 512}) {
    for (StateLayout layout : {StateLayout::value_key, StateLayout::key_value}) measure(requests, layout);
  }
  return 0;
}
