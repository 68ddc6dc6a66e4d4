// Skips everything where there is no CUDA device; tests of every implementation are about the device's here.
#include <gtest/gtest.h>

#include <cstdio>

#include "cuda/host/device.hpp"

#include "device/check.hpp"
#include "harness/tested.hpp"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const std::string missing = flashqla::cuda::missing_device();
  if (!missing.empty()) {
    std::printf("skipped: %s\n", missing.c_str());
    return 77;
  }
  using namespace flashqla::test;
  test_on(cuda_implementation, [] { return std::make_unique<DeviceMover>(); });
  return RUN_ALL_TESTS();
}
