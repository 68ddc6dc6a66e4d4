// Every implementation against the truth for every pair of options.
#include <gtest/gtest.h>

#include "harness/compare.hpp"
#include "harness/options.hpp"
#include "harness/run.hpp"

namespace flashqla::test {
namespace {

void expect_right(Op op, const std::vector<Option>& options, std::uint64_t seed) {
  Case base;
  base.op = op;
  int threads = 0;
  for (const Case& c : pairwise(base, options, seed)) EXPECT_EQ(check_all(c, 1 + threads++ % 3), "");
}

TEST(CpuOptions, Forward) { expect_right(Op::forward, forward_options(), 100); }
TEST(CpuOptions, Backward) { expect_right(Op::backward, backward_options(), 200); }
TEST(CpuOptions, Recurrent) { expect_right(Op::recurrent, recurrent_options(), 300); }

}  // namespace
}  // namespace flashqla::test
