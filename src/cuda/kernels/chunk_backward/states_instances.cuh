// Instances of states_both_ways for one element type and width of K. A file has those of one width, so that it compiles in less
// than a minute.
#pragma once

#include "cuda/host/start.cuh"
#include "cuda/kernels/chunk_backward/retreat.cuh"
#include "cuda/kernels/chunk_backward/start.hpp"
#include "cuda/kernels/chunk_forward/start.hpp"

namespace flashqla::cuda {

template <class Element, int kDimK, int kTiles>
int start_states_with(const ChunkBackwardParams& params, std::int64_t blocks, void* stream) {
  using Shared = AdvanceShared<kDimK, kTiles, true>;
  static_assert(sizeof(Shared) == advance_shared_bytes(kDimK, {kTiles, kMaxStages}, true),
                "the host reckons with the same bytes");
  const KernelLaunch launch{blocks, Shared::kThreads, advance_shared_bytes(kDimK, {kTiles, params.stages}, true), stream};
  return start_kernel(states_both_ways<Element, kDimK, kTiles>, launch, params);
}

template <class Element, int kDimK>
int start_states(const ChunkBackwardParams& params, int tiles, std::int64_t blocks, void* stream) {
  if (tiles == 1) return start_states_with<Element, kDimK, 1>(params, blocks, stream);
  if constexpr (kDimK < 256) {
    if (tiles == 4) return start_states_with<Element, kDimK, 4>(params, blocks, stream);
  }
  return start_states_with<Element, kDimK, 2>(params, blocks, stream);
}

}  // namespace flashqla::cuda
