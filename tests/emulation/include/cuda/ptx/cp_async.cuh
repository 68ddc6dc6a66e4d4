// Twin of src/cuda/ptx/cp_async.cuh.
#pragma once

#include "cuda/ptx/shared.cuh"
#include "emulation/warp.hpp"

namespace flashqla::cuda::ptx {

FLASHQLA_DEVICE void cp_async_16(std::uint32_t to, const void* from) { emulation::copy_later(to, from, 16); }
FLASHQLA_DEVICE void cp_async_16_or_zeros(std::uint32_t to, const void* from, bool there) {
  emulation::copy_later(to, from, there ? 16 : 0);
}
FLASHQLA_DEVICE void cp_async_commit() { emulation::end_group_of_copies(); }

template <int kPending>
FLASHQLA_DEVICE void cp_async_wait(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  static_assert(kPending >= 0 && kPending < 8, "the immediate of wait_group");
  emulation::wait_for_copies(kPending, {file, line});
}

}  // namespace flashqla::cuda::ptx
