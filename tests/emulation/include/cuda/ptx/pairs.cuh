// Twin of src/cuda/ptx/pairs.cuh.
#pragma once

#include "cuda/ptx/mma.cuh"

namespace flashqla::cuda::ptx {

FLASHQLA_DEVICE std::uint32_t multiply_f16_pairs(std::uint32_t x, std::uint32_t y) {
  const float2 a = unpack_pair<F16>(x), b = unpack_pair<F16>(y);
  return pack_pair<F16>(a.x * b.x, a.y * b.y);  // products of f16 are exact in f32: one rounding
}

}  // namespace flashqla::cuda::ptx
