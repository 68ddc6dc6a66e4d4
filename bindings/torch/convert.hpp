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

/// Where the results of a call live: with the inputs, or nowhere (only their shapes are looked at).
enum class Placement { with_inputs, nowhere };

/// An uninitialised contiguous tensor.
Tensor empty(const std::vector<std::int64_t>& sizes, DType dtype, Placement placement, const Tensor& beside);

/// The tensor itself, or a copy if its last dimension is not contiguous (then nothing else needs copying).
Tensor with_contiguous_rows(const Tensor& tensor);
OptionalTensor with_contiguous_rows(const OptionalTensor& tensor);

/// Views. A meta tensor's data is null; an absent one gives an absent view.
ConstTensorView const_view(const char* name, const Tensor& tensor);
ConstTensorView const_view(const char* name, const OptionalTensor& tensor);
TensorView mutable_view(const char* name, const Tensor& tensor);
TensorView mutable_view(const char* name, const OptionalTensor& tensor);

/// Workspace from torch's allocator, aligned as the library wants it.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes);
  Workspace workspace() const { return {data_, bytes_}; }

 private:
  Tensor memory_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Torch's own thread pool. In a child of fork() the calling thread does everything: a pool does not survive a fork.
Parallel torch_pool();

}  // namespace flashqla::bindings
