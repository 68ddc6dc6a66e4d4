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
  Tensor tensor() {
    Tensor tensor = read<Tensor>();
    note_device(tensor);
    return tensor;
  }
  OptionalTensor optional_tensor() {
    OptionalTensor tensor = read<OptionalTensor>();
    if (tensor) note_device(*tensor);
    return tensor;
  }
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

  /// Number of the device of the tensor that is read next, which keeps its reference.
  std::int32_t next_device_index() const {
    const auto next = torch::stable::detail::to<AtenTensorHandle>(*next_);
    bool defined = false;
    std::int32_t index = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_is_defined(next, &defined));
    if (defined) TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(next, &index));
    return index < 0 ? 0 : index;  // the CPU has none
  }
  /// Whether tensors were read that are on different devices.
  bool several_devices() const { return several_devices_; }

 private:
  using TorchDevice = std::pair<std::int32_t, std::int32_t>;  // type and number

  void note_device(const Tensor& tensor) {
    if (!tensor.defined()) return;
    TorchDevice device;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device.first));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device.second));
    several_devices_ = several_devices_ || (device_ && device != *device_);
    device_ = device;
  }

  StableIValue* next_;
  std::optional<TorchDevice> device_;
  bool several_devices_ = false;
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
