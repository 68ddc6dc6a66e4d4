// Starts a kernel, with more shared memory than a block has without asking if it wants so.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace flashqla::cuda {

struct KernelLaunch {
  std::int64_t blocks;
  int threads;
  std::size_t shared_bytes;  // dynamic
  void* stream;
};

/// Returns a cudaError_t. `params` are copied before it returns.
template <class... Params>
int start_kernel(void (*kernel)(Params...), const KernelLaunch& launch, const std::type_identity_t<Params>&... params) {
  if (launch.blocks == 0) return cudaSuccess;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(launch.shared_bytes));
  if (status != cudaSuccess) return status;
  void* arguments[] = {const_cast<Params*>(&params)...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(launch.blocks)),
                          dim3(static_cast<unsigned>(launch.threads)), arguments, launch.shared_bytes,
                          static_cast<cudaStream_t>(launch.stream));
}

}  // namespace flashqla::cuda
