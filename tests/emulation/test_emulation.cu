// The emulation sees what it is there for: each kernel here but the right ones has a mistake, and the emulation names it.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "common/scalar.hpp"
#include "cuda/host/start.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashqla::cuda {

/// Whether a kernel does what it should with one mistake or without.
enum class Mistake { made, none };

__device__ int thread() { return static_cast<int>(threadIdx.x); }

// Kernels with dynamic shared memory are functions of this namespace, not of one without a name.
__global__ void write_shared(int count) {
  extern __shared__ __align__(128) std::byte memory[];
  for (int at = thread(); at < count; at += 32) memory[at] = std::byte{0};
}
__global__ void load_rows(int rows, int shift) {
  extern __shared__ __align__(128) std::byte memory[];
  std::uint32_t r[4];
  ptx::ldmatrix_x4(r, ptx::shared_address(memory) + static_cast<std::uint32_t>(thread() % rows * 16 + shift));
}
__global__ void read_pair(int first, float* to) {
  extern __shared__ __align__(128) std::byte memory[];
  to[0] = reinterpret_cast<const float2*>(reinterpret_cast<const float*>(memory) + first)->y;
}
__global__ void copy_and_read(const float* from, float* to, Mistake mistake) {
  extern __shared__ __align__(128) std::byte memory[];
  ptx::cp_async_16(ptx::shared_address(memory) + static_cast<std::uint32_t>(thread()) * 16, from + thread() * 4);
  if (mistake == Mistake::none) ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  to[thread()] = reinterpret_cast<float*>(memory)[thread() * 4];
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
}
__global__ void copy_and_return(const float* from) {
  extern __shared__ __align__(128) std::byte memory[];
  ptx::cp_async_16(ptx::shared_address(memory) + static_cast<std::uint32_t>(thread()) * 16, from + thread() * 4);
  ptx::cp_async_commit();
}

namespace {

/// Values of threads from those a warp further, or a lane.
__global__ void exchange(int step, Mistake mistake, int* to) {
  __shared__ int values[128];
  values[thread()] = thread();
  if (mistake == Mistake::none && step < 32) __syncwarp();
  if (mistake == Mistake::none && step >= 32) __syncthreads();
  to[thread()] = values[(thread() + step) % 128];
}
__global__ void wait_for_nobody() {
  if (thread() >= 32) ptx::named_barrier(3, 96);
  __syncthreads();
}
__global__ void shuffle_apart(float* to) {
  if (thread() < 16) {
    to[thread()] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
  } else {
    __syncwarp();
  }
}
__global__ void shuffle_alone(float* to) {
  if (thread() == 31) return;
  to[thread()] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}
__global__ void return_early(int* to) {
  if (thread() < 40) return;
  __syncwarp();
  __syncthreads();
  to[thread()] = 1;
}
__global__ void read_before_write(float* to, Mistake mistake) {
  __shared__ float value;
  if (mistake == Mistake::none) value = 1.0f;
  to[0] = value;
}
__global__ void take_turns(int* turns, int* to) {
  if (thread() == 0) to[blockIdx.x] = atomicAdd(turns, 1);
}
/// Element (0, 0) of A times 1, for every bit pattern.
__global__ void multiply_by_one(float* to) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    float c[4] = {};
    const std::uint32_t a[4] = {thread() == 0 ? bits : 0, 0, 0, 0};
    ptx::mma_m16n8k16<ptx::F16>(c, a, thread() == 0 ? ptx::pack_pair<ptx::F16>(1.0f, 0.0f) : 0, 0);
    if (thread() == 0) to[bits] = c[0];
  }
}

/// What the launch of a kernel says; empty if nothing.
template <class... Params>
std::string words_of(void (*kernel)(Params...), int threads, std::size_t shared_bytes,
                     const std::type_identity_t<Params>&... params) {
  const int status = start_kernel(kernel, {1, threads, shared_bytes, nullptr}, params...);
  return status == cudaSuccess ? "" : cudaGetErrorString(static_cast<cudaError_t>(status));
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Of 50 seeds, those with which `exchange` goes wrong.
int wrong_exchanges(int step, Mistake mistake, int threads) {
  int wrong = 0;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    emulation::set_seed(seed);
    std::vector<int> to(128);
    EXPECT_EQ(words_of(exchange, 128, 0, step, mistake, to.data()), "");
    bool right = true;
    for (int t = 0; t < threads; ++t) right = right && to[static_cast<std::size_t>(t)] == (t + step) % 128;
    if (!right) ++wrong;
  }
  emulation::set_seed(1);
  return wrong;
}

