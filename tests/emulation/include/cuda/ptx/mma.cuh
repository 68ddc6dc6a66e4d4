// Twin of src/cuda/ptx/mma.cuh.
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
  emulation::multiply_bf16(c, a, b0, b1);
}
template <>
FLASHQLA_DEVICE void mma_m16n8k16<F16>(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  emulation::multiply_f16(c, a, b0, b1);
}

FLASHQLA_DEVICE float round_tf32(float x) {
  const std::uint32_t bits = __float_as_uint(x);
  return (bits & 0x7f800000u) == 0x7f800000u ? x : __uint_as_float(bits + 0x1000u);
}
FLASHQLA_DEVICE void mma_m16n8k8_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  std::uint32_t bits[4];
  for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(a[i]);
  emulation::multiply_tf32(c, bits, __float_as_uint(b0), __float_as_uint(b1));
}

template <class Element>
FLASHQLA_DEVICE std::uint32_t pack_pair(float low, float high) {
  return Element(low).bits | static_cast<std::uint32_t>(Element(high).bits) << 16;
}

template <class Element>
FLASHQLA_DEVICE float2 unpack_pair(std::uint32_t pair) {
  Element low, high;
  low.bits = static_cast<std::uint16_t>(pair);
  high.bits = static_cast<std::uint16_t>(pair >> 16);
  return {static_cast<float>(low), static_cast<float>(high)};
}

}  // namespace flashqla::cuda::ptx
