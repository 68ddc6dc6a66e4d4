// cp.async: 16 bytes from global to shared memory past the registers, in groups that are waited for (sm_80 and newer).
#pragma once

#include "cuda/ptx/shared.cuh"

namespace flashqla::cuda::ptx {

/// Both addresses are multiples of 16.
FLASHQLA_DEVICE void cp_async_16(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/// The same, or zeros where nothing is `there`: then `from` is not read.
FLASHQLA_DEVICE void cp_async_16_or_zeros(std::uint32_t to, const void* from, bool there) {
  asm volatile(
      "{\n"
      ".reg .pred nothing;\n"
      "setp.eq.s32 nothing, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, nothing;\n"
      "}\n" ::"r"(to),
      "l"(from), "r"(static_cast<int>(there))
      : "memory");
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
