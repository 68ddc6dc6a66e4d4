// What the host asks of CUDA: devices, errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "flashqla/types.hpp"

namespace flashqla::cuda {

/// Throws DeviceError with what was tried and CUDA's words, unless `status` (a cudaError_t) is success.
void check(int status, const char* what);

/// Empty if there are a driver and a CUDA device of capability 8.0 or newer, else what is missing.
std::string missing_device();

/// Empty if there is a device of that number and of capability 8.0 or newer, else the reason to refuse it.
std::string refuse_device(int device);

/// Copies memory of the device to the host when the work on the stream is done, and waits for that.
void fetch(Device device, void* to, const void* from, std::size_t bytes, Stream stream);

struct DeviceProperties {
  int multiprocessors;
  int block_shared_bytes;  // that a block may have
};
DeviceProperties properties_of(int device);

/// Makes a device the calling thread's current one until the end of the scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = -1;
};

/// Blocks that one launch can have.
inline constexpr std::int64_t kMostBlocks = (std::int64_t{1} << 31) - 1;

}  // namespace flashqla::cuda
