// Memory of a fuzzed call: each tensor in a block of its own that is exactly as large as its view reaches, so that the address
// sanitizer sees every step outside; floating contents drawn with zeros, huge values, infinities and NaN among them; and a copy
// to compare with when a call was refused.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "common/scalar.hpp"
#include "flashqla/types.hpp"

namespace flashqla::fuzz {

inline constexpr std::int64_t kMaxBlockBytes = std::int64_t{1} << 22;

class Arena {
 public:
  explicit Arena(std::uint64_t seed) : random_(seed | 1) {}

  /// Gives the view memory that covers exactly its elements, `shift` bytes off a 16-byte boundary. False when that would be too
  /// much.
  bool allocate(TensorView& view, std::size_t shift) {
    const std::int64_t bytes = element_bytes(view.dtype);
    __int128 low = 0, high = 0, count = 1;
    for (int d = 0; d < view.rank && d < kMaxRank; ++d) {
      const auto i = static_cast<std::size_t>(d);
      if (view.sizes[i] <= 0) count = 0;
      if (count != 0) count *= view.sizes[i];
      const __int128 reach = static_cast<__int128>(view.strides[i]) * (static_cast<__int128>(view.sizes[i]) - 1);
      (reach < 0 ? low : high) += reach;
      if (count > kMaxBlockBytes || high - low > kMaxBlockBytes) return false;
    }
    if (count == 0) return true;
    const auto size = static_cast<std::size_t>((high - low + 1) * bytes);
    blocks_.push_back({std::make_unique<std::byte[]>(size + shift), size + shift, {}});
    view.data = blocks_.back().data.get() + shift - static_cast<std::int64_t>(low) * bytes;
    fill(blocks_.back().data.get() + shift, size, view.dtype);
    return true;
  }

  void remember() {
    for (Block& block : blocks_) block.copy.assign(block.data.get(), block.data.get() + block.bytes);
  }
  bool unchanged() const {
    for (const Block& block : blocks_) {
      if (std::memcmp(block.data.get(), block.copy.data(), block.bytes) != 0) return false;
    }
    return true;
  }

 private:
  struct Block {
    std::unique_ptr<std::byte[]> data;
    std::size_t bytes;
    std::vector<std::byte> copy;
  };

  std::uint64_t next() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return random_;
  }

  void fill(std::byte* data, std::size_t bytes, DType dtype) {
    std::memset(data, 0, bytes);
    if (dtype > DType::f16) return;  // the caller sets indices
    const auto element = static_cast<std::size_t>(element_bytes(dtype));
    for (std::size_t at = 0; at + element <= bytes; at += element) {
      const std::uint64_t draw = next();
      double value = static_cast<double>(static_cast<std::int64_t>(draw >> 20)) * 0x1p-43 - 1.0;
      if (draw % 509 == 0) value = 1.0 / 0.0;
      if (draw % 509 == 1) value = 0.0 / 0.0;
      if (draw % 509 < 20) value *= 1e30;
      std::byte scalar[8];
      store(scalar, dtype, value);
      std::memcpy(data + at, scalar, element);
    }
  }

  static void store(std::byte* scalar, DType dtype, double value) {
    alignas(8) std::byte aligned[8];
    store_scalar(aligned, dtype, 0, value);
    std::memcpy(scalar, aligned, 8);
  }

  std::uint64_t random_;
  std::vector<Block> blocks_;
};

}  // namespace flashqla::fuzz
