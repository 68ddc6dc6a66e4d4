// Arguments and results of an op as they cross the stable ABI: a stack of 64-bit values, in the order of the schema. Reading an
// argument takes over its reference, so an op reads all of them, whatever happens later.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace flashqla::bindings {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

class ArgumentReader {
 public:
  explicit ArgumentReader(StableIValue* stack) : next_(stack) {}

  template <class T>
  T read() {
    return torch::stable::detail::to<T>(*next_++);
  }
  Tensor tensor() { return read<Tensor>(); }
  OptionalTensor optional_tensor() { return read<OptionalTensor>(); }

 private:
  StableIValue* next_;
};

class ResultWriter {
 public:
  explicit ResultWriter(StableIValue* stack) : next_(stack) {}

  template <class T>
  void write(T value) {
    *next_++ = torch::stable::detail::from(std::move(value));
  }

 private:
  StableIValue* next_;
};

}  // namespace flashqla::bindings
