#include "device/device_mover.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>

#include "cuda/host/device.hpp"

namespace flashqla::test {

namespace {

constexpr std::size_t kAlignment = 256, kGuard = 4096;
constexpr int kPoison = 0xff;

cudaStream_t native(void* stream) { return static_cast<cudaStream_t>(stream); }

std::byte* allocate(std::size_t bytes) {
  void* memory = nullptr;
  cuda::check(cudaMalloc(&memory, bytes), "memory of a test");
  return static_cast<std::byte*>(memory);
}

}  // namespace

DeviceMover::DeviceMover(int device) : device_(device) {
  const cuda::DeviceScope scope(device_);
  cudaStream_t stream = nullptr;
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream of a test");
  stream_ = stream;
}

DeviceMover::~DeviceMover() {
  release();
  cudaStreamDestroy(native(stream_));
}

void DeviceMover::release() {
  for (auto& [host, block] : blocks_) cudaFree(block.memory);
  blocks_.clear();
  if (workspace_ != nullptr) cudaFree(workspace_);
  workspace_ = nullptr;
}

std::byte* DeviceMover::place(const Tensor& tensor) {
  const std::byte* const host = tensor.memory().get();
  const auto found = blocks_.find(host);
  if (found != blocks_.end()) return found->second.first;
  const cuda::DeviceScope scope(device_);
  const auto bytes = static_cast<std::size_t>(tensor.memory_bytes());
  Block block{tensor.memory(), allocate(bytes + kAlignment), nullptr, bytes};
  block.first = block.memory + reinterpret_cast<std::uintptr_t>(host) % kAlignment;  // aligned as on the host
  cuda::check(cudaMemcpyAsync(block.first, host, bytes, cudaMemcpyHostToDevice, native(stream_)), "copying a test's tensor");
  blocks_.emplace(host, block);
  return block.first;
}

std::byte* DeviceMover::workspace(std::size_t bytes) {
  const cuda::DeviceScope scope(device_);
  workspace_bytes_ = bytes;
  workspace_ = allocate(bytes + kGuard);
  cuda::check(cudaMemsetAsync(workspace_, kPoison, bytes + kGuard, native(stream_)), "filling the workspace of a test");
  return workspace_;
}

void DeviceMover::finish() {
  const cuda::DeviceScope scope(device_);
  cuda::check(cudaStreamSynchronize(native(stream_)), "running a test");
  for (auto& [host, block] : blocks_) {
    cuda::check(cudaMemcpy(block.host.get(), block.first, block.bytes, cudaMemcpyDeviceToHost), "copying a test's results");
  }
  std::vector<unsigned char> guard(kGuard);
  cuda::check(cudaMemcpy(guard.data(), workspace_ + workspace_bytes_, kGuard, cudaMemcpyDeviceToHost), "copying a test's guard");
  release();
  if (!std::all_of(guard.begin(), guard.end(), [](unsigned char byte) { return byte == kPoison; })) {
    throw std::runtime_error("wrote past the workspace");
  }
}

}  // namespace flashqla::test
