// Choice of an implementation: table order, reasons of refusal, FLASHQLA_IMPL, FLASHQLA_LOG, and the real table.
#include <cstdlib>
#include <optional>

#include "calls.hpp"
#include "cpu/cpuid.hpp"
#include "dispatch/choose.hpp"

namespace flashqla::test {
namespace {

using detail::Implementation;

/// Sets an environment variable for one scope.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) saved_ = old;
    setenv(name, value, 1);
  }
  ~ScopedVariable() {
    if (saved_) {
      setenv(name_, saved_->c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> saved_;
};

class Dispatch : public testing::Test {
 protected:
  Dispatch() {
    unsetenv("FLASHQLA_IMPL");
    unsetenv("FLASHQLA_LOG");
  }
};

std::string takes(const ChunkForward&) { return {}; }
std::string takes_only_bf16(const ChunkForward& d) { return d.problem.dtype == DType::bf16 ? "" : "takes bfloat16 only"; }
std::string nothing_missing() { return {}; }
std::string missing_unit() { return "this processor lacks a flux unit"; }
std::size_t no_workspace(const ChunkForward&, int) { return 0; }
void run_nothing(const ChunkForwardArguments&, std::byte*, const Parallel&) {}

const Implementation kFast{"cpu-fast", missing_unit, {takes, no_workspace, run_nothing}, {}, {}};
const Implementation kNarrow{"cpu-narrow", nothing_missing, {takes_only_bf16, no_workspace, run_nothing}, {}, {}};
const Implementation kEmpty{"cpu-empty", nothing_missing, {}, {}, {}};
const Implementation kBroad{"cpu-broad", nothing_missing, {takes, no_workspace, run_nothing}, {}, {}};
const Implementation kOther{"other", nothing_missing, {takes, no_workspace, run_nothing}, {}, {}};
constexpr const Implementation* kTable[] = {&kFast, &kNarrow, &kEmpty, &kBroad, &kOther};

std::string chosen(DType dtype = DType::f32) {
  ChunkForward descriptor{.problem = small_problem()};
  descriptor.problem.dtype = dtype;
  return detail::choose<ChunkForward>(kTable, descriptor).name;
}

TEST_F(Dispatch, FirstThatTakesTheProblem) {
  EXPECT_EQ(chosen(), "cpu-broad");
  EXPECT_EQ(chosen(DType::bf16), "cpu-narrow");
}

TEST_F(Dispatch, ReasonsInTableOrder) {
  const auto answers = detail::report<ChunkForward>(kTable, {.problem = small_problem()});
  ASSERT_EQ(answers.size(), 5u);
  EXPECT_EQ(answers[0].name, "cpu-fast");
  EXPECT_EQ(answers[0].reason, "this processor lacks a flux unit");
  EXPECT_EQ(answers[1].reason, "takes bfloat16 only");
  EXPECT_EQ(answers[2].reason, "has no chunk_forward");
  EXPECT_EQ(answers[3].reason, "");
  EXPECT_EQ(answers[4].reason, "");
}

TEST_F(Dispatch, ForcedByName) {
  const ScopedVariable forced("FLASHQLA_IMPL", "other");
  EXPECT_EQ(chosen(), "other");
  const auto answers = detail::report<ChunkForward>(kTable, {.problem = small_problem()});
  EXPECT_EQ(answers[3].reason, "FLASHQLA_IMPL=other asks for another");
  EXPECT_EQ(answers[4].reason, "");
}

TEST_F(Dispatch, ForcedToTheBestOnTheCpu) {
  const ScopedVariable forced("FLASHQLA_IMPL", "cpu");
  EXPECT_EQ(chosen(), "cpu-broad");
  EXPECT_EQ(chosen(DType::bf16), "cpu-narrow");
}

TEST_F(Dispatch, EmptyVariableForcesNothing) {
  const ScopedVariable forced("FLASHQLA_IMPL", "");
  EXPECT_EQ(chosen(), "cpu-broad");
}

TEST_F(Dispatch, ForcedOneThatRefusesIsAnErrorWithItsReason) {
  const ScopedVariable forced("FLASHQLA_IMPL", "cpu-narrow");
  expect_throw<Unsupported>([] { chosen(); },
                            {"chunk_forward: no implementation takes this problem", "cpu-narrow: takes bfloat16 only",
                             "cpu-broad: FLASHQLA_IMPL=cpu-narrow asks for another"});
  EXPECT_EQ(chosen(DType::bf16), "cpu-narrow");
}

TEST_F(Dispatch, ForcedOneThatTheProcessorCannotRun) {
  const ScopedVariable forced("FLASHQLA_IMPL", "cpu-fast");
  expect_throw<Unsupported>([] { chosen(); }, {"cpu-fast: this processor lacks a flux unit"});
}

TEST_F(Dispatch, UnknownNameListsAll) {
  const ScopedVariable forced("FLASHQLA_IMPL", "cpu-brod");
  expect_throw<Unsupported>([] { chosen(); },
                            {"FLASHQLA_IMPL=cpu-brod", "cpu-fast", "cpu-narrow", "cpu-empty", "cpu-broad", "other"});
}

TEST_F(Dispatch, CudaProblemInALibraryWithoutCuda) {
  ChunkForward descriptor{.problem = small_problem()};
  descriptor.problem.device = {DeviceType::cuda, 0};
  expect_throw<Unsupported>(
      [&] { detail::choose<ChunkForward>(kTable, descriptor); },
      {"cpu-broad: computes on the CPU only", "built without kernels for CUDA devices", "-DFLASHQLA_CUDA=ON"});
}

TEST_F(Dispatch, LogGoesToStandardError) {
  const ScopedVariable log("FLASHQLA_LOG", "1");
  testing::internal::CaptureStderr();
  chosen();
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("flashqla: chunk_forward: cpu-fast refused: this processor lacks a flux unit"), std::string::npos) << text;
  EXPECT_NE(text.find("flashqla: chunk_forward: cpu-broad runs"), std::string::npos) << text;
}

TEST_F(Dispatch, SilentWithoutTheVariable) {
  const ScopedVariable log("FLASHQLA_LOG", "0");
  testing::internal::CaptureStderr();
  chosen();
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

template <class Descriptor>
void expect_every_force_works(const Descriptor& descriptor) {
  for (const Implementation* implementation : detail::implementations()) {
    const ScopedVariable forced("FLASHQLA_IMPL", implementation->name);
    const bool can_run = detail::operation_of(*implementation, descriptor).run != nullptr && implementation->missing().empty();
    if (can_run) {
      EXPECT_EQ(plan(descriptor).implementation, implementation->name);
    } else {
      EXPECT_THROW(plan(descriptor), Unsupported) << implementation->name;
    }
  }
}

TEST_F(Dispatch, EveryRowOfTheTableCanBeForced) {
  Problem p = small_problem();
  p.dtype = DType::bf16;  // which every row takes
  expect_every_force_works(ChunkForward{.problem = p});
  expect_every_force_works(ChunkBackward{.problem = p});
  expect_every_force_works(RecurrentForward{.problem = p});
}

TEST_F(Dispatch, ReferenceIsLastAndTakesEverything) {
  const auto table = detail::implementations();
  ASSERT_FALSE(table.empty());
  EXPECT_STREQ(table.back()->name, "reference");
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    Problem p = small_problem();
    p.dtype = dtype;
    EXPECT_EQ(explain(ChunkForward{.problem = p}).back().reason, "");
    EXPECT_EQ(explain(ChunkBackward{.problem = p}).back().reason, "");
    EXPECT_EQ(explain(RecurrentForward{.problem = p}).back().reason, "");
  }
  Problem exact = small_problem();
  exact.dtype = DType::f64;
  EXPECT_EQ(plan(ChunkForward{.problem = exact}).implementation, "reference");
}

TEST_F(Dispatch, ExplainAgreesWithPlan) {
  const ChunkForward descriptor{.problem = small_problem()};
  std::string first;
  for (const ImplementationReport& answer : explain(descriptor)) {
    if (first.empty() && answer.reason.empty()) first = answer.name;
  }
  EXPECT_EQ(first, plan(descriptor).implementation);
}

TEST_F(Dispatch, ProcessorChecksNest) {
  EXPECT_TRUE(cpu::missing_avx2().empty() || !cpu::missing_avx512().empty());
  EXPECT_TRUE(cpu::missing_avx512().empty() || !cpu::missing_avx512bf16().empty());
#if defined(__x86_64__) && defined(__GNUC__)
  EXPECT_EQ(cpu::missing_avx2().empty(), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
  EXPECT_EQ(cpu::missing_avx512().empty(), __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"));
#elif !defined(__x86_64__)
  EXPECT_EQ(cpu::missing_avx2(), "this processor is not an x86-64");
#endif
}

}  // namespace
}  // namespace flashqla::test
