// A tensor of the tests: any strides, own memory with guard elements around it, filled with 0xff bytes (NaN in every floating
// type, -1 in every integer type) until set, so that reads outside the view poison the result and writes outside it are seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "flashqla/types.hpp"

namespace flashqla::test {

class Tensor {
 public:
  Tensor() = default;
  /// Contiguous.
  Tensor(DType dtype, std::vector<std::int64_t> sizes);
  /// `shift`: elements between the 64-byte boundary and the first element.
  Tensor(DType dtype, std::vector<std::int64_t> sizes, std::vector<std::int64_t> strides, std::int64_t shift = 0);

  bool present() const { return !sizes_.empty(); }
  DType dtype() const { return dtype_; }
  const std::vector<std::int64_t>& sizes() const { return sizes_; }
  std::int64_t count() const;

  /// Elements in row-major order of the sizes, whatever the strides.
  double get(std::int64_t index) const;
  void set(std::int64_t index, double value);
  std::vector<double> values() const;
  void set_values(const std::vector<double>& values);
  void fill(double value);
  /// Back to 0xff bytes, guards and gaps too.
  void poison();
  /// No byte outside the view has changed since the poisoning. Not looked at when the memory is sparse.
  bool gaps_are_poison() const;

  /// Elements [start, start + length) of dimension `dim`, sharing the memory.
  Tensor slice(int dim, std::int64_t start, std::int64_t length) const;
  /// The last dimension as [heads, size], sharing the memory.
  Tensor split_last(std::int64_t heads, std::int64_t size) const;
  /// With own memory of the same layout.
  Tensor clone() const;
  /// Contiguous, own memory.
  Tensor to(DType dtype) const;

  TensorView view() const;
  /// The memory that this tensor is a view of, and others may be too, and where its first element is.
  const std::shared_ptr<std::byte>& memory() const { return memory_; }
  std::int64_t memory_bytes() const { return memory_bytes_; }

 private:
  std::int64_t offset(std::int64_t index) const;

  DType dtype_ = DType::f32;
  std::vector<std::int64_t> sizes_, strides_;
  std::shared_ptr<std::byte> memory_;
  std::int64_t memory_bytes_ = 0;
  std::int64_t base_ = 0;  // byte offset of element 0 in memory_
};

/// By name; a name that is missing is an absent tensor.
using Tensors = std::map<std::string, Tensor>;
using Values = std::map<std::string, std::vector<double>>;

/// Strides of a contiguous tensor.
std::vector<std::int64_t> contiguous_strides(const std::vector<std::int64_t>& sizes);

}  // namespace flashqla::test
