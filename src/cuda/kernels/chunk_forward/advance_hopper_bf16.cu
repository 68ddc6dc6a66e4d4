#include "cuda/host/start.cuh"
#include "cuda/kernels/chunk_forward/advance_hopper_kernel.cuh"
#include "cuda/kernels/chunk_forward/start.hpp"

namespace flashqla::cuda {

int start_advance_hopper_bf16(const ChunkForwardParams& params, const ChunkForwardMaps& maps, std::int64_t blocks, void* stream) {
  return start_advance_hopper<ptx::Bf16>(params, maps, blocks, stream);
}

bool has_hopper_code() {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, advance_states_hopper<ptx::Bf16>);
  if (status != cudaSuccess) cudaGetLastError();
  return status == cudaSuccess && attributes.ptxVersion >= 90;
}

}  // namespace flashqla::cuda
