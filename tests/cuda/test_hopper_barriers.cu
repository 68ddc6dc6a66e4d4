// Barriers of ptx/mbarrier.cuh and ptx/barrier.cuh over many turns, in which now one side is late and now the other: what was
// written before an arrival is there after the wait, and nobody passes early.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"

#include "device/hopper.cuh"

namespace flashqla::cuda {
namespace {

constexpr int kTurns = 200;

/// Some turns of some who are late.
[[maybe_unused]] FLASHQLA_DEVICE void dawdle(int turn, int who) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const unsigned x = static_cast<unsigned>(turn) * 7 + static_cast<unsigned>(who) * 13;
  if (x % 5 < 2) __nanosleep(x % 11 * 100);
#endif
}

/// A warp produces a number for each lane, into stages in turn; the warps before it read them all. found[turn][consumer][lane].
template <int kStages, int kConsumers>
__global__ void produce_and_consume(int* found) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ volatile int numbers[kStages][32];
  __shared__ std::uint64_t barriers[2][kStages];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const auto full = [&](int stage) { return ptx::shared_address(&barriers[0][stage]); };
  const auto empty = [&](int stage) { return ptx::shared_address(&barriers[1][stage]); };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(full(stage), 1);
      ptx::mbarrier_init(empty(stage), kConsumers);
    }
    ptx::mbarrier_fence();
  }
  for (int stage = 0; stage < kStages; ++stage) numbers[stage][lane] = -1;
  __syncthreads();
  for (int turn = 0; turn < kTurns; ++turn) {
    const int stage = turn % kStages, parity = turn / kStages % 2;
    dawdle(turn, warp);
    if (warp == kConsumers) {
      ptx::mbarrier_wait(empty(stage), parity ^ 1);  // passes at once the first time
      numbers[stage][lane] = turn * 32 + lane;
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(full(stage));
    } else {
      ptx::mbarrier_wait(full(stage), parity);
      found[(turn * kConsumers + warp) * 32 + lane] = numbers[stage][31 - lane];
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(empty(stage));
    }
  }
#endif
}

template <int kStages, int kConsumers>
void expect_all_numbers() {
  const DeviceArray<int> found(kTurns * kConsumers * 32);
  check(start_kernel(produce_and_consume<kStages, kConsumers>, {1, 32 * (kConsumers + 1), 0, nullptr}, found.data()),
        "produce_and_consume");
  const std::string what = std::to_string(kStages) + " stages, " + std::to_string(kConsumers) + " consumers, turns by lanes";
  expect_matrix(what, found.fetch(), 0, kTurns * kConsumers, 32,
                [](int row, int lane) { return row / kConsumers * 32 + 31 - lane; });
}

TEST_F(Hopper, PhasesOfBarriers) {
  expect_all_numbers<1, 1>();
  expect_all_numbers<1, 3>();
  expect_all_numbers<2, 2>();
  expect_all_numbers<3, 4>();
}

/// The two blocks of a cluster in turn: each waits for the other to arrive at its barrier, at which it never arrives itself, and
/// counts on. found[turn]: what the one whose turn it is found.
__global__ void FLASHQLA_CLUSTER(2) count_in_turn(volatile int* counter, int* found) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ std::uint64_t barriers[3];  // the one in the middle is used
  const int rank = ptx::cluster_rank();
  const std::uint32_t own = ptx::shared_address(&barriers[1]), others = ptx::address_in_block(own, 1 - rank);
  if (threadIdx.x == 0) {
    for (const auto& barrier : barriers) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
    ptx::mbarrier_fence();
  }
  ptx::cluster_barrier();
  if (threadIdx.x == 0) {
    for (int turn = rank; turn < kTurns; turn += 2) {
      if (turn > 0) ptx::mbarrier_wait(own, (turn - 1) / 2 % 2);
      found[turn] = *counter;
      dawdle(turn, rank);
      *counter = turn + 1;
      __threadfence();
      ptx::mbarrier_arrive_in_cluster(others);
    }
  }
  __syncwarp();
  ptx::cluster_barrier();
#endif
}

TEST_F(Hopper, ArrivalsInTheOtherBlock) {
  const DeviceArray<int> counter(std::vector<int>{0}), found(kTurns);
  check(start_kernel(count_in_turn, {2, 32, 0, nullptr}, counter.data(), found.data()), "count_in_turn");
  expect_matrix("counter by turns", found.fetch(), 0, 1, kTurns, [](int, int turn) { return turn; });
  EXPECT_EQ(counter.fetch()[0], kTurns);
}

// Two groups of warps: the first writes and comes, the second waits and reads, and comes in its turn, before which nothing is
// overwritten.
constexpr int kGroup = 128, kNamedTurns = 50;

__global__ void come_and_wait(int* found) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kWritten = 3, kRead = 15;
  __shared__ volatile int numbers[kGroup];
  const int group = static_cast<int>(threadIdx.x) / kGroup, thread = static_cast<int>(threadIdx.x) % kGroup;
  if (group == 1) ptx::named_barrier_arrive(kRead, 2 * kGroup);
  for (int turn = 0; turn < kNamedTurns; ++turn) {
    dawdle(turn, group * 4 + thread / 32);
    __syncwarp();
    if (group == 0) {
      ptx::named_barrier(kRead, 2 * kGroup);
      numbers[thread] = turn * kGroup + thread;
      ptx::named_barrier_arrive(kWritten, 2 * kGroup);
    } else {
      ptx::named_barrier(kWritten, 2 * kGroup);
      found[turn * kGroup + thread] = numbers[kGroup - 1 - thread];  // of another warp
      if (turn + 1 < kNamedTurns) ptx::named_barrier_arrive(kRead, 2 * kGroup);
    }
  }
#endif
}

TEST_F(Hopper, NamedBarriersToComeTo) {
  const DeviceArray<int> found(kNamedTurns * kGroup);
  check(start_kernel(come_and_wait, {1, 2 * kGroup, 0, nullptr}, found.data()), "come_and_wait");
  expect_matrix("turns by threads", found.fetch(), 0, kNamedTurns, kGroup,
                [](int turn, int thread) { return turn * kGroup + kGroup - 1 - thread; });
}

/// Two groups vote at barriers of their own. Of turn t, thread t of the first group says yes alone and all of the second but it
/// say no, until after kGroup turns nobody of the first and everybody of the second says yes.
__global__ void vote(int* found) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ volatile int voted[2 * kGroup];
  const int group = static_cast<int>(threadIdx.x) / kGroup, thread = static_cast<int>(threadIdx.x) % kGroup;
  for (int turn = 0; turn <= kGroup; ++turn) {
    dawdle(turn, group * 4 + thread / 32);
    __syncwarp();
    voted[threadIdx.x] = turn;
    const bool any = ptx::named_barrier_any(1 + group, kGroup, group == 0 ? thread == turn : turn == kGroup);
    const bool written = voted[group * kGroup + (thread + 32) % kGroup] == turn;
    found[turn * 2 * kGroup + threadIdx.x] = written ? static_cast<int>(any) : -2;
    ptx::named_barrier(1 + group, kGroup);
  }
#endif
}

TEST_F(Hopper, VotesAtNamedBarriers) {
  const DeviceArray<int> found((kGroup + 1) * 2 * kGroup);
  check(start_kernel(vote, {1, 2 * kGroup, 0, nullptr}, found.data()), "vote");
  expect_matrix("turns by threads", found.fetch(), 0, kGroup + 1, 2 * kGroup,
                [](int turn, int thread) { return static_cast<int>((thread < kGroup) == (turn < kGroup)); });
}

}  // namespace
}  // namespace flashqla::cuda
