// Addresses in shared memory as PTX instructions take them, and the attribute of every device function.
#pragma once

#include <cstdint>

#define FLASHQLA_DEVICE __device__ __forceinline__

namespace flashqla::cuda::ptx {

/// A 32-bit address in the shared window.
FLASHQLA_DEVICE std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// A zero that the compiler does not see through: an array that is indexed with it stays in local memory.
FLASHQLA_DEVICE int hidden_zero() {
  int zero;
  asm("mov.u32 %0, 0;" : "=r"(zero));
  return zero;
}

}  // namespace flashqla::cuda::ptx
