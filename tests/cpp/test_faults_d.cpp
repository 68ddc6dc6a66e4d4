// Faults that users have reported for such kernels, by number: what can be said of their cost without a clock.
#include <gtest/gtest.h>

#include <cstdlib>

#include "harness/run.hpp"

namespace flashqla::test {
namespace {

constexpr std::int64_t kMebi = std::int64_t{1} << 20;

template <class Descriptor>
std::int64_t workspace_of(const std::string& implementation, const Descriptor& descriptor, int threads) {
  setenv("FLASHQLA_IMPL", implementation.c_str(), 1);
  const std::size_t bytes = plan(descriptor, threads).workspace_bytes;
  unsetenv("FLASHQLA_IMPL");
  return static_cast<std::int64_t>(bytes);
}

/// Training keeps no state per token: 2 MiB a thread, and in the backward one f32 state for every 64 tokens besides.
TEST(Faults, D05_memory_of_training) {
  for (const char* text :
       {"T=512", "T=2048", "T=131072", "B=3 T=100", "lengths=1000+0+1+3000+64 slack=9", "T=4096 gate=computed l2norm=1"}) {
    for (const std::int64_t size : {64, 128, 256}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        Case c = parse_case(text);
        c.Hq = 16;
        c.Hv = 32;
        c.K = c.V = size;
        c.dtype = dtype;
        const Problem problem = problem_of(c);
        const std::int64_t states = problem.sequences() + c.B * c.T / 64, state = c.Hv * c.K * c.V * 4;
        for (const int threads : {1, 2, 16}) {
          const std::int64_t scratch = threads * 2 * kMebi;
          for (const std::string& implementation : cpu_implementations(Op::forward, dtype)) {
            EXPECT_LE(workspace_of(implementation, ChunkForward{problem}, threads), scratch)
                << implementation << " " << to_text(c);
          }
          for (const std::string& implementation : cpu_implementations(Op::backward, dtype)) {
            EXPECT_LE(workspace_of(implementation, ChunkBackward{problem}, threads), scratch + states * state)
                << implementation << " " << to_text(c);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashqla::test
