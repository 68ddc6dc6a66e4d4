#include "api/text.hpp"

#include <array>

#include "flashqla/error.hpp"

namespace flashqla::api {

std::string DTypeSet::text() const {
  std::array<const char*, 6> names{};
  std::size_t count = 0;
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32}) {
    if (contains(dtype)) names[count++] = name_of(dtype);
  }
  std::string text;
  for (std::size_t i = 0; i < count; ++i) {
    if (i > 0) text += i + 1 == count ? " or " : ", ";
    text += names[i];
  }
  return text;
}

std::string text_of(std::span<const Dimension> shape) {
  std::string text = "[";
  for (const Dimension& dimension : shape) {
    if (text.size() > 1) text += ", ";
    text += dimension.name;
    if (dimension.size != kAnySize) text.append("=").append(std::to_string(dimension.size));
  }
  return text + "]";
}

std::string text_of(std::span<const std::int64_t> sizes) {
  std::string text = "[";
  for (const std::int64_t size : sizes) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

std::string shape_text(const ConstTensorView& view) {
  if (!view.present()) return "none";
  if (view.rank > kMaxRank) return std::to_string(view.rank) + " dimensions";
  return text_of(std::span(view.sizes).first(static_cast<std::size_t>(view.rank)));
}

void invalid(const std::string& name, const std::string& expected, const std::string& got) {
  throw InvalidArgument(name + ": expected " + expected + ", got " + got);
}

void invalid_type(const std::string& name, const std::string& expected, const std::string& got) {
  throw InvalidType(name + ": expected " + expected + ", got " + got);
}

}  // namespace flashqla::api
