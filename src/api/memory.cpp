#include "api/memory.hpp"

#include <array>
#include <cstdlib>
#include <span>

#include "api/text.hpp"

namespace flashqla::api {

namespace {

/// Bytes [begin, end) around an origin.
struct Range {
  std::int64_t begin, end;
};

/// One dimension with more than one element, in bytes.
struct Step {
  std::int64_t stride, count;
};

struct Steps {
  std::array<Step, kMaxRank> list{};
  std::size_t count = 0;

  std::span<const Step> all() const { return std::span(list).first(count); }
};

Steps steps_of(const ConstTensorView& view) {
  Steps steps;
  for (int d = 0; d < view.rank; ++d) {
    const auto i = static_cast<std::size_t>(d);
    if (view.sizes[i] > 1) steps.list[steps.count++] = {view.strides[i] * element_bytes(view.dtype), view.sizes[i]};
  }
  return steps;
}

/// Bytes that the steps reach relative to the first element, leaving out those that a modulus takes away.
Range reach(std::span<const Step> steps, std::int64_t bytes, std::int64_t modulus) {
  Range range{0, bytes};
  for (const Step& step : steps) {
    if (modulus != 0 && step.stride % modulus == 0) continue;
    const std::int64_t distance = step.stride * (step.count - 1);
    (distance < 0 ? range.begin : range.end) += distance;
  }
  return range;
}

}  // namespace

std::int64_t num_elements(const ConstTensorView& view) {
  std::int64_t count = 1;
  for (int d = 0; d < view.rank; ++d) {
    const std::int64_t size = view.sizes[static_cast<std::size_t>(d)];
    if (size == 0) return 0;
    if (__builtin_mul_overflow(count, size, &count)) count = INT64_MAX;
  }
  return count;
}

std::string strides_text(const ConstTensorView& view) {
  return "strides " + text_of(std::span(view.strides).first(static_cast<std::size_t>(view.rank)));
}

bool extent_fits(const ConstTensorView& view) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 60;
  const std::int64_t bytes = element_bytes(view.dtype);
  std::int64_t below = 0, above = bytes;
  for (int d = 0; d < view.rank; ++d) {
    const auto i = static_cast<std::size_t>(d);
    if (view.sizes[i] <= 1) continue;
    std::int64_t distance = 0, total = 0;
    if (__builtin_mul_overflow(view.strides[i], view.sizes[i] - 1, &distance) ||
        __builtin_mul_overflow(distance, bytes, &distance) || distance < -kLimit || distance > kLimit) {
      return false;
    }
    if (__builtin_add_overflow(distance < 0 ? below : above, distance, &total) || total < -kLimit || total > kLimit) return false;
    (distance < 0 ? below : above) = total;
  }
  if (view.data == nullptr) return true;
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  return address >= static_cast<std::uintptr_t>(-below) && address <= UINTPTR_MAX - static_cast<std::uintptr_t>(above);
}

bool elements_distinct(const ConstTensorView& view) {
  const Steps steps = steps_of(view);
  // A step that is longer than all shorter ones reach together never meets them.
  for (const Step& step : steps.all()) {
    if (step.stride == 0) return false;
    std::int64_t inside = element_bytes(view.dtype);
    for (const Step& other : steps.all()) {
      if (&other == &step || std::abs(other.stride) > std::abs(step.stride)) continue;
      inside += std::abs(other.stride) * (other.count - 1);
    }
    if (std::abs(step.stride) < inside) return false;
  }
  return true;
}

bool certainly_disjoint(const ConstTensorView& x, const ConstTensorView& y) {
  if (num_elements(x) == 0 || num_elements(y) == 0) return true;
  const Steps x_steps = steps_of(x), y_steps = steps_of(y);
  const std::int64_t x_bytes = element_bytes(x.dtype), y_bytes = element_bytes(y.dtype);
  const auto offset =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(y.data) - reinterpret_cast<std::uintptr_t>(x.data));

  // With x's first element at 0 and y's at `offset`: no y - x may lie in (-y's length, x's length), modulo the modulus.
  const auto apart = [&](std::int64_t modulus) {
    const Range a = reach(x_steps.all(), x_bytes, modulus), b = reach(y_steps.all(), y_bytes, modulus);
    if (modulus == 0) return offset + b.begin >= a.end || offset + b.end <= a.begin;
    const std::int64_t length = (a.end - a.begin) + (b.end - b.begin);
    if (length > modulus) return false;
    std::int64_t gap = (offset % modulus + b.begin % modulus - a.begin % modulus) % modulus;  // from a's begin up to b's begin
    if (gap < 0) gap += modulus;
    return gap >= a.end - a.begin && gap + (b.end - b.begin) <= modulus;
  };
  if (apart(0)) return true;
  for (const Steps* steps : {&x_steps, &y_steps}) {
    for (const Step& step : steps->all()) {
      if (step.stride != 0 && apart(std::abs(step.stride))) return true;
    }
  }
  return false;
}

}  // namespace flashqla::api
