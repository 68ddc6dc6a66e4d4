// mbarrier: a barrier in shared memory that counts arrivals and bytes (sm_90 and newer). It goes from phase to phase: a phase
// ends when as many have arrived as the barrier was made for and all bytes that were announced have come. Who waits names the
// parity of the phase, 0 for the first.
#pragma once

#include "cuda/ptx/shared.cuh"

namespace flashqla::cuda::ptx {

/// By one thread, before mbarrier_fence and a barrier of all who use it.
FLASHQLA_DEVICE void mbarrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Makes the barriers that this thread has made known to the cluster and to copies.
FLASHQLA_DEVICE void mbarrier_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// Announces bytes of copies that will report to the barrier, and arrives.
FLASHQLA_DEVICE void mbarrier_arrive_expecting(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
FLASHQLA_DEVICE void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// The same place in the shared memory of block `rank` of the cluster.
FLASHQLA_DEVICE std::uint32_t address_in_block(std::uint32_t address, int rank) {
  std::uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
/// `barrier`: from address_in_block.
FLASHQLA_DEVICE void mbarrier_arrive_in_cluster(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Waits until the phase of that parity has ended. Some 70 clocks if it has.
FLASHQLA_DEVICE void mbarrier_wait(std::uint32_t barrier, int parity) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

}  // namespace flashqla::cuda::ptx
