#include "cuda/kernels/chunk_forward/instances.cuh"

namespace flashqla::cuda {

int start_advance_bf16(const ChunkForwardParams& params, std::int32_t padded_k, int tiles, std::int64_t blocks, void* stream) {
  return start_advance<ptx::Bf16>(params, padded_k, tiles, blocks, stream);
}

}  // namespace flashqla::cuda
