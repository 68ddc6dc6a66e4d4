// The emulated CUDA runtime: one device, whose memory is the host's; streams that do everything at once.
#include "emulation/runtime.hpp"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "emulation/shared_memory.hpp"

struct EmulatedGraph {
  std::vector<flashqla::emulation::Work> works;
};
struct EmulatedStream {
  EmulatedGraph* capture = nullptr;
};

namespace {

constexpr int kPoison = 0xff;
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_failure;

cudaError_t report(cudaError_t status) {
  if (status != cudaSuccess) last_error = status;
  return status;
}

cudaError_t carry_out(const flashqla::emulation::Work& work) {
  std::string failure = work();
  if (failure.empty()) return cudaSuccess;
  last_failure = std::move(failure);
  return report(cudaErrorLaunchFailure);
}

int from_environment(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::atoi(text) : otherwise;
}

}  // namespace

int flashqla::emulation::enqueue(void* stream, Work work) {
  if (stream == nullptr || static_cast<EmulatedStream*>(stream)->capture == nullptr) return carry_out(work);
  static_cast<EmulatedStream*>(stream)->capture->works.push_back(std::move(work));
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

const char* cudaGetErrorString(cudaError_t status) {
  switch (status) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorLaunchFailure:
      return last_failure.c_str();
  }
  return "unrecognized error code";
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return report(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return report(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = from_environment("FLASHQLA_EMULATION_MULTIPROCESSORS", 4);
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(flashqla::emulation::kMostSharedBytes);
      return cudaSuccess;
  }
  return report(cudaErrorInvalidValue);
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (posix_memalign(memory, 256, bytes) != 0) return report(cudaErrorMemoryAllocation);
  std::memset(*memory, kPoison, bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  const auto copy = [=] {
    if (bytes > 0) std::memcpy(to, from, bytes);
    return std::string();
  };
  return static_cast<cudaError_t>(flashqla::emulation::enqueue(stream, copy));
}
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) { return cudaMemsetAsync(memory, value, bytes, nullptr); }
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream) {
  const auto set = [=] {
    if (bytes > 0) std::memset(memory, value, bytes);
    return std::string();
  };
  return static_cast<cudaError_t>(flashqla::emulation::enqueue(stream, set));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new EmulatedStream;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return report(stream != nullptr && stream->capture != nullptr ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (stream == nullptr || stream->capture != nullptr) return report(cudaErrorInvalidValue);
  stream->capture = new EmulatedGraph;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  if (stream == nullptr || stream->capture == nullptr) return report(cudaErrorInvalidValue);
  *graph = std::exchange(stream->capture, nullptr);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new EmulatedGraph(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (const flashqla::emulation::Work& work : exec->works) {
    const auto status = static_cast<cudaError_t>(flashqla::emulation::enqueue(stream, work));
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
