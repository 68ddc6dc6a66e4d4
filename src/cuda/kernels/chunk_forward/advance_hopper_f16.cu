#include "cuda/host/start.cuh"
#include "cuda/kernels/chunk_forward/advance_hopper_kernel.cuh"
#include "cuda/kernels/chunk_forward/start.hpp"

namespace flashqla::cuda {

int start_advance_hopper_f16(const ChunkForwardParams& params, const ChunkForwardMaps& maps, std::int64_t blocks, void* stream) {
  return start_advance_hopper<ptx::F16>(params, maps, blocks, stream);
}

}  // namespace flashqla::cuda
