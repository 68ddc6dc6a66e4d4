// Pieces of the messages: "q: expected shape [B=2, T=5, Hq=4, K=64], got [2, 5, 3, 64]".
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "flashqla/types.hpp"

namespace flashqla::api {

/// A dimension as the documentation names it, and its size; kAnySize when the caller chooses it.
struct Dimension {
  const char* name;
  std::int64_t size;
};
inline constexpr std::int64_t kAnySize = -1;

/// A set of element types, small enough to pass around by value.
class DTypeSet {
 public:
  constexpr DTypeSet(std::initializer_list<DType> members) {
    for (DType dtype : members) bits_ |= bit(dtype);
  }
  constexpr bool contains(DType dtype) const { return (bits_ & bit(dtype)) != 0; }
  constexpr DTypeSet with(DType dtype) const {
    DTypeSet set = *this;
    set.bits_ |= bit(dtype);
    return set;
  }
  std::string text() const;  ///< "float32, bfloat16 or float16"

 private:
  static constexpr unsigned bit(DType dtype) {
    const auto value = static_cast<unsigned>(dtype);
    return value < 32 ? 1u << value : 0u;
  }
  unsigned bits_ = 0;
};

std::string text_of(std::span<const Dimension> shape);  ///< "[B=2, T=5]"
std::string text_of(std::span<const std::int64_t> sizes);
std::string shape_text(const ConstTensorView& view);  ///< "[2, 5]", or "none" when absent

/// Throw with "name: expected ..., got ...".
[[noreturn]] void invalid(const std::string& name, const std::string& expected, const std::string& got);
[[noreturn]] void invalid_type(const std::string& name, const std::string& expected, const std::string& got);

}  // namespace flashqla::api
