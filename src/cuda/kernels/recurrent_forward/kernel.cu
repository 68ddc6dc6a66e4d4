#include <cuda_runtime_api.h>

#include "cuda/host/start.cuh"
#include "cuda/kernels/recurrent_forward/kernel.cuh"

namespace flashqla::cuda {

namespace {

template <int kDimK, StateLayout kLayout>
int start_layout(const RecurrentParams& params, Steps steps, const KernelLaunch& launch) {
  return steps == Steps::any ? start_kernel(recurrent_steps<kDimK, kLayout, Steps::any>, launch, params)
                             : start_kernel(recurrent_steps<kDimK, kLayout, Steps::one_even>, launch, params);
}

template <int kDimK>
int start_width(const RecurrentParams& params, Steps steps, const KernelLaunch& launch) {
  return params.layout == StateLayout::value_key ? start_layout<kDimK, StateLayout::value_key>(params, steps, launch)
                                                 : start_layout<kDimK, StateLayout::key_value>(params, steps, launch);
}

}  // namespace

int start_recurrent(const RecurrentParams& params, std::int32_t padded_k, Steps steps, std::int64_t blocks, void* stream) {
  const KernelLaunch launch{blocks, kRecurrentThreads, 0, stream};
  if (padded_k == 64) return start_width<64>(params, steps, launch);
  if (padded_k == 128) return start_width<128>(params, steps, launch);
  return start_width<256>(params, steps, launch);
}

}  // namespace flashqla::cuda
