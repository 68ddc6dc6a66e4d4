// run() allocates nothing, whatever the implementation, on one thread or on the pool.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "calls.hpp"
#include "dispatch/choose.hpp"

namespace {

std::atomic<std::int64_t> allocations{0};

void* counted(std::size_t bytes, std::size_t alignment) {
  allocations.fetch_add(1);
  if (void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)) return memory;
  throw std::bad_alloc();
}

}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes) { return counted(bytes + 1, alignof(std::max_align_t)); }
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes + 1, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace flashqla::test {
namespace {

template <class T>
class Allocation : public testing::Test {};
using Calls = testing::Types<Forward, Recurrent, Backward>;
TYPED_TEST_SUITE(Allocation, Calls);

Problem larger_problem(DType dtype) {
  Problem p = packed_problem(3);
  p.tokens = 200;
  p.dim_k = 48;
  p.dim_v = 40;
  p.gate = Gate::computed;
  p.qk_l2norm = true;
  p.dtype = dtype;
  return p;
}

template <class AnyCall>
std::int64_t allocations_of_run(AnyCall& call, const Parallel& parallel) {
  const auto made = plan(call.descriptor, parallel.threads);
  std::vector<std::byte> memory(made.workspace_bytes + 64);
  const std::size_t shift = (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
  const Workspace workspace{memory.data() + shift, made.workspace_bytes};
  run(made, call.tensors, workspace, parallel);  // starts the pool
  const std::int64_t before = allocations.load();
  run(made, call.tensors, workspace, parallel);
  return allocations.load() - before;
}

TYPED_TEST(Allocation, NoneInRun) {
  for (const detail::Implementation* implementation : detail::implementations()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      TypeParam call(larger_problem(dtype));
      call.offsets({0, 1, 66, 200});
      setenv("FLASHQLA_IMPL", implementation->name, 1);
      const detail::Implementation* const row[] = {implementation};
      if (!detail::report<std::decay_t<decltype(call.descriptor)>>(row, call.descriptor)[0].reason.empty()) continue;
      EXPECT_EQ(allocations_of_run(call, serial()), 0) << implementation->name;
      EXPECT_EQ(allocations_of_run(call, own_pool(3)), 0) << implementation->name;
    }
  }
  unsetenv("FLASHQLA_IMPL");
}

}  // namespace
}  // namespace flashqla::test
