#include "harness/tensor.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <new>

#include "common/scalar.hpp"

namespace flashqla::test {

namespace {
constexpr std::int64_t kGuardBytes = 256;
constexpr std::int64_t kAlignment = 64;
constexpr std::byte kPoison{0xff};
constexpr std::int64_t kSparseBytes = std::int64_t{1} << 30;

std::shared_ptr<std::byte> allocate(std::int64_t bytes) {
  const auto size = static_cast<std::size_t>(bytes);
  if (bytes < kSparseBytes) return {new std::byte[size], std::default_delete<std::byte[]>()};
  void* pages = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  return {static_cast<std::byte*>(pages), [size](std::byte* memory) { munmap(memory, size); }};
}
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
  memory_bytes_ = size + 2 * kGuardBytes + kAlignment;
  memory_ = allocate(memory_bytes_);
  poison();
  const auto address = reinterpret_cast<std::uintptr_t>(memory_.get()) + kGuardBytes;
  const auto aligned = (address + kAlignment - 1) / kAlignment * kAlignment;
  base_ = static_cast<std::int64_t>(aligned - reinterpret_cast<std::uintptr_t>(memory_.get())) + (shift - lowest) * bytes;
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

double Tensor::get(std::int64_t index) const { return load_scalar(memory_.get() + base_, dtype_, offset(index)); }

void Tensor::set(std::int64_t index, double value) {
  std::byte* data = memory_.get() + base_;
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

void Tensor::poison() {
  if (memory_bytes_ < kSparseBytes) std::fill_n(memory_.get(), memory_bytes_, kPoison);
}

bool Tensor::gaps_are_poison() const {
  if (memory_bytes_ >= kSparseBytes) return true;
  std::vector<std::byte> inside(static_cast<std::size_t>(memory_bytes_));
  const std::int64_t bytes = element_bytes(dtype_), total = count();
  const std::int64_t row = !sizes_.empty() && strides_.back() == 1 ? sizes_.back() : 1;
  for (std::int64_t i = 0; i < total; i += row)
    std::fill_n(inside.begin() + base_ + offset(i) * bytes, row * bytes, std::byte{1});
  bool all = true;
  for (std::size_t i = 0; i < inside.size(); ++i) all &= inside[i] != std::byte{0} || memory_.get()[i] == kPoison;
  return all;
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
  view.data = memory_.get() + base_;
  view.dtype = dtype_;
  view.rank = static_cast<int>(sizes_.size());
  for (std::size_t d = 0; d < sizes_.size(); ++d) {
    view.sizes[d] = sizes_[d];
    view.strides[d] = strides_[d];
  }
  return view;
}

}  // namespace flashqla::test
