// Arguments and results of an op as they cross the stable ABI: a stack of 64-bit values, in the order of the schema. Reading an
// argument takes over its reference, so an op reads all of them, whatever happens later.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstddef>
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
  /// Not read<std::string>(): that conversion of torch's headers (as of 2.13) loses a std::string on every call.
  std::string text() {
    const auto handle = read<StringHandle>();
    std::size_t length = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    std::string copy(data, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return copy;
  }

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
