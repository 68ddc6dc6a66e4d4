#include "cuda/kernels/chunk_backward/gradients_instances.cuh"

namespace flashqla::cuda {

int start_gradients_bf16(const ChunkBackwardParams& params, std::int32_t padded_k, std::int64_t blocks, std::size_t most_shared,
                         void* stream) {
  return start_gradients<ptx::Bf16>(params, padded_k, blocks, most_shared, stream);
}

}  // namespace flashqla::cuda
