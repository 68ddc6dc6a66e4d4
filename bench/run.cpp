#include "bench/run.hpp"

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>

#include "bench/data.hpp"
#include "flashqla/flashqla.hpp"

namespace flashqla::bench {
namespace {

constexpr std::size_t kMinimumRepeats = 5;

Problem problem_of(const Case& bench_case) {
  Problem problem;
  problem.batch = bench_case.batch;
  problem.tokens = bench_case.tokens;
  problem.heads_qk = bench_case.heads_qk;
  problem.heads_v = bench_case.heads_v;
  problem.dim_k = bench_case.dim_k;
  problem.dim_v = bench_case.dim_v;
  problem.dtype = bench_case.dtype;
  problem.state_layout = bench_case.layout;
  return problem;
}

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};
using Scratch = std::unique_ptr<void, FreeDeleter>;

Scratch allocate(std::size_t bytes) { return Scratch(std::aligned_alloc(64, (bytes + 64) / 64 * 64)); }

InputTensors views_of(Inputs& inputs) {
  InputTensors views;
  views.q = inputs.q.view();
  views.k = inputs.k.view();
  views.v = inputs.v.view();
  views.g = inputs.g.view();
  views.beta = inputs.beta.view();
  return views;
}

Tensor token_tensor(const Case& bench_case, DType dtype, std::int64_t heads, std::int64_t dim) {
  return Tensor(dtype, {bench_case.batch, bench_case.tokens, heads, dim});
}

Tensor state_tensor(const Case& bench_case) {
  return Tensor(DType::f32, {bench_case.batch, bench_case.heads_v, bench_case.dim_k, bench_case.dim_v});
}

Peak peak_of(const Case& bench_case, const std::string& implementation) {
  if (implementation == "cpu-avx512bf16" && bench_case.dtype == DType::bf16 && bench_case.op != Op::recurrent)
    return Peak::bf16_dot;
  if (implementation.rfind("cpu-avx512", 0) == 0) return Peak::fp32_avx512;
  if (implementation == "cpu-avx2") return Peak::fp32_avx2;
  return Peak::fp32_plain;
}

/// Calls `call` for about `seconds`. What limits it is measured after every repeat, since a shared machine changes from one
/// moment to the next: arithmetic for as long as the repeat took (but 20 ms at most), or `pass`, which gives seconds for the
/// memory.
template <class Plan>
Measurement measure(const Case& bench_case, const Plan& plan, double seconds, const std::function<void()>& call,
                    const std::function<double()>& pass = {}) {
  Measurement result;
  result.implementation = plan.implementation;
  result.workspace_bytes = plan.workspace_bytes;
  result.peak = peak_of(bench_case, plan.implementation);
  call();
  const double end = seconds_of(CLOCK_MONOTONIC) + seconds;
  while (result.timings.wall.size() < kMinimumRepeats || seconds_of(CLOCK_MONOTONIC) < end) {
    result.timings.time(call);
    if (pass) {
      result.passes.push_back(pass());
    } else {
      result.peaks.push_back(sustained_peak(result.peak, bench_case.threads, std::min(result.timings.wall.back(), 0.02)));
    }
  }
  return result;
}

/// What the forward leaves for the backward; one element that no call is given where the case does without.
Tensor saved_tensor(const Case& bench_case) {
  return Tensor(DType::f32, {bench_case.saved ? saved_elements(ChunkForward{problem_of(bench_case)}) : 1});
}

Measurement run_forward(const Case& bench_case, double seconds) {
  Random random(1);
  Inputs inputs = make_inputs(bench_case, random);
  Tensor o = token_tensor(bench_case, bench_case.dtype, bench_case.heads_v, bench_case.dim_v);
  Tensor final_state = state_tensor(bench_case);
  ChunkForwardTensors tensors;
  tensors.inputs = views_of(inputs);
  tensors.states.final_state = final_state.view();
  tensors.o = o.view();
  Tensor saved = saved_tensor(bench_case);
  if (bench_case.saved) tensors.saved = saved.view();
  ChunkForward descriptor;
  descriptor.problem = problem_of(bench_case);
  const auto planned = plan(descriptor, bench_case.threads);
  const Scratch scratch = allocate(planned.workspace_bytes);
  const Parallel parallel = bench_case.threads == 1 ? serial() : own_pool(bench_case.threads);
  return measure(bench_case, planned, seconds,
                 [&] { run(planned, tensors, {scratch.get(), planned.workspace_bytes}, parallel); });
}

Measurement run_backward(const Case& bench_case, double seconds) {
  Random random(1);
  Inputs inputs = make_inputs(bench_case, random);
  Tensor d_o = token_tensor(bench_case, bench_case.dtype, bench_case.heads_v, bench_case.dim_v);
  fill_normal(d_o, 1.0, random);
  Tensor d_q = token_tensor(bench_case, bench_case.dtype, bench_case.heads_qk, bench_case.dim_k);
  Tensor d_k = token_tensor(bench_case, bench_case.dtype, bench_case.heads_qk, bench_case.dim_k);
  Tensor d_v = token_tensor(bench_case, bench_case.dtype, bench_case.heads_v, bench_case.dim_v);
  Tensor d_g(DType::f32, {bench_case.batch, bench_case.tokens, bench_case.heads_v});
  Tensor d_beta = d_g;
  ChunkBackwardTensors tensors;
  tensors.inputs = views_of(inputs);
  tensors.d_o = d_o.view();
  tensors.d_q = d_q.view();
  tensors.d_k = d_k.view();
  tensors.d_v = d_v.view();
  tensors.d_g = d_g.view();
  tensors.d_beta = d_beta.view();
  Tensor saved = saved_tensor(bench_case);
  if (bench_case.saved) {
    Tensor o = token_tensor(bench_case, bench_case.dtype, bench_case.heads_v, bench_case.dim_v);
    ChunkForwardTensors forward;
    forward.inputs = tensors.inputs;
    forward.o = o.view();
    forward.saved = saved.view();
    chunk_forward({problem_of(bench_case)}, forward);
    tensors.saved = saved.view();
  }
  ChunkBackward descriptor;
  descriptor.problem = problem_of(bench_case);
  const auto planned = plan(descriptor, bench_case.threads);
  const Scratch scratch = allocate(planned.workspace_bytes);
  const Parallel parallel = bench_case.threads == 1 ? serial() : own_pool(bench_case.threads);
  return measure(bench_case, planned, seconds,
                 [&] { run(planned, tensors, {scratch.get(), planned.workspace_bytes}, parallel); });
}

/// Each call is one layer of a model: its states are one pool of B slots, updated in place. Cold: as many layers in turn as the
/// memory holds.
Measurement run_recurrent(const Case& bench_case, double seconds, ColdMemory& memory) {
  Random random(1);
  Inputs inputs = make_inputs(bench_case, random);
  Tensor o = token_tensor(bench_case, bench_case.dtype, bench_case.heads_v, bench_case.dim_v);
  const std::int64_t outer = bench_case.layout == StateLayout::key_value ? bench_case.dim_k : bench_case.dim_v;
  const std::int64_t inner = bench_case.layout == StateLayout::key_value ? bench_case.dim_v : bench_case.dim_k;
  const std::int64_t numbers = bench_case.batch * bench_case.heads_v * outer * inner;
  const auto layer_bytes = static_cast<std::size_t>(numbers * element_bytes(bench_case.state_dtype));
  const std::size_t layers = bench_case.states == Temperature::cold ? memory.bytes() / layer_bytes : 1;
  if (layers == 0) throw std::runtime_error("the states do not fit the memory for cold states");

  std::vector<std::int32_t> slots(static_cast<std::size_t>(bench_case.batch));
  for (std::size_t n = 0; n < slots.size(); ++n) slots[n] = static_cast<std::int32_t>(n);
  RecurrentForwardTensors tensors;
  tensors.inputs = views_of(inputs);
  tensors.states.read = ConstTensorView(slots.data(), DType::i32, {bench_case.batch});
  tensors.states.write = tensors.states.read;
  tensors.o = o.view();
  RecurrentForward descriptor;
  descriptor.problem = problem_of(bench_case);
  const auto planned = plan(descriptor, bench_case.threads);
  const Scratch scratch = allocate(planned.workspace_bytes);
  const Parallel parallel = bench_case.threads == 1 ? serial() : own_pool(bench_case.threads);

  Tensor start(bench_case.state_dtype, {numbers});
  fill_normal(start, 0.1, random);
  for (std::size_t i = 0; i < layers; ++i) std::memcpy(memory.data() + i * layer_bytes, start.view().data, layer_bytes);
  std::size_t layer = 0;
  memory.update_bandwidth(bench_case.threads);  // finds the fastest loop
  const auto step = [&] {
    tensors.states.final_state = TensorView(memory.data() + layer * layer_bytes, bench_case.state_dtype,
                                            {bench_case.batch, bench_case.heads_v, outer, inner});
    tensors.states.initial_state = tensors.states.final_state;
    run(planned, tensors, {scratch.get(), planned.workspace_bytes}, parallel);
    layer = (layer + 1) % layers;
  };
  const std::size_t places = memory.bytes() / layer_bytes;
  Measurement result = measure(bench_case, planned, seconds, step, [&] {  // half the memory on: cold again when its turn comes
    return memory.update_seconds(bench_case.threads, (layer + places / 2) % places * layer_bytes, layer_bytes);
  });
  result.state_bytes = 2 * static_cast<std::int64_t>(layer_bytes);
  return result;
}

}  // namespace

double flops_of(const Case& bench_case) {
  const double count = bench_case.op == Op::backward ? 19 : 7;
  return count * static_cast<double>(bench_case.dim_k * bench_case.dim_v) *
         static_cast<double>(bench_case.batch * bench_case.tokens * bench_case.heads_v);
}

Measurement run_case(const Case& bench_case, double seconds, ColdMemory& memory) {
  if (bench_case.implementation == "best") {
    unsetenv("FLASHQLA_IMPL");
  } else {
    setenv("FLASHQLA_IMPL", bench_case.implementation.c_str(), 1);
  }
  switch (bench_case.op) {
    case Op::forward:
      return run_forward(bench_case, seconds);
    case Op::backward:
      return run_backward(bench_case, seconds);
    case Op::recurrent:
      return run_recurrent(bench_case, seconds, memory);
  }
  throw std::runtime_error("unknown operation");
}

}  // namespace flashqla::bench
