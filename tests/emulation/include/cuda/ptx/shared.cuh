// Twin of src/cuda/ptx/shared.cuh.
#pragma once

#include <cstddef>
#include <cstdint>

#include "emulation/shared_memory.hpp"

#define FLASHQLA_DEVICE __device__ __forceinline__

namespace flashqla::cuda::ptx {

FLASHQLA_DEVICE std::uint32_t shared_address(const void* pointer) { return emulation::to_shared_address(pointer); }

FLASHQLA_DEVICE int hidden_zero() { return 0; }

}  // namespace flashqla::cuda::ptx
