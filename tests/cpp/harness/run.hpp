// Runs a case through the public API under one named implementation. Outputs and workspace hold NaN first; bytes outside the
// outputs' views must not change.
#pragma once

#include <string>
#include <vector>

#include "flashqla/flashqla.hpp"
#include "harness/case.hpp"
#include "harness/inputs.hpp"

namespace flashqla::test {

/// A Parallel that runs its tasks on `threads` new threads, which take them in turn.
Parallel threads_of_test(int threads);

struct RunOptions {
  std::string implementation;  ///< exact name
  int threads = 1;
  std::string saved_by = {};     ///< with Case::saved, the implementation that the forward runs on; empty: the same
  std::int64_t saved_shift = 0;  ///< elements between a 64-byte boundary and the first of saved
};

/// Poisoned outputs of the case by the names of the public headers. An in-place pool is a copy of the input pool under
/// "final_state".
Tensors make_outputs(const Case& c, const Tensors& inputs);

/// All outputs, in row-major order of their sizes. Throws what the library throws, and std::runtime_error when it writes where it
/// must not or when another implementation was planned.
Values run_case(const Case& c, const Tensors& inputs, const RunOptions& options);

/// Into `outputs`, which the caller made.
void run_case_into(const Case& c, const Tensors& inputs, const RunOptions& options, Tensors& outputs);

/// What the reference computes from the same numbers in double.
Values truth(const Case& c, const Tensors& inputs);

/// The case with every floating type double.
Case in_double(Case c);

/// Whether the implementation must take problems with q, k, v of `dtype`: those of bf16 dot products (named so) take nothing but
/// bf16, all others everything.
bool takes(const std::string& implementation, DType dtype);

/// Names of the cpu-* implementations that have the operation, run on this processor and must take `dtype`.
std::vector<std::string> cpu_implementations(Op op, DType dtype);

}  // namespace flashqla::test
