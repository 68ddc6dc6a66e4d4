// Every instance of the kernel for one element type.
#pragma once

#include "cuda/host/start.cuh"
#include "cuda/kernels/chunk_backward/gradients_kernel.cuh"
#include "cuda/kernels/chunk_backward/start.hpp"

namespace flashqla::cuda {

template <class Element, int kDimK>
int start_gradients_of(const ChunkBackwardParams& params, std::int64_t blocks, void* stream) {
  constexpr std::size_t kMostShared = 99 * 1024;  // of a block on any device
  static_assert(sizeof(GradientShared<kDimK>) <= kMostShared);
  const KernelLaunch launch{blocks, kGradientThreads, sizeof(GradientShared<kDimK>), stream};
  return start_kernel(chunk_gradients<Element, kDimK>, launch, params);
}

template <class Element>
int start_gradients(const ChunkBackwardParams& params, std::int32_t padded_k, std::int64_t blocks, void* stream) {
  if (padded_k == 64) return start_gradients_of<Element, 64>(params, blocks, stream);
  if (padded_k == 128) return start_gradients_of<Element, 128>(params, blocks, stream);
  return start_gradients_of<Element, 256>(params, blocks, stream);
}

}  // namespace flashqla::cuda
