// cp.async: 16 bytes from global to shared memory past the registers, in groups that are waited for (sm_80 and newer).
#pragma once

#include "cuda/ptx/shared.cuh"

namespace flashqla::cuda::ptx {

/// `bytes` (0 to 16) from `from`, the rest of the 16 zero. Both addresses are multiples of 16; with 0 bytes `from` is not read.
FLASHQLA_DEVICE void cp_async_16(std::uint32_t to, const void* from, std::uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/// Ends this thread's group of copies.
FLASHQLA_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `kPending` of this thread's latest groups are under way. What other threads copied needs a barrier
/// besides.
template <int kPending>
FLASHQLA_DEVICE void cp_async_wait() {
  static_assert(kPending >= 0 && kPending < 8, "the immediate of wait_group");
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashqla::cuda::ptx
