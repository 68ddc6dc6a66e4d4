// The hardware's exponential (all architectures).
#pragma once

#include "cuda/ptx/shared.cuh"

namespace flashqla::cuda::ptx {

/// 2^x, two units in the last place off at most; 0 where that is below 2^-126. exp2f gives those numbers, for four instructions.
FLASHQLA_DEVICE float exp2_flushing(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

}  // namespace flashqla::cuda::ptx
