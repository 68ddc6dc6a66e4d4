#include <cuda_runtime_api.h>

#include "cuda/host/start.cuh"
#include "cuda/kernels/recurrent_forward/kernel.cuh"

namespace flashqla::cuda {

namespace {

template <int kDimK>
int start_width(const RecurrentParams& params, std::int64_t blocks, void* stream) {
  const KernelLaunch launch{blocks, kRecurrentThreads, 0, stream};
  return params.layout == StateLayout::value_key ? start_kernel(recurrent_steps<kDimK, StateLayout::value_key>, launch, params)
                                                 : start_kernel(recurrent_steps<kDimK, StateLayout::key_value>, launch, params);
}

}  // namespace

int start_recurrent(const RecurrentParams& params, std::int32_t padded_k, std::int64_t blocks, void* stream) {
  if (padded_k == 64) return start_width<64>(params, blocks, stream);
  if (padded_k == 128) return start_width<128>(params, blocks, stream);
  return start_width<256>(params, blocks, stream);
}

}  // namespace flashqla::cuda
