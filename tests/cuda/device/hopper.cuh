// What tests of the instructions of Hopper share: they are skipped elsewhere, and name elements that are wrong.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/host/device.hpp"
#include "cuda/host/start.cuh"

namespace flashqla::cuda {

/// Writes 1 where the program's code for the device is that of sm_90a.
static __global__ void ask_for_hopper_code(int* has) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  *has = 1;
#else
  *has = 0;
#endif
}

/// Memory of the device, every byte 0xff: NaN in every type.
template <class Element>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t size) : size_(size) {
    check(cudaMalloc(&data_, size * sizeof(Element)), "memory");
    check(cudaMemset(data_, 0xff, size * sizeof(Element)), "fill");
  }
  explicit DeviceArray(const std::vector<Element>& from) : DeviceArray(from.size()) {
    check(cudaMemcpy(data_, from.data(), size_ * sizeof(Element), cudaMemcpyHostToDevice), "copy");
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  Element* data() const { return data_; }
  /// After all work on the device; throws if that failed.
  std::vector<Element> fetch() const {
    std::vector<Element> to(size_);
    check(cudaMemcpy(to.data(), data_, size_ * sizeof(Element), cudaMemcpyDeviceToHost), "a kernel under test");
    return to;
  }

 private:
  std::size_t size_;
  Element* data_ = nullptr;
};

/// Tests of what only a device of capability 9.0 has, in a program with code for it.
class Hopper : public testing::Test {
 protected:
  void SetUp() override {
    int major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "properties of the CUDA device");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), "properties of the CUDA device");
    if (major != 9 || minor != 0) GTEST_SKIP() << "needs a Hopper GPU (compute capability 9.0)";
    const DeviceArray<int> has(1);
    check(start_kernel(ask_for_hopper_code, {1, 1, 0, nullptr}, has.data()), "ask_for_hopper_code");
    if (has.fetch()[0] != 1) GTEST_SKIP() << "built without code for sm_90a";
  }
};

/// Compares a matrix from `found` + `first` on, element by element, with expected(row, column). Names some of what is wrong.
template <class Element, class Expected>
void expect_matrix(const std::string& what, const std::vector<Element>& found, std::size_t first, int rows, int columns,
                   const Expected& expected) {
  constexpr int kNamed = 8;
  int wrong = 0;
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) {
      const Element got = found.at(first + static_cast<std::size_t>(row * columns + column)), right = expected(row, column);
      if (got == right || ++wrong > kNamed) continue;
      ADD_FAILURE() << what << ": row " << row << ", column " << column << ": expected " << right << ", got " << got;
    }
  }
  EXPECT_EQ(wrong, 0) << what << ": wrong elements of " << rows << " x " << columns;
}

/// Any number in the low bits of which `i` is mixed well.
inline std::uint32_t mixed(std::uint32_t i) {
  i = (i ^ i >> 16) * 0x7feb352du;
  i = (i ^ i >> 15) * 0x846ca68bu;
  return i ^ i >> 16;
}

}  // namespace flashqla::cuda
