#include "cuda/host/start.cuh"
#include "cuda/kernels/chunk_backward/retreat_f32.cuh"
#include "cuda/kernels/chunk_backward/start.hpp"

namespace flashqla::cuda {

int start_states_f32(const ChunkBackwardParams& params, int tiles, std::int64_t blocks, void* stream) {
  const KernelLaunch launch{blocks, tiles * 64, advance_shared_bytes_f32(params.dim_k, tiles), stream};
  if (tiles == 1) return start_kernel(states_both_ways_f32<16>, launch, params);
  if (tiles == 2) return start_kernel(states_both_ways_f32<32>, launch, params);
  return start_kernel(states_both_ways_f32<64>, launch, params);
}

}  // namespace flashqla::cuda
