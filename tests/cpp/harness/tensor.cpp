#include "harness/tensor.hpp"

#include <algorithm>

#include "common/scalar.hpp"

namespace flashqla::test {

namespace {
constexpr std::int64_t kGuardBytes = 256;
constexpr std::int64_t kAlignment = 64;
constexpr std::byte kPoison{0xff};
}  // namespace

std::vector<std::int64_t> contiguous_strides(const std::vector<std::int64_t>& sizes) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * sizes[d];
  return strides;
}

Tensor::Tensor(DType dtype, std::vector<std::int64_t> sizes) : Tensor(dtype, sizes, contiguous_strides(sizes)) {}

Tensor::Tensor(DType dtype, std::vector<std::int64_t> sizes, std::vector<std::int64_t> strides, std::int64_t shift)
    : dtype_(dtype), sizes_(std::move(sizes)), strides_(std::move(strides)) {
  std::int64_t lowest = 0, highest = 0;
  for (std::size_t d = 0; d < sizes_.size(); ++d) {
    const std::int64_t reach = std::max<std::int64_t>(sizes_[d] - 1, 0) * strides_[d];
    (reach < 0 ? lowest : highest) += reach;
  }
  const std::int64_t bytes = element_bytes(dtype_);
  const std::int64_t size = (highest - lowest + 1 + shift) * bytes;
  memory_ = std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(size + 2 * kGuardBytes + kAlignment), kPoison);
  const auto address = reinterpret_cast<std::uintptr_t>(memory_->data()) + kGuardBytes;
  const auto aligned = (address + kAlignment - 1) / kAlignment * kAlignment;
  base_ = static_cast<std::int64_t>(aligned - reinterpret_cast<std::uintptr_t>(memory_->data())) + (shift - lowest) * bytes;
}

std::int64_t Tensor::count() const {
  if (!present()) return 0;
  std::int64_t count = 1;
  for (std::int64_t size : sizes_) count *= size;
  return count;
}

std::int64_t Tensor::offset(std::int64_t index) const {
  std::int64_t offset = 0;
  for (std::size_t d = sizes_.size(); d-- > 0;) {
    offset += index % sizes_[d] * strides_[d];
    index /= sizes_[d];
  }
  return offset;
}

double Tensor::get(std::int64_t index) const { return load_scalar(memory_->data() + base_, dtype_, offset(index)); }

void Tensor::set(std::int64_t index, double value) {
  std::byte* data = memory_->data() + base_;
  if (dtype_ == DType::i64) {
    reinterpret_cast<std::int64_t*>(data)[offset(index)] = static_cast<std::int64_t>(value);
  } else if (dtype_ == DType::i32) {
    reinterpret_cast<std::int32_t*>(data)[offset(index)] = static_cast<std::int32_t>(value);
  } else {
    store_scalar(data, dtype_, offset(index), value);
  }
}

std::vector<double> Tensor::values() const {
  std::vector<double> values(static_cast<std::size_t>(count()));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = get(static_cast<std::int64_t>(i));
  return values;
}

void Tensor::set_values(const std::vector<double>& values) {
  for (std::size_t i = 0; i < values.size(); ++i) set(static_cast<std::int64_t>(i), values[i]);
}

void Tensor::fill(double value) {
  for (std::int64_t i = 0; i < count(); ++i) set(i, value);
}

void Tensor::poison() { std::fill(memory_->begin(), memory_->end(), kPoison); }

bool Tensor::gaps_are_poison() const {
  std::vector<bool> inside(memory_->size(), false);
  const std::int64_t bytes = element_bytes(dtype_);
  for (std::int64_t i = 0; i < count(); ++i) {
    for (std::int64_t b = 0; b < bytes; ++b) inside[static_cast<std::size_t>(base_ + offset(i) * bytes + b)] = true;
  }
  for (std::size_t i = 0; i < inside.size(); ++i) {
    if (!inside[i] && (*memory_)[i] != kPoison) return false;
  }
  return true;
}

Tensor Tensor::slice(int dim, std::int64_t start, std::int64_t length) const {
  Tensor result = *this;
  const auto d = static_cast<std::size_t>(dim);
  result.base_ += start * strides_[d] * element_bytes(dtype_);
  result.sizes_[d] = length;
  return result;
}

Tensor Tensor::split_last(std::int64_t heads, std::int64_t size) const {
  Tensor result = *this;
  result.sizes_.back() = heads;
  result.sizes_.push_back(size);
  result.strides_.back() *= size;
  result.strides_.push_back(strides_.back());
  return result;
}

Tensor Tensor::clone() const {
  Tensor result = *this;
  if (!present()) return result;
  result = Tensor(dtype_, sizes_, strides_);
  result.set_values(values());
  return result;
}

Tensor Tensor::to(DType dtype) const {
  if (!present()) return {};
  Tensor result(dtype, sizes_);
  result.set_values(values());
  return result;
}

TensorView Tensor::view() const {
  TensorView view;
  if (!present()) return view;
  view.data = memory_->data() + base_;
  view.dtype = dtype_;
  view.rank = static_cast<int>(sizes_.size());
  for (std::size_t d = 0; d < sizes_.size(); ++d) {
    view.sizes[d] = sizes_[d];
    view.strides[d] = strides_[d];
  }
  return view;
}

}  // namespace flashqla::test
