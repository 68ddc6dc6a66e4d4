// Attributes of the kernels. Everything below a kernel's entry is forced inline, so that register blocks stay in registers.
#pragma once

#define FLASHQLA_INLINE inline __attribute__((always_inline))
/// For lambdas: `[&](...) FLASHQLA_INLINE_LAMBDA { ... }`.
#define FLASHQLA_INLINE_LAMBDA __attribute__((always_inline))
#define FLASHQLA_RESTRICT __restrict__
#if defined(__clang__)
#define FLASHQLA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define FLASHQLA_UNROLL _Pragma("GCC unroll 32")
#endif
