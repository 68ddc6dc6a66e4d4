// mma.sync with f32 accumulators: m16n8k16 of 16-bit operands, with the conversions to them, and m16n8k8 of TF32 (sm_80 and
// newer).
//
// With g = lane / 4 and t = lane % 4, a lane holds
//   A [16x16]: a0 (g, 2t..), a1 (g + 8, 2t..), a2 (g, 2t + 8..), a3 (g + 8, 2t + 8..), each a pair of neighbouring columns
//   B [16x8]:  b0 (rows 2t.., column g), b1 (rows 2t + 8.., column g), each a pair of neighbouring rows
//   C [16x8]:  c0 (g, 2t), c1 (g, 2t + 1), c2 (g + 8, 2t), c3 (g + 8, 2t + 1)
// The lower index of a pair is in the lower half of the register. m16n8k8 has the same C, and
//   A [16x8]: a0 (g, t), a1 (g + 8, t), a2 (g, t + 4), a3 (g + 8, t + 4)      B [8x8]: b0 (row t, column g), b1 (row t + 4,
//   column g)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx/shared.cuh"

namespace flashqla::cuda::ptx {

using Bf16 = __nv_bfloat16;
using F16 = __half;

template <class Element>
FLASHQLA_DEVICE void mma_m16n8k16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);

template <>
FLASHQLA_DEVICE void mma_m16n8k16<Bf16>(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
FLASHQLA_DEVICE void mma_m16n8k16<F16>(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// To the nearest TF32, of two as near the one further from zero; infinity and NaN stay. The lowest 13 bits mean nothing.
FLASHQLA_DEVICE float round_tf32(float x) {
  std::uint32_t bits = __float_as_uint(x);
  asm("{\n\t.reg .pred finite;\n\ttestp.finite.f32 finite, %1;\n\t@finite add.u32 %0, %0, 0x1000;\n\t}" : "+r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

/// Operands are f32 of which the lowest 13 bits are ignored.
FLASHQLA_DEVICE void mma_m16n8k8_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  const auto bits = [](float x) { return __float_as_uint(x); };
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(bits(a[0])), "r"(bits(a[1])), "r"(bits(a[2])), "r"(bits(a[3])), "r"(bits(b0)), "r"(bits(b1)));
}

/// Two f32 rounded to a pair, `low` in the lower half.
template <class Element>
FLASHQLA_DEVICE std::uint32_t pack_pair(float low, float high);

template <>
FLASHQLA_DEVICE std::uint32_t pack_pair<Bf16>(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <>
FLASHQLA_DEVICE std::uint32_t pack_pair<F16>(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <class Element>
FLASHQLA_DEVICE float2 unpack_pair(std::uint32_t pair);

template <>
FLASHQLA_DEVICE float2 unpack_pair<Bf16>(std::uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

template <>
FLASHQLA_DEVICE float2 unpack_pair<F16>(std::uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

}  // namespace flashqla::cuda::ptx
