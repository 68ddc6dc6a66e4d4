// Whatever an implementation does inside, the caller's floating-point environment is the same after run(), exception flags
// included, and nothing traps.
#include <gtest/gtest.h>

#include <cfenv>
#include <cmath>
#include <cstdlib>

#include "calls.hpp"
#include "dispatch/choose.hpp"

namespace flashqla::test {
namespace {

template <class T>
class FloatEnvironmentOfRun : public testing::Test {};
using Calls = testing::Types<Forward, Recurrent, Backward>;
TYPED_TEST_SUITE(FloatEnvironmentOfRun, Calls);

/// Decays that leave f32 on both sides of a chunk's diagonal, and one that forgets all.
template <class AnyCall>
AnyCall call_with_strong_decay(DType dtype) {
  Problem p = small_problem();
  p.tokens = 70;
  p.dtype = dtype;
  AnyCall call(p);
  auto* g = static_cast<float*>(const_cast<void*>(call.tensors.inputs.g.data));
  for (std::int64_t i = 0; i < p.batch * p.tokens * p.heads_v; ++i)
    g[i] = i % 40 == 39 ? -INFINITY : i % 3 == 0 ? -200.0f : -20.0f;
  return call;
}

template <class AnyCall, class Action>
void for_each_implementation(const Action& action) {
  for (const detail::Implementation* implementation : detail::implementations()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      auto call = call_with_strong_decay<AnyCall>(dtype);
      setenv("FLASHQLA_IMPL", implementation->name, 1);
      const detail::Implementation* const row[] = {implementation};
      if (!detail::report<std::decay_t<decltype(call.descriptor)>>(row, call.descriptor)[0].reason.empty()) continue;
      for (const Parallel& parallel : {serial(), own_pool(3)}) {
        const auto made = plan(call.descriptor, parallel.threads);
        std::vector<std::byte> memory(made.workspace_bytes + 64);
        const std::size_t shift = (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
        action(std::string(implementation->name) + " threads " + std::to_string(parallel.threads),
               [&] { run(made, call.tensors, {memory.data() + shift, made.workspace_bytes}, parallel); });
      }
    }
  }
  unsetenv("FLASHQLA_IMPL");
}

TYPED_TEST(FloatEnvironmentOfRun, FlagsAreAsBefore) {
  for_each_implementation<TypeParam>([](const std::string& name, const auto& run_once) {
    std::feclearexcept(FE_ALL_EXCEPT);
    run_once();
    EXPECT_EQ(std::fetestexcept(FE_ALL_EXCEPT), 0) << name;
    std::feraiseexcept(FE_DIVBYZERO);
    run_once();
    EXPECT_EQ(std::fetestexcept(FE_ALL_EXCEPT), FE_DIVBYZERO) << name;
    std::feclearexcept(FE_ALL_EXCEPT);
  });
}

#if defined(__GLIBC__)

constexpr int kTraps = FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW | FE_UNDERFLOW;

TYPED_TEST(FloatEnvironmentOfRun, NothingTraps) {
  for_each_implementation<TypeParam>([](const std::string& name, const auto& run_once) {
    std::feclearexcept(FE_ALL_EXCEPT);
    if (feenableexcept(kTraps) == -1) GTEST_SKIP() << "this processor has no traps";
    run_once();
    const int enabled = fegetexcept();
    fedisableexcept(kTraps);
    EXPECT_EQ(enabled, kTraps) << name;
  });
}

#endif

}  // namespace
}  // namespace flashqla::test
