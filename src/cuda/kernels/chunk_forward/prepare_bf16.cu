#include "cuda/kernels/chunk_forward/instances.cuh"

namespace flashqla::cuda {

int start_prepare_bf16(const ChunkForwardParams& params, std::int32_t padded_k, std::int64_t blocks, void* stream) {
  return start_prepare<ptx::Bf16>(params, padded_k, blocks, stream);
}

}  // namespace flashqla::cuda
