// Twin of src/cuda/ptx/barrier.cuh.
#pragma once

#include "cuda/ptx/shared.cuh"
#include "emulation/block.hpp"

namespace flashqla::cuda::ptx {

FLASHQLA_DEVICE void named_barrier(int id, int threads, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::wait_at_barrier(id, threads, {file, line});
}

}  // namespace flashqla::cuda::ptx
