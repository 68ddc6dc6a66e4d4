#include "cuda/kernels/chunk_forward/extras.cuh"

#include "cuda/kernels/chunk_forward/start.hpp"

namespace flashqla::cuda {

int start_extras_bf16(const ChunkForwardParams& params, std::int32_t padded_k, std::int64_t blocks, void* stream) {
  return start_extras<ptx::Bf16>(params, padded_k, blocks, stream);
}

}  // namespace flashqla::cuda
