// Named barriers of a block: some of its warps wait for each other.
#pragma once

#include "cuda/ptx/shared.cuh"

namespace flashqla::cuda::ptx {

/// Waits until `threads` (a multiple of 32) have come to barrier `id`, 1 to 15: __syncthreads has 0. What they wrote to shared
/// memory before is seen by all of them after.
FLASHQLA_DEVICE void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

}  // namespace flashqla::cuda::ptx
