// Blocks of a cluster: on multiprocessors near each other, with each other's shared memory (sm_90 and newer). Warpgroups of a
// block: registers that move between them (sm_90a).
#pragma once

#include "cuda/ptx/shared.cuh"

/// Attribute of a kernel whose blocks are clusters of so many. The front end refuses it for older devices, for which such a
/// kernel has no body.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FLASHQLA_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define FLASHQLA_CLUSTER(blocks)
#endif

namespace flashqla::cuda::ptx {

/// Of this block in its cluster.
FLASHQLA_DEVICE int cluster_rank() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

/// Waits for all threads of all blocks of the cluster.
FLASHQLA_DEVICE void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/// By all warps of a warpgroup, in a role that is one branch of one if: what it has more than so many it gives away, or it waits
/// until it has so many. All roles together must not want more than the kernel was started with.
template <int kCount>
FLASHQLA_DEVICE void keep_registers() {
  static_assert(kCount >= 24 && kCount <= 256 && kCount % 8 == 0, "the immediate of setmaxnreg");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
FLASHQLA_DEVICE void take_registers() {
  static_assert(kCount >= 24 && kCount <= 256 && kCount % 8 == 0, "the immediate of setmaxnreg");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace flashqla::cuda::ptx
