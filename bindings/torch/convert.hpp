// Between torch tensors and the library's views: element types, strides, allocation, threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "boxing.hpp"
#include "flashqla/flashqla.hpp"

namespace flashqla::bindings {

/// Throws InvalidType for an element type that no tensor of ours has.
DType dtype_of(const char* name, const Tensor& tensor);

/// Where a call runs, and whether its results live there or nowhere (only their shapes are looked at).
enum class Results { on_device, nowhere };
struct Placement {
  Device device{};
  Results results = Results::on_device;
};

struct OutOfMemory : Error {
  using Error::Error;
};

/// An uninitialised contiguous tensor. Throws OutOfMemory.
Tensor empty(const std::vector<std::int64_t>& sizes, DType dtype, Placement placement);

/// The tensor itself, or a copy if its last dimension is not contiguous (then nothing else needs copying).
Tensor with_contiguous_rows(const Tensor& tensor);
OptionalTensor with_contiguous_rows(const OptionalTensor& tensor);

/// Views. A meta tensor's data is null; an absent one gives an absent view.
ConstTensorView const_view(const char* name, const Tensor& tensor);
ConstTensorView const_view(const char* name, const OptionalTensor& tensor);
TensorView mutable_view(const char* name, const Tensor& tensor);
TensorView mutable_view(const char* name, const OptionalTensor& tensor);

/// Workspace from torch's allocator, aligned as the library wants it. On a CUDA device it belongs to the current stream there and
/// may be freed before the work that uses it has run: whatever gets the memory next comes after that work on the stream.
class Scratch {
 public:
  Scratch(std::size_t bytes, Device device);
  Workspace workspace() const { return {data_, bytes_}; }

 private:
  OptionalTensor memory_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Torch's own thread pool. In a child of fork() the calling thread does everything: a pool does not survive a fork.
Parallel torch_pool();

}  // namespace flashqla::bindings
