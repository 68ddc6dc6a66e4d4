// Twin of src/cuda/ptx/barrier.cuh.
#pragma once

#include "cuda/ptx/shared.cuh"
#include "emulation/block.hpp"

namespace flashqla::cuda::ptx {

FLASHQLA_DEVICE void named_barrier(int id, int threads) { emulation::wait_at_barrier(id, threads); }

}  // namespace flashqla::cuda::ptx
