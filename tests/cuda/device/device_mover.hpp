// The tensors of a test case in the memory of a CUDA device.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "harness/run.hpp"

namespace flashqla::test {

class DeviceMover final : public Mover {
 public:
  explicit DeviceMover(int device = 0);
  ~DeviceMover() override;
  DeviceMover(const DeviceMover&) = delete;
  DeviceMover& operator=(const DeviceMover&) = delete;

  Device device() const override { return {DeviceType::cuda, device_}; }
  std::byte* place(const Tensor& tensor) override;
  std::byte* workspace(std::size_t bytes) override;
  Stream stream() override { return {stream_}; }
  void finish() override;

 private:
  struct Block {
    std::shared_ptr<std::byte> host;
    std::byte *memory, *first;  // what was allocated; where the host memory's first byte is
    std::size_t bytes;
  };
  void release();

  int device_;
  void* stream_ = nullptr;
  std::map<const std::byte*, Block> blocks_;
  std::byte* workspace_ = nullptr;
  std::size_t workspace_bytes_ = 0;
};

}  // namespace flashqla::test
