#include "cuda/host/device.hpp"

#include <cuda_runtime_api.h>

#include <atomic>

#include "common/environment.hpp"
#include "flashqla/error.hpp"

namespace flashqla::cuda {

void check(int status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // or the caller's next call would report it again
  throw DeviceError(std::string(what) + ": " + cudaGetErrorString(static_cast<cudaError_t>(status)));
}

namespace {

std::string version_text(int version) {  // as CUDA counts
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// Empty if the driver knows the CUDA that this was built with: a driver for any version of the same major one does.
std::string refuse_driver() {
  constexpr const char* kLeastDriver = CUDART_VERSION >= 13000 ? "580.65.06" : "525.60.13";
  int version = 0;  // stays 0 without a driver
  const cudaError_t status = cudaDriverGetVersion(&version);
  if (status == cudaSuccess && version / 1000 >= CUDART_VERSION / 1000) return {};
  cudaGetLastError();
  const std::string needed =
      "needs an NVIDIA driver for CUDA " + std::to_string(CUDART_VERSION / 1000) + " (" + kLeastDriver + " or newer); ";
  return needed + (version == 0 ? "there is none" : "the one here is for CUDA " + version_text(version));
}

}  // namespace

std::string missing_device() {
  static std::atomic<bool> found{false};
  if (found.load(std::memory_order_relaxed)) return {};
  if (std::string driver = refuse_driver(); !driver.empty()) return driver;
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess) {
    cudaGetLastError();
    return std::string("needs a CUDA device: ") + cudaGetErrorString(status);
  }
  for (int device = 0; device < count; ++device) {
    int major = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 8) {
      found.store(true, std::memory_order_relaxed);
      return {};
    }
  }
  return "needs a CUDA device of compute capability 8.0 or newer";
}

std::string refuse_device(int device) {
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    cudaGetLastError();
    return "there is no CUDA device " + std::to_string(device);
  }
  if (major >= 8) return {};
  return "needs compute capability 8.0; CUDA device " + std::to_string(device) + " has " + std::to_string(major) + "." +
         std::to_string(minor);
}

DeviceProperties properties_of(int device) {
  DeviceProperties result{};
  check(cudaDeviceGetAttribute(&result.multiprocessors, cudaDevAttrMultiProcessorCount, device), "properties of the CUDA device");
  check(cudaDeviceGetAttribute(&result.block_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "properties of the CUDA device");
  const int limit = environment::cuda_shared_kb() * 1024;
  if (limit > 0 && limit < result.block_shared_bytes) result.block_shared_bytes = limit;
  return result;
}

void fetch(Device device, void* to, const void* from, std::size_t bytes, Stream stream) {
  const DeviceScope scope(device.index);
  const auto native = static_cast<cudaStream_t>(stream.handle);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, native), "reading indices for FLASHQLA_CUDA_CHECK");
  check(cudaStreamSynchronize(native), "reading indices for FLASHQLA_CUDA_CHECK");
}

DeviceScope::DeviceScope(int device) {
  int current = 0;
  check(cudaGetDevice(&current), "the current CUDA device");
  if (current == device) return;
  check(cudaSetDevice(device), "choosing the CUDA device of the call");
  previous_ = current;
}

DeviceScope::~DeviceScope() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace flashqla::cuda
