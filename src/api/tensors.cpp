#include "api/tensors.hpp"

#include <cstdint>

#include "api/memory.hpp"

namespace flashqla::api {

namespace {

bool shape_fits(const ConstTensorView& view, std::initializer_list<Dimension> shape) {
  if (view.rank != static_cast<int>(shape.size())) return false;
  std::size_t d = 0;
  for (const Dimension& dimension : shape) {
    const std::int64_t size = view.sizes[d++];
    if (size < 0 || (dimension.size != kAnySize && size != dimension.size)) return false;
  }
  return true;
}

}  // namespace

void Checker::check_memory(const ConstTensorView& view, const Expectation& expected) {
  if (num_elements(view) == 0) return;
  if (view.data == nullptr) {
    if (memory_ == Memory::required) invalid(expected.name, "memory for its " + shape_text(view) + " elements", "a null pointer");
    complete_ = false;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  const std::int64_t bytes = element_bytes(view.dtype);
  if (address % static_cast<std::uintptr_t>(bytes) != 0) {
    invalid(expected.name, "an address that is a multiple of " + std::to_string(bytes), "one that is not");
  }
  if (!extent_fits(view)) invalid(expected.name, "strides that stay inside the address space", strides_text(view));
  const bool written = expected.role == Role::output || expected.role == Role::state_output;
  if (written && !elements_distinct(view)) {
    invalid(expected.name, "strides that give every element memory of its own, as it is written", strides_text(view));
  }
}

void Checker::require(const ConstTensorView& view, const Expectation& expected) {
  if (!shape_fits(view, expected.shape)) {
    invalid(expected.name, "shape " + text_of(std::span(expected.shape.begin(), expected.shape.size())), shape_text(view));
  }
  if (!expected.dtypes.contains(view.dtype)) invalid_type(expected.name, expected.dtypes.text(), name_of(view.dtype));
  const auto last = static_cast<std::size_t>(view.rank - 1);
  if (expected.last == LastDimension::contiguous && view.sizes[last] > 1 && view.strides[last] != 1) {
    invalid(expected.name, "a contiguous last dimension (stride 1)", "stride " + std::to_string(view.strides[last]));
  }
  check_memory(view, expected);
  entries_[static_cast<std::size_t>(count_++)] = {expected.name, expected.role, view};
}

void Checker::check_overlaps() const {
  const auto is_state = [](Role role) { return role == Role::state_input || role == Role::state_output; };
  const auto is_input = [](Role role) { return role == Role::input || role == Role::state_input; };
  for (int i = 0; i < count_; ++i) {
    for (int j = 0; j < i; ++j) {
      const Entry& x = entries_[static_cast<std::size_t>(i)];
      const Entry& y = entries_[static_cast<std::size_t>(j)];
      if (is_input(x.role) && is_input(y.role)) continue;
      if (x.view.data == nullptr || y.view.data == nullptr) continue;
      if (certainly_disjoint(x.view, y.view)) continue;
      if (is_state(x.role) && is_state(y.role) && same_pool(x.view, y.view)) continue;
      const Entry& written = is_input(x.role) ? y : x;
      const Entry& other = is_input(x.role) ? x : y;
      invalid(written.name, std::string("memory apart from that of ") + other.name, "an overlap");
    }
  }
}

void require_absent(const ConstTensorView& view, const char* name, const char* when) {
  if (view.present()) invalid(name, std::string("none (it is given ") + when + ")", shape_text(view));
}

bool same_pool(const ConstTensorView& x, const ConstTensorView& y) {
  return x.data == y.data && x.dtype == y.dtype && x.rank == y.rank && x.strides == y.strides;
}

DTypeSet small_dtypes(const Problem& problem) {
  const DTypeSet floats{DType::f32, DType::bf16, DType::f16};
  return problem.dtype == DType::f64 ? floats.with(DType::f64) : floats;
}

DTypeSet exact_dtypes(const Problem& problem) {
  return problem.dtype == DType::f64 ? DTypeSet{DType::f64, DType::f32} : DTypeSet{DType::f32};
}

namespace {

template <class Byte, class View>
TokenView<Byte> as_tokens(const View& view) {
  if (!view.present()) return {};
  return {static_cast<Byte*>(view.data), view.dtype, view.strides[0], view.strides[1], view.strides[2]};
}

template <class Byte, class View>
HeadView<Byte> as_heads(const View& view) {
  if (!view.present()) return {};
  return {static_cast<Byte*>(view.data), view.dtype, view.strides[0]};
}

template <class Byte, class View>
StateView<Byte> as_state(const View& view, StateLayout layout) {
  if (!view.present()) return {};
  return {static_cast<Byte*>(view.data), view.dtype, layout, view.strides[0], view.strides[1], view.strides[2], view.sizes[0]};
}

}  // namespace

ConstTokenView token_view(const ConstTensorView& view) { return as_tokens<const std::byte>(view); }
MutableTokenView token_view(const TensorView& view) { return as_tokens<std::byte>(view); }
ConstHeadView head_view(const ConstTensorView& view) { return as_heads<const std::byte>(view); }
MutableHeadView head_view(const TensorView& view) { return as_heads<std::byte>(view); }
ConstStateView state_view(const ConstTensorView& view, StateLayout layout) { return as_state<const std::byte>(view, layout); }
MutableStateView state_view(const TensorView& view, StateLayout layout) { return as_state<std::byte>(view, layout); }

IndexView index_view(const ConstTensorView& view) {
  if (!view.present()) return {};
  return {view.data, view.dtype, view.strides[0], view.strides[1], view.sizes[0], view.sizes[1]};
}

}  // namespace flashqla::api