TEST(Emulation, AMissingBarrierIsSeen) {
  EXPECT_GT(wrong_exchanges(32, Mistake::made, 128), 10);
  EXPECT_EQ(wrong_exchanges(32, Mistake::none, 128), 0);
}
TEST(Emulation, AMissingSyncwarpIsSeen) {
  EXPECT_GT(wrong_exchanges(1, Mistake::made, 31), 10);
  EXPECT_EQ(wrong_exchanges(1, Mistake::none, 31), 0);
}
TEST(Emulation, ACopyIsThereWhenItHasBeenWaitedFor) {
  std::vector<float> to(32);
  alignas(16) float from[128];
  for (int i = 0; i < 128; ++i) from[i] = static_cast<float>(i);
  EXPECT_EQ(words_of(copy_and_read, 32, 512, from, to.data(), Mistake::none), "");
  for (std::size_t i = 0; i < 32; ++i) EXPECT_EQ(to[i], static_cast<float>(4 * i));
  EXPECT_EQ(words_of(copy_and_read, 32, 512, from, to.data(), Mistake::made), "");
  for (float x : to) EXPECT_TRUE(std::isnan(x));
  EXPECT_TRUE(contains(words_of(copy_and_return, 32, 512, from), "asynchronous copies"));
  EXPECT_TRUE(contains(words_of(copy_and_return, 32, 512, from + 1), "not aligned"));
}
TEST(Emulation, ADeadlockIsNamed) {
  const std::string words = words_of(wait_for_nobody, 96, 0);
  EXPECT_TRUE(contains(words, "warp 0: at barrier 0 for all threads (test_emulation.cu:")) << words;
  EXPECT_TRUE(contains(words, "warp 2: at barrier 3 for 96 threads")) << words;
}
TEST(Emulation, SharedMemoryHasAnEnd) {
  EXPECT_EQ(words_of(write_shared, 32, 256, 256), "");
  EXPECT_TRUE(contains(words_of(write_shared, 32, 256, 257), "byte 256 of the 256 bytes"));
  EXPECT_EQ(words_of(load_rows, 32, 512, 32, 0), "");
  EXPECT_TRUE(contains(words_of(load_rows, 32, 496, 32, 0), "ldmatrix: byte 496 of 496"));
  EXPECT_TRUE(contains(words_of(load_rows, 32, 512, 31, 8), "not aligned"));
  EXPECT_EQ(words_of(write_shared, 32, emulation::kMostSharedBytes + 1, 0), "invalid argument");
}
TEST(Emulation, AMisalignedPairIsSeen) {
  float to = 0.0f;
  EXPECT_EQ(words_of(read_pair, 1, 256, 2, &to), "");
  EXPECT_DEATH(words_of(read_pair, 1, 256, 3, &to), "test_emulation.cu.*misaligned");
}
TEST(Emulation, LanesThatDoNotMeetAreNamed) {
  std::vector<float> to(32);
  const std::string apart = words_of(shuffle_apart, 32, 0, to.data());
  EXPECT_TRUE(contains(apart, "a shuffle") && contains(apart, "__syncwarp")) << apart;
  const std::string alone = words_of(shuffle_alone, 32, 0, to.data());
  EXPECT_TRUE(contains(alone, "a shuffle by lanes 0-30 of warp 0 alone")) << alone;
}
TEST(Emulation, ThreadsThatHaveReturnedAreNotWaitedFor) {
  std::vector<int> to(96);
  EXPECT_EQ(words_of(return_early, 96, 0, to.data()), "");
  for (std::size_t i = 0; i < to.size(); ++i) EXPECT_EQ(to[i], i < 40 ? 0 : 1);
}
TEST(Emulation, SharedVariablesBeginAsNanAndThoseOfThreadsAreLeftAlone) {
  thread_local int of_the_thread = 0;
  of_the_thread = 42;
  float value = 0.0f;
  EXPECT_EQ(words_of(read_before_write, 1, 0, &value, Mistake::made), "");
  EXPECT_TRUE(std::isnan(value));
  EXPECT_EQ(of_the_thread, 42);
}
TEST(Emulation, BlocksRunInEitherOrder) {
  for (std::uint64_t seed : {1, 2}) {
    emulation::set_seed(seed);
    int turns = 0, to[3] = {};
    EXPECT_EQ(start_kernel(take_turns, {3, 32, 0, nullptr}, &turns, to), cudaSuccess);
    EXPECT_EQ(to[0], seed == 1 ? 0 : 2);
    EXPECT_EQ(to[2], seed == 1 ? 2 : 0);
  }
  emulation::set_seed(1);
}
TEST(Emulation, EveryF16IsAnOperand) {
  std::vector<float> to(0x10000);
  EXPECT_EQ(words_of(multiply_by_one, 32, 0, to.data()), "");
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float expected = f16_to_float(static_cast<std::uint16_t>(bits));
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(to[bits])) << bits;
    } else {
      EXPECT_EQ(to[bits], expected) << bits;
    }
  }
}

}  // namespace
}  // namespace flashqla::cuda
