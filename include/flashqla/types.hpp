// The few plain types that every public header shares: element types, devices, strided tensor views.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace flashqla {

/// Element type of a tensor.
enum class DType : std::uint8_t { f64, f32, bf16, f16, i64, i32 };

/// Bytes of one element of `dtype`.
constexpr std::int64_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
  }
  return 0;
}

/// The name used in messages: "float32", "bfloat16", ...
const char* name_of(DType dtype);

enum class DeviceType : std::uint8_t { cpu, cuda };

/// Where the tensors of one call live. `index` is the CUDA ordinal and 0 on the CPU.
struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

/// Where work on a CUDA device is put: a cudaStream_t; null is the device's default stream.
struct Stream {
  void* handle = nullptr;
};

inline constexpr int kMaxRank = 5;

/// A strided view of memory that the caller owns. Strides count elements and may be zero or negative.
/// `rank == 0` means "absent": that is how an optional tensor is left out.
template <class Pointer>
struct BasicTensorView {
  Pointer data = nullptr;
  DType dtype = DType::f32;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> sizes{};
  std::array<std::int64_t, kMaxRank> strides{};

  BasicTensorView() = default;

  /// A contiguous (row-major) view.
  BasicTensorView(Pointer data_, DType dtype_, std::initializer_list<std::int64_t> sizes_)
      : data(data_), dtype(dtype_), rank(static_cast<int>(sizes_.size())) {
    int i = 0;
    for (std::int64_t size : sizes_) sizes[static_cast<std::size_t>(i++)] = size;
    std::int64_t stride = 1;
    for (int d = rank - 1; d >= 0; --d) {
      strides[static_cast<std::size_t>(d)] = stride;
      stride *= sizes[static_cast<std::size_t>(d)];
    }
  }

  /// A mutable view converts to a read-only one.
  template <class Other>
  BasicTensorView(const BasicTensorView<Other>& other)  // NOLINT(google-explicit-constructor)
      : data(other.data), dtype(other.dtype), rank(other.rank), sizes(other.sizes), strides(other.strides) {}

  bool present() const { return rank > 0; }
};

using TensorView = BasicTensorView<void*>;
using ConstTensorView = BasicTensorView<const void*>;

}  // namespace flashqla
