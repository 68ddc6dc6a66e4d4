// Checks of single tensors (shape, dtype, strides, memory) and of their overlaps. A Checker lives through one run(): every tensor
// of the call goes through it, then check_overlaps() compares them all. Nothing here reads a tensor's elements.
#pragma once

#include <array>
#include <initializer_list>

#include "api/text.hpp"
#include "common/arguments.hpp"

namespace flashqla::api {

enum class LastDimension { any, contiguous };

/// How a tensor takes part in a call. Views of one state pool may be several `state_*` tensors of a call; then the rows decide
/// (rows.hpp).
enum class Role { input, output, state_input, state_output };

struct Expectation {
  const char* name;
  std::initializer_list<Dimension> shape;
  DTypeSet dtypes;
  Role role = Role::input;
  LastDimension last = LastDimension::any;
};

/// Whether tensors may come without memory, to be checked in everything but their contents.
enum class Memory { required, optional };

class Checker {
 public:
  explicit Checker(Memory memory) : memory_(memory) {}

  /// Throws unless `view` is as expected. An absent one has the wrong shape.
  void require(const ConstTensorView& view, const Expectation& expected);

  /// The same for a tensor that may be left out.
  void optional(const ConstTensorView& view, const Expectation& expected) {
    if (view.present()) require(view, expected);
  }

  /// Throws if an output shares memory with another tensor. State tensors that are the same view of the same pool are let
  /// through.
  void check_overlaps() const;

  /// Whether every tensor seen has memory, so that contents can be looked at.
  bool complete() const { return complete_; }

 private:
  struct Entry {
    const char* name;
    Role role;
    ConstTensorView view;
  };
  void check_memory(const ConstTensorView& view, const Expectation& expected);

  Memory memory_;
  bool complete_ = true;
  std::array<Entry, 32> entries_{};
  int count_ = 0;
};

/// Throws unless the tensor is absent. `when`: "only with Gate::computed".
void require_absent(const ConstTensorView& view, const char* name, const char* when);

/// Whether two state tensors address their rows alike: same memory, dtype and strides. They may differ in their number of rows.
bool same_pool(const ConstTensorView& x, const ConstTensorView& y);

/// Element types of a small tensor (gates, states) of a problem.
DTypeSet small_dtypes(const Problem& problem);

/// Element types of what is never rounded below single precision (final states, cumulative gates).
DTypeSet exact_dtypes(const Problem& problem);

// Views as implementations take them, of tensors that have been checked; absent ones give absent ones.
ConstTokenView token_view(const ConstTensorView& view);
MutableTokenView token_view(const TensorView& view);
ConstHeadView head_view(const ConstTensorView& view);
MutableHeadView head_view(const TensorView& view);
ConstStateView state_view(const ConstTensorView& view, StateLayout layout);
MutableStateView state_view(const TensorView& view, StateLayout layout);
IndexView index_view(const ConstTensorView& view);

}  // namespace flashqla::api
