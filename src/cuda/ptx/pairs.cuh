// Arithmetic on pairs of f16 in one register (sm_53 and newer).
#pragma once

#include "cuda/ptx/shared.cuh"

namespace flashqla::cuda::ptx {

/// Both halves multiplied.
FLASHQLA_DEVICE std::uint32_t multiply_f16_pairs(std::uint32_t x, std::uint32_t y) {
  std::uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  return product;
}

}  // namespace flashqla::cuda::ptx
