// Reported fault A04: elements more than 2^31 apart, in tensors that only a device with 40 GB of free memory holds. What lies far
// out must be, bit for bit, what the same numbers give by themselves.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "cuda/host/device.hpp"
#include "flashqla/flashqla.hpp"

namespace flashqla::test {
namespace {

constexpr std::int64_t kHeads = 64, kDim = 128;

/// Device memory of a test; null once the device has no more.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    for (void* block : blocks_) cudaFree(block);
  }

  template <class T>
  T* take(std::int64_t count) {
    void* memory = nullptr;
    if (full_ || cudaMalloc(&memory, static_cast<std::size_t>(count) * sizeof(T)) != cudaSuccess) {
      cudaGetLastError();
      full_ = true;
      return nullptr;
    }
    blocks_.push_back(memory);
    return static_cast<T*>(memory);
  }

  /// `count` elements that repeat `pattern`.
  template <class T>
  T* repeated(std::int64_t count, const std::vector<T>& pattern) {
    T* const to = take<T>(count);
    if (to == nullptr) return nullptr;
    auto there = std::min(count, static_cast<std::int64_t>(pattern.size()));
    cuda::check(cudaMemcpy(to, pattern.data(), static_cast<std::size_t>(there) * sizeof(T), cudaMemcpyHostToDevice), "pattern");
    while (there < count) {
      const std::int64_t more = std::min(there, count - there);
      cuda::check(cudaMemcpy(to + there, to, static_cast<std::size_t>(more) * sizeof(T), cudaMemcpyDeviceToDevice), "pattern");
      there += more;
    }
    return to;
  }

  bool full() const { return full_; }

 private:
  std::vector<void*> blocks_;
  bool full_ = false;
};

/// A prime, so that an offset that lost its high bits leads to other numbers.
constexpr std::int64_t kPatternRows = 8191;

std::vector<float> random_numbers(std::int64_t count, float from, float to, unsigned seed) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<float> numbers(from, to);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& x : values) x = numbers(engine);
  return values;
}
std::vector<std::uint16_t> random_bf16(float most, unsigned seed) {
  std::vector<std::uint16_t> values;
  for (float x : random_numbers(kPatternRows * kDim, -most, most, seed)) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &x, 4);
    values.push_back(static_cast<std::uint16_t>(bits >> 16));
  }
  return values;
}

template <class T>
std::vector<T> to_host(const T* from, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  cuda::check(cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDeviceToHost), "results");
  return values;
}

template <class Descriptor, class Views>
void run_all(const Descriptor& descriptor, const Views& views, DeviceMemory& memory) {
  const Plan<Descriptor> planned = plan(descriptor);
  auto* const workspace = memory.take<std::byte>(static_cast<std::int64_t>(planned.workspace_bytes) + 256);
  ASSERT_FALSE(memory.full());
  run(planned, views, {workspace, planned.workspace_bytes}, Stream{});
  cuda::check(cudaDeviceSynchronize(), "run");
}

Problem problem_with(std::int64_t batch, std::int64_t tokens) {
  Problem p;
  p.device = {DeviceType::cuda, 0};
  p.batch = batch;
  p.tokens = tokens;
  p.heads_qk = p.heads_v = kHeads;
  p.dtype = DType::bf16;
  return p;
}

/// q, k, v, g, beta of consecutive tokens in memory.
struct Rows {
  std::uint16_t *q, *k, *v;
  float *g, *beta;

  Rows(DeviceMemory& memory, std::int64_t tokens) {
    const std::int64_t rows = tokens * kHeads;
    q = memory.repeated(rows * kDim, random_bf16(0.15f, 1));
    k = memory.repeated(rows * kDim, random_bf16(0.15f, 2));
    v = memory.repeated(rows * kDim, random_bf16(1.0f, 3));
    g = memory.repeated(rows, random_numbers(kPatternRows, -0.1f, 0.0f, 4));
    beta = memory.repeated(rows, random_numbers(kPatternRows, 0.0f, 1.0f, 5));
  }
  /// Views of the tokens from `first` on.
  InputTensors from(std::int64_t first, std::int64_t batch, std::int64_t tokens) const {
    const std::int64_t row = first * kHeads;
    InputTensors t;
    t.q = TensorView(q + row * kDim, DType::bf16, {batch, tokens, kHeads, kDim});
    t.k = TensorView(k + row * kDim, DType::bf16, {batch, tokens, kHeads, kDim});
    t.v = TensorView(v + row * kDim, DType::bf16, {batch, tokens, kHeads, kDim});
    t.g = TensorView(g + row, DType::f32, {batch, tokens, kHeads});
    t.beta = TensorView(beta + row, DType::f32, {batch, tokens, kHeads});
    return t;
  }
};

