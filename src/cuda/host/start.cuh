// Starts a kernel that wants more shared memory than a block has without asking.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace flashqla::cuda {

template <class Params>
int start_kernel(void (*kernel)(Params), const Params& params, std::int64_t blocks, int threads, std::size_t shared_bytes,
                 void* stream) {
  if (blocks == 0) return cudaSuccess;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (status != cudaSuccess) return status;
  Params copy = params;
  void* arguments[] = {&copy};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
                          dim3(static_cast<unsigned>(threads)), arguments, shared_bytes, static_cast<cudaStream_t>(stream));
}

}  // namespace flashqla::cuda
