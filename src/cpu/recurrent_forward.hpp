// recurrent_forward on the CPU, as far as it is the same for all instruction sets: how a call is cut into pieces of work, and the
// signature of the kernels that do them.
//
// A slab is up to `slab_columns` columns (of V) of one value head of one sequence. Slabs are numbered by sequence, then head,
// then column, and a kernel computes a run of them, all tokens of each. What a slab computes depends on nothing but its own
// sequence and head.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/arguments.hpp"

namespace flashqla::cpu {

/// Tokens whose k, q and gates are kept prepared while the slabs of one q/k head are computed.
inline constexpr std::int64_t kPreparedTokens = 8;

/// K and the columns of a slab are padded to this in scratch: the widest vector, in f32.
inline constexpr std::int64_t kRecurrentPadding = 16;

struct RecurrentWork {
  const RecurrentForwardArguments* arguments = nullptr;
  std::int64_t slab_columns = 0;
  std::int64_t slabs_per_head = 0;
  bool in_order = false;  // rows one after another, as they lie in memory

  std::int64_t slabs() const { return arguments->inputs.sequences.count * arguments->inputs.problem.heads_v * slabs_per_head; }
};

/// Computes slabs [begin, end) with scratch of one thread, 64-byte aligned.
using RecurrentKernel = void (*)(const RecurrentWork& work, std::int64_t begin, std::int64_t end, std::byte* scratch);

std::size_t recurrent_workspace_bytes(const RecurrentForward& descriptor, int threads);
void run_recurrent_forward(const RecurrentForwardArguments& arguments, std::byte* workspace, const Parallel& parallel,
                           RecurrentKernel kernel);

}  // namespace flashqla::cpu
