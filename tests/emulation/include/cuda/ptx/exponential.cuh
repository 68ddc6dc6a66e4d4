// Twin of src/cuda/ptx/exponential.cuh.
#pragma once

#include <cmath>

#include "cuda/ptx/shared.cuh"

namespace flashqla::cuda::ptx {

FLASHQLA_DEVICE float exp2_flushing(float x) {
  const float power = std::exp2(x);
  return power < 0x1p-126f ? 0.0f : power;
}

}  // namespace flashqla::cuda::ptx
