// The problems of tests/cases/problems.txt.
#include <gtest/gtest.h>

#include "harness/compare.hpp"
#include "harness/run.hpp"

namespace flashqla::test {
namespace {

TEST(Cases, Smoke) {
  for (const Case& c : load_cases("problems.txt", "smoke")) EXPECT_EQ(check_all(c, 2), "");
}

TEST(Cases, Full) {
  for (const Case& c : load_cases("problems.txt", "full")) {
    for (const std::string& implementation : cpu_implementations(c.op, c.dtype)) EXPECT_EQ(check_case(c, implementation, 2), "");
  }
}

}  // namespace
}  // namespace flashqla::test
