// Skips everything where there is no CUDA device.
#include <gtest/gtest.h>

#include <cstdio>

#include "cuda/host/device.hpp"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const std::string missing = flashqla::cuda::missing_device();
  if (!missing.empty()) {
    std::printf("skipped: %s\n", missing.c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
