// Gradients of a_log and dt_bias: one block a value head adds the chunks' parts, always in the same order.
#include <cuda_runtime_api.h>

#include "cuda/host/start.cuh"
#include "cuda/kernels/chunk_backward/params.hpp"
#include "cuda/kernels/chunk_backward/start.hpp"
#include "cuda/views/views.cuh"

namespace flashqla::cuda {

namespace {

constexpr int kThreads = 256;

FLASHQLA_DEVICE void store_sum(const HeadResult& to, std::int32_t head, double sum) {
  if (to.data != nullptr) store_scalar(to.data, to.dtype, head * to.stride, static_cast<float>(sum));
}

__global__ void __launch_bounds__(kThreads) add_head_sums(const __grid_constant__ ChunkBackwardParams p) {
  __shared__ double parts[2][kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const auto head = static_cast<std::int32_t>(blockIdx.x);
  double sums[2] = {0.0, 0.0};
  for (std::int64_t chunk = thread; chunk < chunk_count(p.sequences); chunk += kThreads) {
    for (int i = 0; i < 2; ++i) sums[i] += p.head_sums[(chunk * p.heads_v + head) * 2 + i];
  }
  for (int i = 0; i < 2; ++i) parts[i][thread] = sums[i];
  for (int step = kThreads / 2; step > 0; step /= 2) {
    __syncthreads();  // the parts that this step adds
    if (thread >= step) continue;
    for (int i = 0; i < 2; ++i) parts[i][thread] += parts[i][thread + step];
  }
  if (thread != 0) return;
  store_sum(p.d_a_log, head, parts[0][0]);
  store_sum(p.d_dt_bias, head, parts[1][0]);
}

}  // namespace

int start_head_sums(const ChunkBackwardParams& params, void* stream) {
  return start_kernel(add_head_sums, {params.heads_v, kThreads, 0, stream}, params);
}

}  // namespace flashqla::cuda
