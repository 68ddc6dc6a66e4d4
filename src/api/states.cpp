#include "api/states.hpp"

#include <algorithm>
#include <string>

namespace flashqla::api {

namespace {

constexpr DTypeSet kIndexTypes{DType::i32, DType::i64};

std::string number(std::int64_t value) { return std::to_string(value); }

}  // namespace

void require_state(Checker& checker, const ConstTensorView& view, const char* name, const Problem& p, Dimension rows,
                   DTypeSet dtypes, Role role) {
  const Dimension heads{"Hv", p.heads_v}, k{"K", p.dim_k}, v{"V", p.dim_v};
  if (p.state_layout == StateLayout::key_value) {
    checker.require(view, {name, {rows, heads, k, v}, dtypes, role, LastDimension::contiguous});
  } else {
    checker.require(view, {name, {rows, heads, v, k}, dtypes, role, LastDimension::contiguous});
  }
}

StateArguments check_states(Checker& checker, const Problem& p, const StateTensors& t) {
  const std::int64_t sequences = p.sequences();
  const Dimension one_each{"N", sequences}, slots{"slots", kAnySize};
  if (!t.read.present()) require_absent(t.accepted, "accepted", "only with read");
  if (t.initial_state.present()) {
    require_state(checker, t.initial_state, "initial_state", p, t.read.present() ? slots : one_each, small_dtypes(p),
                  Role::state_input);
  } else {
    require_absent(t.read, "read", "only with initial_state");
  }
  if (t.final_state.present()) {
    require_state(checker, t.final_state, "final_state", p, t.write.present() ? slots : one_each,
                  t.write.present() ? small_dtypes(p) : exact_dtypes(p), Role::state_output);
  } else {
    require_absent(t.write, "write", "only with final_state");
  }
  if (t.accepted.present()) {
    checker.require(t.accepted, {"accepted", {one_each}, kIndexTypes});
    checker.require(t.read, {"read", {one_each, {"P", kAnySize}}, kIndexTypes});
  } else {
    checker.optional(t.read, {"read", {one_each}, kIndexTypes});
  }
  checker.optional(t.write, {"write", {one_each}, kIndexTypes});
  return {state_view(t.initial_state, p.state_layout), state_view(t.final_state, p.state_layout), index_view(t.read),
          index_view(t.write), index_view(t.accepted)};
}

void check_row(const char* name, std::int64_t place, std::int64_t row, std::int64_t rows) {
  if (row < -1 || row >= rows) invalid(name, "-1 or a row below " + number(rows), number(row) + " at [" + number(place) + "]");
}

void check_state_indices(const StateArguments& states, const StateTensors& tensors, std::int64_t sequences) {
  if (states.accepted.present()) {
    const std::int64_t drafts = tensors.read.sizes[1];
    for (std::int64_t n = 0; n < sequences; ++n) {
      const std::int64_t accepted = states.accepted.at(n);
      if (accepted < 1 || accepted > drafts) {
        invalid("accepted", "1 to P=" + number(drafts), number(accepted) + " at [" + number(n) + "]");
      }
    }
  }
  if (states.read.present()) {
    for (std::int64_t n = 0; n < sequences; ++n) {
      const std::int64_t row = states.accepted.present() ? states.read.at(n, states.accepted.at(n) - 1) : states.read.at(n);
      check_row("read", n, row, tensors.initial_state.sizes[0]);
    }
  }
  if (states.write.present()) {
    for (std::int64_t n = 0; n < sequences; ++n) check_row("write", n, states.write.at(n), tensors.final_state.sizes[0]);
  }
}

void RowBook::begin(const char* index, const ConstTensorView& pool) {
  indices_[num_indices_++] = index;
  if (num_groups_ == 1 && same_pool(*groups_[0].pool, pool)) return;
  groups_[num_groups_++] = {&pool, count_};
}

void RowBook::check(const StateArguments& states, const ConstTensorView& initial_state, std::int64_t sequences) {
  for (std::size_t i = 0; i < num_groups_; ++i) {
    const std::int64_t end = i + 1 < num_groups_ ? groups_[i + 1].begin : count_;
    std::sort(writes_ + groups_[i].begin, writes_ + end,
              [](const Write& x, const Write& y) { return x.row != y.row ? x.row < y.row : x.origin < y.origin; });
    check_group(groups_[i], end, states, initial_state, sequences);
  }
}

void RowBook::check_group(const Group& group, std::int64_t end, const StateArguments& states,
                          const ConstTensorView& initial_state, std::int64_t sequences) const {
  const Write* const first = writes_ + group.begin;
  const Write* const last = writes_ + end;
  for (const Write* write = first; write + 1 < last; ++write) {
    if (write[0].row == write[1].row) {
      const Write& later = write[0].origin % 2 > write[1].origin % 2 ? write[0] : write[1];  // of two indices the second
      const std::int64_t one = write[0].sequence(), other = write[1].sequence();
      invalid(index_of(later), "every row written at most once",
              "row " + number(write->row) + (one == other ? " twice" : " for sequence " + number(one) + " and") +
                  " for sequence " + number(other));
    }
  }
  if (!initial_state.present() || !same_pool(initial_state, *group.pool)) return;
  for (std::int64_t n = 0; n < sequences; ++n) {
    const std::int64_t row = states.read_row(n);
    if (row < 0) continue;
    const Write* found =
        std::lower_bound(first, last, row, [](const Write& write, std::int64_t value) { return write.row < value; });
    if (found != last && found->row == row && found->sequence() != n) {
      invalid(
          index_of(*found), "no row written for one sequence and read for another",
          "row " + number(row) + ", written for sequence " + number(found->sequence()) + " and read for sequence " + number(n));
    }
  }
}

}  // namespace flashqla::api
