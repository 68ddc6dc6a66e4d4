#include "bench/data.hpp"

#include <sys/mman.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "common/scalar.hpp"

namespace flashqla::bench {
namespace {

/// Rows of `dim` numbers, each scaled to length 1.
void fill_unit_rows(Tensor& tensor, std::int64_t dim, Random& random) {
  std::vector<double> row(static_cast<std::size_t>(dim));
  for (std::int64_t begin = 0; begin < tensor.count(); begin += dim) {
    double sum = 0;
    for (double& value : row) {
      value = random.normal();
      sum += value * value;
    }
    const double scale = 1 / std::sqrt(sum);
    for (std::int64_t d = 0; d < dim; ++d) tensor.store(begin + d, scale * row[static_cast<std::size_t>(d)]);
  }
}

}  // namespace

LargePages::LargePages(std::size_t bytes) : bytes_(bytes) {
  constexpr std::size_t kPage = std::size_t{2} << 20;
  const std::size_t whole = (bytes + kPage - 1) / kPage * kPage;
  data_ = static_cast<std::byte*>(std::aligned_alloc(kPage, whole));
  if (data_ == nullptr && whole > 0) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(data_, whole, MADV_HUGEPAGE);
#endif
  std::memset(data_, 0, whole);
}

LargePages::LargePages(const LargePages& other) : LargePages(other.bytes_) {
  if (bytes_ > 0) std::memcpy(data_, other.data_, bytes_);
}

LargePages& LargePages::operator=(LargePages other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

LargePages::LargePages(LargePages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

LargePages::~LargePages() { std::free(data_); }

Tensor::Tensor(DType dtype, std::vector<std::int64_t> sizes) : dtype_(dtype), sizes_(std::move(sizes)) {
  memory_ = LargePages(static_cast<std::size_t>(count() * element_bytes(dtype_)));
}

TensorView Tensor::view() {
  TensorView view;
  view.data = memory_.data();
  view.dtype = dtype_;
  view.rank = static_cast<int>(sizes_.size());
  std::int64_t stride = 1;
  for (std::size_t d = sizes_.size(); d-- > 0;) {
    view.sizes[d] = sizes_[d];
    view.strides[d] = stride;
    stride *= sizes_[d];
  }
  return view;
}

std::int64_t Tensor::count() const {
  std::int64_t count = 1;
  for (std::int64_t size : sizes_) count *= size;
  return count;
}

void Tensor::store(std::int64_t index, double value) { store_scalar(memory_.data(), dtype_, index, value); }

double Random::uniform() {
  state_ += 0x9e3779b97f4a7c15u;
  std::uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

double Random::normal() {
  double sum = 0;
  for (int i = 0; i < 12; ++i) sum += uniform();
  return sum - 6;
}

void fill_normal(Tensor& tensor, double size, Random& random) {
  for (std::int64_t i = 0; i < tensor.count(); ++i) tensor.store(i, size * random.normal());
}

Inputs make_inputs(const Case& bench_case, Random& random) {
  const std::int64_t batch = bench_case.batch, tokens = bench_case.tokens, heads = bench_case.heads_v;
  Inputs inputs;
  inputs.q = Tensor(bench_case.dtype, {batch, tokens, bench_case.heads_qk, bench_case.dim_k});
  inputs.k = Tensor(bench_case.dtype, {batch, tokens, bench_case.heads_qk, bench_case.dim_k});
  inputs.v = Tensor(bench_case.dtype, {batch, tokens, heads, bench_case.dim_v});
  inputs.g = Tensor(DType::f32, {batch, tokens, heads});
  inputs.beta = Tensor(DType::f32, {batch, tokens, heads});
  fill_unit_rows(inputs.q, bench_case.dim_k, random);
  fill_unit_rows(inputs.k, bench_case.dim_k, random);
  fill_normal(inputs.v, 1.0, random);
  for (std::int64_t i = 0; i < inputs.g.count(); ++i) {
    const std::int64_t head = i % heads;
    // Time constants from about 1 to about 1000 tokens.
    const double rate = head % 4 == 0 ? 0.0 : std::exp2(-static_cast<double>(head % 11));
    inputs.g.store(i, -rate * std::log1p(std::exp(random.normal())));
    inputs.beta.store(i, 1 / (1 + std::exp(-random.normal())));
  }
  return inputs;
}

}  // namespace flashqla::bench
