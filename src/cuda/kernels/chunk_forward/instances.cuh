// Every instance of the kernels for one element type.
#pragma once

#include "cuda/host/start.cuh"
#include "cuda/kernels/chunk_forward/advance_kernel.cuh"
#include "cuda/kernels/chunk_forward/prepare_kernel.cuh"
#include "cuda/kernels/chunk_forward/start.hpp"

namespace flashqla::cuda {

template <class Element, int kDimK>
int start_prepare_of(const ChunkForwardParams& params, std::int64_t blocks, void* stream) {
  const KernelLaunch launch{blocks, kPrepareThreads, sizeof(PrepareShared<Element, kDimK>), stream};
  return start_kernel(prepare_chunks<Element, kDimK>, launch, params);
}

template <class Element>
int start_prepare(const ChunkForwardParams& params, std::int32_t padded_k, std::int64_t blocks, void* stream) {
  if (padded_k == 64) return start_prepare_of<Element, 64>(params, blocks, stream);
  if (padded_k == 128) return start_prepare_of<Element, 128>(params, blocks, stream);
  return start_prepare_of<Element, 256>(params, blocks, stream);
}

template <class Element, int kDimK, int kTiles>
int start_advance_with(const ChunkForwardParams& params, std::int64_t blocks, void* stream) {
  static_assert(sizeof(AdvanceShared<kDimK, kTiles>) == advance_shared_bytes(kDimK, {kTiles, kMaxStages}, false),
                "the host reckons with the same bytes");
  using Shared = AdvanceShared<kDimK, kTiles>;
  const KernelLaunch launch{blocks, Shared::kThreads, advance_shared_bytes(kDimK, {kTiles, params.stages}, false), stream};
  return start_kernel(advance_states<Element, kDimK, kTiles>, launch, params);
}

template <class Element, int kDimK>
int start_advance_of(const ChunkForwardParams& params, int tiles, std::int64_t blocks, void* stream) {
  if (tiles == 1) return start_advance_with<Element, kDimK, 1>(params, blocks, stream);
  if (tiles == 2) return start_advance_with<Element, kDimK, 2>(params, blocks, stream);
  return start_advance_with<Element, kDimK, 4>(params, blocks, stream);
}

template <class Element>
int start_advance(const ChunkForwardParams& params, std::int32_t padded_k, int tiles, std::int64_t blocks, void* stream) {
  if (padded_k == 64) return start_advance_of<Element, 64>(params, tiles, blocks, stream);
  if (padded_k == 128) return start_advance_of<Element, 128>(params, tiles, blocks, stream);
  return start_advance_of<Element, 256>(params, tiles, blocks, stream);
}

}  // namespace flashqla::cuda
