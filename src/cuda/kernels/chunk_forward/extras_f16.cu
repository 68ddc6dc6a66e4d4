#include "cuda/kernels/chunk_forward/extras.cuh"

#include "cuda/kernels/chunk_forward/start.hpp"

namespace flashqla::cuda {

int start_extras_f16(const ChunkForwardParams& params, std::int32_t padded_k, std::int64_t blocks, void* stream) {
  return start_extras<ptx::F16>(params, padded_k, blocks, stream);
}

}  // namespace flashqla::cuda
