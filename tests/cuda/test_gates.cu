// The exponential of a token's decay against the one in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cuda/block/gates.cuh"
#include "cuda/host/device.hpp"
#include "cuda/host/start.cuh"

namespace flashqla::cuda {
namespace {

constexpr int kLaunched = 1024, kCount = 1 << 16;

__global__ void exponentials(const float* x, float* y) {
  for (int i = static_cast<int>(threadIdx.x); i < kCount; i += kLaunched) y[i] = block::nearest_exp(x[i]);
}

/// The nearest float to e^x, or the next one with at most twice its error, and seldom.
TEST(Gates, NearestExp) {
  float *x = nullptr, *y = nullptr;
  check(cudaMalloc(&x, kCount * sizeof(float)), "memory");
  check(cudaMalloc(&y, kCount * sizeof(float)), "memory");
  for (float furthest : {1e-6f, 0.1f, 1.0f, 10.0f, 80.0f}) {
    std::vector<float> from(kCount), to(kCount);
    for (int i = 0; i < kCount; ++i) from[i] = furthest * (static_cast<float>(i) / (kCount / 2 - 0.5f) - 1.0f);
    from[0] = -furthest;
    from[1] = furthest;
    from[2] = 0.0f;
    check(cudaMemcpy(x, from.data(), kCount * sizeof(float), cudaMemcpyHostToDevice), "copy");
    check(start_kernel(exponentials, {1, kLaunched, 0, nullptr}, static_cast<const float*>(x), y), "exponentials");
    check(cudaMemcpy(to.data(), y, kCount * sizeof(float), cudaMemcpyDeviceToHost), "copy");
    EXPECT_EQ(to[2], 1.0f);
    int others = 0;
    for (int i = 0; i < kCount; ++i) {
      const double truth = std::exp(static_cast<double>(from[i]));
      const auto nearest = static_cast<float>(truth);
      if (to[i] == nearest) continue;
      ++others;
      ASSERT_LE(std::fabs(to[i] - truth), 2 * std::fabs(nearest - truth)) << "e^" << from[i];
    }
    EXPECT_LT(others, kCount / 25) << "up to " << furthest;
  }
  check(cudaFree(x), "memory");
  check(cudaFree(y), "memory");
}

}  // namespace
}  // namespace flashqla::cuda
