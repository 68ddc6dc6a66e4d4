#include "cuda/kernels/chunk_backward/states_instances.cuh"

namespace flashqla::cuda {

int start_states_f16_128(const ChunkBackwardParams& params, int tiles, std::int64_t blocks, void* stream) {
  return start_states<ptx::F16, 128>(params, tiles, blocks, stream);
}

}  // namespace flashqla::cuda
