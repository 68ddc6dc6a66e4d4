// Random tensors on the device, their memory and a clock, for the benchmarks of CUDA kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace flashqla::bench {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

static __device__ float noise(std::uint64_t i, std::uint32_t seed) {
  std::uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull + seed * 0xd1b54a32d192ed03ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return static_cast<float>((x ^ x >> 31) >> 40) * (2.0f / 16777216.0f) - 1.0f;
}

/// Rows of 128 numbers, of length 1 if `unit`: a warp a row. Element: __nv_bfloat16 or float.
template <class Element>
__global__ void fill_rows(Element* to, std::int64_t rows, std::uint32_t seed, bool unit) {
  const std::int64_t row = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (row >= rows) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float x[4], sum = 0;
  for (int i = 0; i < 4; ++i) {
    x[i] = noise(static_cast<std::uint64_t>(row * 128 + lane + 32 * i), seed);
    sum += x[i] * x[i];
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  for (int i = 0; i < 4; ++i) to[row * 128 + lane + 32 * i] = static_cast<Element>(unit ? x[i] * rsqrtf(sum) : x[i]);
}
static __global__ void fill_gates(float* g, float* beta, std::int64_t tokens, int heads) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= tokens * heads) return;
  g[i] = i % heads % 4 == 3 ? 0.0f : -0.05f * (1.0f + noise(static_cast<std::uint64_t>(i), 7));
  beta[i] = 0.5f + 0.5f * noise(static_cast<std::uint64_t>(i), 8);
}
static __global__ void fill_states(float* to, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) to[i] = 0.1f * noise(static_cast<std::uint64_t>(i), 9);
}

template <class T>
T* allocate(std::int64_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, static_cast<std::size_t>(count) * sizeof(T) + 256), "cudaMalloc");
  return static_cast<T*>(memory);
}
inline unsigned blocks(std::int64_t threads) { return static_cast<unsigned>((threads + 255) / 256); }

/// Memory of a row's tensors.
class Memory {
 public:
  template <class T>
  T* take(std::int64_t count) {
    blocks_.push_back(allocate<T>(count));
    return static_cast<T*>(blocks_.back());
  }
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    for (void* block : blocks_) check(cudaFree(block), "cudaFree");
  }

 private:
  std::vector<void*> blocks_;
};

/// Milliseconds of each of 30 replays of a graph of what `record` puts on a stream, sorted.
template <class Record>
std::vector<float> replay_times(const Record& record) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaStreamCreate(&stream), "stream");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  record(stream);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&replay, graph, 0), "graph");
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  constexpr int kWarmUps = 3, kReplays = 30;
  std::vector<float> times;
  for (int i = 0; i < kWarmUps + kReplays; ++i) {
    check(cudaEventRecord(begin, stream), "event");
    check(cudaGraphLaunch(replay, stream), "replay");
    check(cudaEventRecord(end, stream), "event");
    check(cudaEventSynchronize(end), "replay");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "event");
    if (i >= kWarmUps) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  check(cudaEventDestroy(begin), "event");
  check(cudaEventDestroy(end), "event");
  check(cudaGraphExecDestroy(replay), "graph");
  check(cudaGraphDestroy(graph), "graph");
  check(cudaStreamDestroy(stream), "stream");
  return times;
}

}  // namespace flashqla::bench
