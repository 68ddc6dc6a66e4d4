// Random inputs as a trained layer would see them: unit keys and queries, values of size 1, beta between 0 and 1, and heads that
// forget at very different speeds: one head in four does not decay at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bench/cases.hpp"
#include "flashqla/types.hpp"

namespace flashqla::bench {

/// Memory aligned to large pages, which the system is asked to use: in a virtual machine each miss of a translation costs some
/// 0.3 us, and a caller with large tensors (PyTorch with THP_MEM_ALLOC_ENABLE=1) avoids them too.
class LargePages {
 public:
  LargePages() = default;
  explicit LargePages(std::size_t bytes);
  LargePages(const LargePages& other);
  LargePages& operator=(LargePages other) noexcept;
  LargePages(LargePages&& other) noexcept;
  ~LargePages();

  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// A contiguous tensor that owns its memory.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::vector<std::int64_t> sizes);

  TensorView view();
  std::int64_t count() const;
  void store(std::int64_t index, double value);

 private:
  DType dtype_ = DType::f32;
  std::vector<std::int64_t> sizes_;
  LargePages memory_;
};

/// splitmix64
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  double uniform();  ///< [0, 1)
  double normal();   ///< mean 0, variance 1 (a sum of uniforms)

 private:
  std::uint64_t state_;
};

struct Inputs {
  Tensor q, k, v, g, beta;
};

Inputs make_inputs(const Case& bench_case, Random& random);
void fill_normal(Tensor& tensor, double size, Random& random);

}  // namespace flashqla::bench
