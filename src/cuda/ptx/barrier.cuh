// Named barriers of a block: some of its warps wait for each other.
#pragma once

#include "cuda/ptx/shared.cuh"

namespace flashqla::cuda::ptx {

/// Waits until `threads` (a multiple of 32) have come to barrier `id`, 1 to 15: __syncthreads has 0. What they wrote to shared
/// memory before is seen by all of them after.
FLASHQLA_DEVICE void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

/// Comes to a barrier that others wait at, and goes on: what was written to shared memory before is seen by them.
FLASHQLA_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// The same as named_barrier; returns whether `value` of any of them is true.
FLASHQLA_DEVICE bool named_barrier_any(int id, int threads, bool value) {
  std::uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred value, any;\n"
      "setp.ne.b32 value, %3, 0;\n"
      "barrier.cta.red.or.pred any, %1, %2, value;\n"
      "selp.u32 %0, 1, 0, any;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(value))
      : "memory");
  return any != 0;
}

}  // namespace flashqla::cuda::ptx
