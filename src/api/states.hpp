// Checks of state tensors and of the indices that pick their rows.
#pragma once

#include "api/tensors.hpp"

namespace flashqla::api {

/// Shape, dtype, strides of a [rows, Hv, K, V] tensor in the problem's layout.
void require_state(Checker& checker, const ConstTensorView& view, const char* name, const Problem& problem, Dimension rows,
                   DTypeSet dtypes, Role role);

/// Shapes, dtypes, strides of initial_state, final_state, read, write and accepted.
StateArguments check_states(Checker& checker, const Problem& problem, const StateTensors& tensors);

/// Contents of read, write and accepted: linear in the number of sequences.
void check_state_indices(const StateArguments& states, const StateTensors& tensors, std::int64_t sequences);

/// Throws unless `row` is -1 or inside a tensor of so many rows. `place`: its position in the index tensor `name`.
void check_row(const char* name, std::int64_t place, std::int64_t row, std::int64_t rows);

/// Collects the rows of state tensors that a call writes, in the workspace, and refuses those written twice, or written for one
/// sequence and read for another. Tensors that are the same pool count as one.
class RowBook {
 public:
  struct Write {
    std::int64_t row, origin;  // origin: twice the sequence, plus the number of the index that chose the row

    std::int64_t sequence() const { return origin / 2; }
  };

  explicit RowBook(std::byte* scratch) : writes_(reinterpret_cast<Write*>(scratch)) {}

  /// Scratch for so many writes.
  static std::size_t bytes(std::int64_t writes) { return static_cast<std::size_t>(writes) * sizeof(Write); }

  /// The writes that follow go to `pool`; `index` is the argument that chose their rows.
  void begin(const char* index, const ConstTensorView& pool);
  void add(std::int64_t row, std::int64_t sequence) {
    if (row >= 0) writes_[count_++] = {row, 2 * sequence + static_cast<std::int64_t>(num_indices_ - 1)};
  }
  void check(const StateArguments& states, const ConstTensorView& initial_state, std::int64_t sequences);

 private:
  struct Group {
    const ConstTensorView* pool = nullptr;
    std::int64_t begin = 0;
  };
  void check_group(const Group& group, std::int64_t end, const StateArguments& states, const ConstTensorView& initial_state,
                   std::int64_t sequences) const;

  const char* index_of(const Write& write) const { return indices_[static_cast<std::size_t>(write.origin % 2)]; }

  Write* writes_;
  std::int64_t count_ = 0;
  std::array<Group, 2> groups_{};
  std::array<const char*, 2> indices_{};
  std::size_t num_groups_ = 0, num_indices_ = 0;
};

}  // namespace flashqla::api
