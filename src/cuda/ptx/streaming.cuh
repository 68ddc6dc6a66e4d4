// Loads and stores of global memory that is used once, and prefetches.
//
// The loads are volatile, so that all of them are issued where they stand, and name no memory. What else may stand here: .cs,
// with which the second-level cache gives up the lines before others (lines that are read and written are then 2 % slower),
// .L1::no_allocate and, for loads, .L1::no_allocate.L2::256B.
#pragma once

#include "cuda/ptx/shared.cuh"

#define FLASHQLA_LOAD_ONCE "ld.global"
#define FLASHQLA_STORE_ONCE "st.global"

namespace flashqla::cuda::ptx {

FLASHQLA_DEVICE float4 load_once(const float4* from) {
  float4 x;
  asm volatile(FLASHQLA_LOAD_ONCE ".v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from));
  return x;
}
FLASHQLA_DEVICE uint2 load_once(const uint2* from) {
  uint2 x;
  asm volatile(FLASHQLA_LOAD_ONCE ".v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
  return x;
}

/// Asks for the line at an address that is readable, for the second-level cache.
FLASHQLA_DEVICE void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

/// 0, made where it stands: registers that loads fill in the usual case are not cleared before it is known that they do not.
FLASHQLA_DEVICE float zero_here() {
  float x;
  asm volatile("mov.f32 %0, 0f00000000;" : "=f"(x));
  return x;
}

FLASHQLA_DEVICE void store_once(float4* to, const float4& x) {
  asm volatile(FLASHQLA_STORE_ONCE ".v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}
FLASHQLA_DEVICE void store_once(uint2* to, const uint2& x) {
  asm volatile(FLASHQLA_STORE_ONCE ".v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(x.x), "r"(x.y) : "memory");
}

}  // namespace flashqla::cuda::ptx
