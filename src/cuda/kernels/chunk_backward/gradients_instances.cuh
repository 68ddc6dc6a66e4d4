// Every instance of the kernel for one element type.
#pragma once

#include "cuda/host/start.cuh"
#include "cuda/kernels/chunk_backward/gradients_kernel.cuh"
#include "cuda/kernels/chunk_backward/start.hpp"

namespace flashqla::cuda {

/// As deep a ring as `most_shared` bytes of a block have room for.
template <int kDimK>
constexpr GradientRing gradient_ring(std::size_t most_shared) {
  for (const GradientRing& ring : {GradientRing{4, 2}, GradientRing{2, 2}, GradientRing{2, 1}}) {
    if (!GradientShared<kDimK>::kOverlaid && GradientShared<kDimK>::bytes(ring) <= most_shared) return ring;
  }
  return {1, 1};
}

template <class Element, int kDimK>
int start_gradients_of(const ChunkBackwardParams& params, std::int64_t blocks, std::size_t most_shared, void* stream) {
  constexpr std::size_t kLeast = 99 * 1024;  // what a block may have on any device
  static_assert(GradientShared<kDimK>::bytes(gradient_ring<kDimK>(kLeast)) <= kLeast);
  const GradientRing ring = gradient_ring<kDimK>(most_shared);
  const KernelLaunch launch{blocks, kGradientThreads, GradientShared<kDimK>::bytes(ring), stream};
  return start_kernel(chunk_gradients<Element, kDimK>, launch, params, ring);
}

template <class Element>
int start_gradients(const ChunkBackwardParams& params, std::int32_t padded_k, std::int64_t blocks, std::size_t most_shared,
                    void* stream) {
  if (padded_k == 64) return start_gradients_of<Element, 64>(params, blocks, most_shared, stream);
  if (padded_k == 128) return start_gradients_of<Element, 128>(params, blocks, most_shared, stream);
  return start_gradients_of<Element, 256>(params, blocks, most_shared, stream);
}

}  // namespace flashqla::cuda
