// Times chunk_forward and chunk_backward on a CUDA device over the rows of two tables: `flashqla_bench_cuda [part of a row's
// name]`, one JSON line a row. As a model calls it: bf16 (float32 in rows that say so), K = V = 128, an initial state, the final
// state wanted, q and k normalised before, g and beta given; a quarter of the heads never decay; for the backward gradients of o
// and of the final state. A CUDA graph of one call is replayed 30 times; time is the median.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda_data.cuh"
#include "flashqla/flashqla.hpp"

namespace {

using namespace flashqla;
using namespace flashqla::bench;

struct Row {
  const char* name;
  std::int64_t heads_qk, heads_v, batch;
  std::vector<std::int64_t> lengths;  // packed when not empty
  std::int64_t tokens;                // of each batch entry, else
  DType dtype = DType::bf16;          // or f32
};

Problem problem_of(const Row& row, const std::vector<std::int64_t>& offsets) {
  Problem p;
  p.device = {DeviceType::cuda, 0};
  p.batch = row.lengths.empty() ? row.batch : 1;
  p.tokens = row.lengths.empty() ? row.tokens : offsets.back();
  p.heads_qk = row.heads_qk;
  p.heads_v = row.heads_v;
  p.dtype = row.dtype;
  p.packed = !row.lengths.empty();
  if (p.packed) p.num_sequences = static_cast<std::int64_t>(row.lengths.size());
  return p;
}

/// `count` rows of 128 random numbers.
void* random_rows(DType dtype, std::int64_t count, std::uint32_t seed, bool unit, Memory& memory) {
  if (dtype == DType::f32) {
    auto* rows = memory.take<float>(count * 128);
    fill_rows<<<blocks(count * 32), 256>>>(rows, count, seed, unit);
    return rows;
  }
  auto* rows = memory.take<__nv_bfloat16>(count * 128);
  fill_rows<<<blocks(count * 32), 256>>>(rows, count, seed, unit);
  return rows;
}

/// Random numbers in every tensor that both operations read.
struct Inputs {
  InputTensors tensors;
  TensorView state;
};
Inputs inputs_of(const Problem& p, const std::vector<std::int64_t>& offsets, Memory& memory) {
  const std::int64_t all = p.batch * p.tokens, states = p.sequences() * p.heads_v * 128 * 128;
  void* q = random_rows(p.dtype, all * p.heads_qk, 1, true, memory);
  void* k = random_rows(p.dtype, all * p.heads_qk, 2, true, memory);
  void* v = random_rows(p.dtype, all * p.heads_v, 3, false, memory);
  auto* g = memory.take<float>(all * p.heads_v);
  auto* beta = memory.take<float>(all * p.heads_v);
  auto* initial = memory.take<float>(states);
  auto* cu = memory.take<std::int64_t>(static_cast<std::int64_t>(offsets.size()));
  check(cudaMemcpy(cu, offsets.data(), offsets.size() * 8, cudaMemcpyHostToDevice), "copy");
  fill_gates<<<blocks(all * p.heads_v), 256>>>(g, beta, all, static_cast<int>(p.heads_v));
  fill_states<<<blocks(states), 256>>>(initial, states);
  Inputs inputs;
  InputTensors& t = inputs.tensors;
  t.q = TensorView(q, p.dtype, {p.batch, p.tokens, p.heads_qk, 128});
  t.k = TensorView(k, p.dtype, {p.batch, p.tokens, p.heads_qk, 128});
  t.v = TensorView(v, p.dtype, {p.batch, p.tokens, p.heads_v, 128});
  t.g = TensorView(g, DType::f32, {p.batch, p.tokens, p.heads_v});
  t.beta = TensorView(beta, DType::f32, {p.batch, p.tokens, p.heads_v});
  if (p.packed) t.cu_seqlens = TensorView(cu, DType::i64, {p.sequences() + 1});
  inputs.state = TensorView(initial, DType::f32, {p.sequences(), p.heads_v, 128, 128});
  return inputs;
}

/// A tensor like another, its contents not set.
TensorView like(const ConstTensorView& other, Memory& memory) {
  std::int64_t count = 1;
  for (int i = 0; i < other.rank; ++i) count *= other.sizes[static_cast<std::size_t>(i)];
  TensorView view;
  view.data = memory.take<std::byte>(count * element_bytes(other.dtype));
  view.dtype = other.dtype;
  view.rank = other.rank;
  view.sizes = other.sizes;
  view.strides = other.strides;
  return view;
}

ChunkForwardTensors forward_tensors(const Problem& p, const std::vector<std::int64_t>& offsets, Memory& memory) {
  const Inputs inputs = inputs_of(p, offsets, memory);
  ChunkForwardTensors t;
  t.inputs = inputs.tensors;
  t.states.initial_state = inputs.state;
  t.states.final_state = like(inputs.state, memory);
  t.o = like(inputs.tensors.v, memory);
  check(cudaDeviceSynchronize(), "data");
  return t;
}

ChunkBackwardTensors backward_tensors(const Problem& p, const std::vector<std::int64_t>& offsets, Memory& memory) {
  const Inputs inputs = inputs_of(p, offsets, memory);
  const std::int64_t rows = p.batch * p.tokens * p.heads_v, states = p.sequences() * p.heads_v * 128 * 128;
  ChunkBackwardTensors t;
  t.inputs = inputs.tensors;
  t.initial_state = inputs.state;
  const TensorView d_final = like(inputs.state, memory);
  t.d_o = inputs.tensors.v;
  t.d_o.data = random_rows(p.dtype, rows, 4, false, memory);
  fill_states<<<blocks(states), 256>>>(static_cast<float*>(d_final.data), states);
  t.d_final_state = d_final;
  t.d_q = like(inputs.tensors.q, memory);
  t.d_k = like(inputs.tensors.k, memory);
  t.d_v = like(inputs.tensors.v, memory);
  t.d_g = like(inputs.tensors.g, memory);
  t.d_beta = like(inputs.tensors.beta, memory);
  t.d_initial_state = like(inputs.state, memory);
  check(cudaDeviceSynchronize(), "data");
  return t;
}

/// Microseconds of the calling thread for one call, the fastest of many.
template <class Descriptor, class Tensors>
double host_time(const Plan<Descriptor>& plan, const Tensors& tensors, Workspace workspace) {
  double best = 1e9;
  for (int i = 0; i < 20; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    run(plan, tensors, workspace, Stream{});
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    check(cudaDeviceSynchronize(), "call");
    best = std::min(best, took.count());
  }
  return best;
}

template <class Descriptor, class Tensors>
void measure(const std::string& name, const Descriptor& descriptor, const Tensors& tensors, Memory& memory) {
  const Plan<Descriptor> made = plan(descriptor);
  const Workspace workspace{memory.take<std::byte>(static_cast<std::int64_t>(made.workspace_bytes)), made.workspace_bytes};
  const std::vector<float> times = replay_times([&](cudaStream_t stream) { run(made, tensors, workspace, Stream{stream}); });
  std::printf(
      "{\"row\": \"%s\", \"implementation\": \"%s\", \"ms\": %.4f, \"ms_min\": %.4f, \"host_us\": %.1f, "
      "\"workspace_bytes\": %zu}\n",
      name.c_str(), made.implementation.c_str(), static_cast<double>(times[times.size() / 2]), static_cast<double>(times[0]),
      host_time(made, tensors, workspace), made.workspace_bytes);
  std::fflush(stdout);
}

void measure(const Row& row, bool backward) {
  std::vector<std::int64_t> offsets{0};
  for (std::int64_t length : row.lengths) offsets.push_back(offsets.back() + length);
  const Problem problem = problem_of(row, offsets);
  Memory memory;
  if (backward) {
    const ChunkBackwardTensors tensors = backward_tensors(problem, offsets, memory);
    measure(std::string("backward ") + row.name, ChunkBackward{problem}, tensors, memory);
  } else {
    const ChunkForwardTensors tensors = forward_tensors(problem, offsets, memory);
    measure(row.name, ChunkForward{problem}, tensors, memory);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<Row> rows = {
      {"(16,64) 1x32768", 16, 64, 1, {}, 32768},
      {"(16,64) 4x8192", 16, 64, 4, {}, 8192},
      {"(16,64) 4096 + 28672", 16, 64, 1, {4096, 28672}, 0},
      {"(16,48) 1x32768", 16, 48, 1, {}, 32768},
      {"(16,32) 1x32768", 16, 32, 1, {}, 32768},
      {"(16,32) 8x1024", 16, 32, 8, {}, 1024},
      {"(16,32) 1x2048", 16, 32, 1, {}, 2048},
      {"(2,8) 1x32768", 2, 8, 1, {}, 32768},
      {"(2,8) 1x2048", 2, 8, 1, {}, 2048},
      {"float32 (16,32) 1x8192", 16, 32, 1, {}, 8192, DType::f32},
  };
  const std::vector<Row> backward_rows = {
      {"(16,32) 1x8192", 16, 32, 1, {}, 8192},
      {"(16,32) 1x32768", 16, 32, 1, {}, 32768},
      {"(2,4) 1x32768", 2, 4, 1, {}, 32768},
      {"(16,32) 8 lengths", 16, 32, 1, {1111, 7702, 2690, 5424, 312, 9153, 6032, 344}, 0},
      {"(16,64) 1x32768", 16, 64, 1, {}, 32768},
      {"(8,16) 1x32768", 8, 16, 1, {}, 32768},
      {"(4,8) 1x32768", 4, 8, 1, {}, 32768},
      {"(16,32) 4x2048", 16, 32, 4, {}, 2048},
      {"float32 (16,32) 1x8192", 16, 32, 1, {}, 8192, DType::f32},
  };
  const auto asked = [&](const std::string& name) { return argc < 2 || name.find(argv[1]) != std::string::npos; };
  for (const Row& row : rows) {
    if (asked(row.name)) measure(row, false);
  }
  for (const Row& row : backward_rows) {
    if (asked(std::string("backward ") + row.name)) measure(row, true);
  }
  return 0;
}
