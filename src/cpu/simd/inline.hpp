// Attributes of the kernels. Everything below a kernel's entry is forced inline, so that register blocks stay in registers.
#pragma once

#define FLASHQLA_INLINE inline __attribute__((always_inline))
/// For lambdas: `[&](...) FLASHQLA_INLINE_LAMBDA { ... }`.
#define FLASHQLA_INLINE_LAMBDA __attribute__((always_inline))
/// For the phases of a kernel: each gets the registers to itself.
#define FLASHQLA_NOINLINE __attribute__((noinline))
#define FLASHQLA_RESTRICT __restrict__
#if defined(__clang__)
#define FLASHQLA_UNROLL _Pragma("clang loop unroll(full)")
#define FLASHQLA_NO_UNROLL _Pragma("clang loop unroll(disable)")
#else
#define FLASHQLA_UNROLL _Pragma("GCC unroll 32")
#define FLASHQLA_NO_UNROLL _Pragma("GCC unroll 1")
#endif

namespace flashqla::cpu {

/// Asks for the cache line at p, into the second-level cache or closer. Any address is allowed.
FLASHQLA_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }
/// The same into the first-level cache.
FLASHQLA_INLINE void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }

}  // namespace flashqla::cpu
