// Copies by the copy engine (TMA), between global and shared memory, that report their bytes to an mbarrier (sm_90 and newer).
// One thread starts them. A tensor map, a __grid_constant__ parameter of the kernel, says where a tensor is
// and how a box of it lies in shared memory.
#pragma once

#include "cuda/ptx/shared.cuh"

namespace flashqla::cuda::ptx {

/// Writes of this thread to shared memory are seen by what the copy engine and WGMMA do after a barrier.
FLASHQLA_DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// A box of a tensor of four dimensions from `column` of `head` of `token` of `batch` on, what is outside as zeros. Places in
/// shared memory are multiples of 128 bytes (1024 with a swizzle of 128 bytes).
FLASHQLA_DEVICE void copy_box(std::uint32_t to, const void* map, int column, int head, int token, int batch,
                              std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(token), "r"(batch)
      : "memory");
}
/// The same to the same place of several blocks of the cluster, `blocks` with a bit for each; each of their barriers has the
/// bytes reported.
FLASHQLA_DEVICE void copy_box_to_all(std::uint32_t to, const void* map, int column, int head, int token, int batch,
                                     std::uint32_t barrier, std::uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(token), "r"(batch), "h"(blocks)
      : "memory");
}
/// Bytes as they are, likewise: both places and the number are multiples of 16.
FLASHQLA_DEVICE void copy_bytes_to_all(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier,
                                       std::uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(blocks)
      : "memory");
}

/// A box from shared memory to a tensor; what is beyond the tensor's ends is left out. Negative coordinates, which a load may
/// have, are an illegal instruction here.
FLASHQLA_DEVICE void store_box(const void* map, int column, int head, int token, int batch, std::uint32_t from) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(from),
               "r"(column), "r"(head), "r"(token), "r"(batch)
               : "memory");
}
/// Ends this thread's group of stores.
FLASHQLA_DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until shared memory has been read by all but at most `kPending` of this thread's latest groups.
template <int kPending>
FLASHQLA_DEVICE void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
/// Waits until all of this thread's stores are done.
FLASHQLA_DEVICE void store_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace flashqla::cuda::ptx
