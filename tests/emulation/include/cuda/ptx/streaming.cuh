// Twin of src/cuda/ptx/streaming.cuh.
#pragma once

#include "cuda/ptx/shared.cuh"
#include "emulation/language.hpp"

namespace flashqla::cuda::ptx {

template <class Vector>
FLASHQLA_DEVICE Vector load_once(const Vector* from) {
  return *from;
}
FLASHQLA_DEVICE void prefetch(const void*) {}
FLASHQLA_DEVICE float zero_here() { return 0.0f; }
template <class Vector>
FLASHQLA_DEVICE void store_once(Vector* to, const Vector& x) {
  *to = x;
}

}  // namespace flashqla::cuda::ptx
