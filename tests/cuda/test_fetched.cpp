// FLASHQLA_CUDA_CHECK: wrong offsets and rows in device memory are errors that name them, and right ones change nothing.
#include <gtest/gtest.h>

#include <cstdlib>

#include "device/check.hpp"

namespace flashqla::test {
namespace {

class Fetched : public testing::Test {
 protected:
  void SetUp() override { setenv("FLASHQLA_CUDA_CHECK", "1", 1); }
  void TearDown() override { unsetenv("FLASHQLA_CUDA_CHECK"); }
};

/// The message of the error that the case's call ends with, with `values` in place of one of its inputs.
std::string message(const Case& c, const char* name, const std::vector<double>& values) {
  Tensors inputs = make_inputs(c);
  inputs.at(name).set_values(values);
  try {
    run_on_cuda(c, inputs);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

void expect_message(const Case& c, const char* name, const std::vector<double>& values, const char* expected) {
  EXPECT_NE(message(c, name, values).find(expected), std::string::npos) << message(c, name, values);
}

const char* const kSizes = "Hq=1 Hv=2 K=64 V=32 dtype=bf16 initial=1 ";
Case packed(const std::string& text) { return with_lengths(parse_case(kSizes + text), {20, 0, 44}, 6); }

TEST_F(Fetched, RightOnes) {
  for (const char* text : {"", "op=recurrent", "op=backward", "pool=separate op=recurrent"})
    EXPECT_EQ(faults_of(packed(text)), "");
}

TEST_F(Fetched, Offsets) {
  for (const char* op : {"op=forward", "op=recurrent", "op=backward"}) {
    expect_message(packed(op), "cu_seqlens", {0, 20, 10, 64},
                   "cu_seqlens: expected offsets that never decrease, got 10 at [2] after 20");
    expect_message(packed(op), "cu_seqlens", {0, 20, 20, 71}, "cu_seqlens: expected a last offset of at most T=70, got 71");
    expect_message(packed(op), "cu_seqlens", {1, 20, 20, 64}, "cu_seqlens: expected a first offset of 0, got 1");
  }
}

TEST_F(Fetched, RowsOfPools) {
  for (const char* op : {"op=forward pool=separate", "op=recurrent pool=separate"}) {
    const Case c = packed(op);
    expect_message(c, "read", {0, 1000, 1}, "read: expected");
    expect_message(c, "write", {0, -7, 1}, "write: expected");
    expect_message(c, "write", {1, 1, 2}, "write: expected");
  }
}

}  // namespace
}  // namespace flashqla::test
