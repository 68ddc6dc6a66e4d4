// Twin of src/cuda/host/start.cuh: the kernel runs when the stream comes to it, which is at once unless it is being captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "emulation/block.hpp"
#include "emulation/runtime.hpp"
#include "emulation/shared_memory.hpp"

namespace flashqla::cuda {

struct KernelLaunch {
  std::int64_t blocks;
  int threads;
  std::size_t shared_bytes;
  void* stream;
};

template <class... Params>
int start_kernel(void (*kernel)(Params...), const KernelLaunch& launch, const std::type_identity_t<Params>&... params) {
  if (launch.blocks == 0) return cudaSuccess;
  if (launch.shared_bytes > emulation::kMostSharedBytes) return cudaErrorInvalidValue;  // as cudaFuncSetAttribute answers
  using Call = std::tuple<void (*)(Params...), Params...>;
  const auto body = [](const void* call) {
    std::apply([](auto function, const auto&... values) { function(values...); }, *static_cast<const Call*>(call));
  };
  return emulation::enqueue(launch.stream, [=, call = Call(kernel, params...)] {
    return emulation::run_blocks({launch.blocks, launch.threads, launch.shared_bytes}, body, &call);
  });
}

}  // namespace flashqla::cuda