/// The second sequence of a pack lies past 2^31 elements of q, k, v and o.
TEST(Faults, A04_tokens_past_2_31_elements) {
  constexpr std::int64_t kFirst = 262144, kSecond = 100, kTokens = kFirst + kSecond, kRow = kHeads * kDim;
  constexpr std::int64_t kState = kHeads * kDim * kDim;
  static_assert(kFirst * kRow >= std::int64_t{1} << 31);
  DeviceMemory memory;
  const Rows rows(memory, kTokens);
  auto* const o = memory.take<std::uint16_t>(kTokens * kRow);
  auto* const o_alone = memory.take<std::uint16_t>(kSecond * kRow);
  auto* const initial = memory.repeated(2 * kState, random_numbers(kPatternRows * kDim, -1.0f, 1.0f, 6));
  auto* const last = memory.take<float>(2 * kState);
  auto* const last_alone = memory.take<float>(kState);
  auto* const offsets = memory.repeated<std::int64_t>(3, {0, kFirst, kTokens});
  if (memory.full()) GTEST_SKIP() << "needs more device memory";

  ChunkForward pack{problem_with(1, kTokens)};
  pack.problem.packed = true;
  pack.problem.num_sequences = 2;
  ChunkForwardTensors all;
  all.inputs = rows.from(0, 1, kTokens);
  all.inputs.cu_seqlens = TensorView(offsets, DType::i64, {3});
  all.states.initial_state = TensorView(initial, DType::f32, {2, kHeads, kDim, kDim});
  all.states.final_state = TensorView(last, DType::f32, {2, kHeads, kDim, kDim});
  all.o = TensorView(o, DType::bf16, {1, kTokens, kHeads, kDim});
  run_all(pack, all, memory);

  ChunkForwardTensors alone;
  alone.inputs = rows.from(kFirst, 1, kSecond);
  alone.states.initial_state = TensorView(initial + kState, DType::f32, {1, kHeads, kDim, kDim});
  alone.states.final_state = TensorView(last_alone, DType::f32, {1, kHeads, kDim, kDim});
  alone.o = TensorView(o_alone, DType::bf16, {1, kSecond, kHeads, kDim});
  run_all(ChunkForward{problem_with(1, kSecond)}, alone, memory);

  EXPECT_TRUE(to_host(o + kFirst * kRow, kSecond * kRow) == to_host(o_alone, kSecond * kRow)) << "o";
  EXPECT_TRUE(to_host(last + kState, kState) == to_host(last_alone, kState)) << "final state";
}

/// A step in place in rows of a pool past 2^31 elements.
TEST(Faults, A04_pool_rows_past_2_31_elements) {
  constexpr std::int64_t kState = kHeads * kDim * kDim, kSlots = 2100, kFar = 2099;
  static_assert(kFar * kState >= std::int64_t{1} << 31);
  DeviceMemory memory;
  const Rows rows(memory, 2);
  auto* const pool = memory.repeated(kSlots * kState, random_numbers(kPatternRows * kDim, -1.0f, 1.0f, 6));
  auto* const small = memory.take<float>(2 * kState);
  auto* const o = memory.take<std::uint16_t>(2 * kHeads * kDim);
  auto* const o_small = memory.take<std::uint16_t>(2 * kHeads * kDim);
  auto* const far_rows = memory.repeated<std::int32_t>(2, {static_cast<std::int32_t>(kFar), 3});
  auto* const near_rows = memory.repeated<std::int32_t>(2, {0, 1});
  if (memory.full()) GTEST_SKIP() << "needs more device memory";
  constexpr std::size_t kBytes = kState * sizeof(float);
  cuda::check(cudaMemcpy(small, pool + kFar * kState, kBytes, cudaMemcpyDeviceToDevice), "copy");
  cuda::check(cudaMemcpy(small + kState, pool + 3 * kState, kBytes, cudaMemcpyDeviceToDevice), "copy");

  const auto step = [&](float* states, std::int64_t slots, std::int32_t* index, std::uint16_t* to) {
    RecurrentForwardTensors t;
    t.inputs = rows.from(0, 2, 1);
    t.states.final_state = TensorView(states, DType::f32, {slots, kHeads, kDim, kDim});
    t.states.initial_state = t.states.final_state;
    t.states.read = TensorView(index, DType::i32, {2});
    t.states.write = t.states.read;
    t.o = TensorView(to, DType::bf16, {2, 1, kHeads, kDim});
    run_all(RecurrentForward{problem_with(2, 1)}, t, memory);
  };
  step(pool, kSlots, far_rows, o);
  step(small, 2, near_rows, o_small);
  EXPECT_TRUE(to_host(o, 2 * kHeads * kDim) == to_host(o_small, 2 * kHeads * kDim)) << "o";
  EXPECT_TRUE(to_host(pool + kFar * kState, kState) == to_host(small, kState)) << "state";
  EXPECT_TRUE(to_host(pool + 3 * kState, kState) == to_host(small + kState, kState)) << "near state";
}

}  // namespace
}  // namespace flashqla::test
