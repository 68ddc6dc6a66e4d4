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

/// Takes a case's tensors to where an implementation computes, and back.
class Mover {
 public:
  virtual ~Mover() = default;
  virtual Device device() const = 0;
  /// Where the memory of the tensor is there; the same for tensors that share memory.
  virtual std::byte* place(const Tensor& tensor) = 0;
  /// 64-byte aligned memory full of NaN.
  virtual std::byte* workspace(std::size_t bytes) = 0;
  virtual Stream stream() = 0;
  /// Waits, and brings back what was placed. Throws if memory beside the tensors or the workspace was written.
  virtual void finish() = 0;
};

struct RunOptions {
  std::string implementation;  ///< exact name
  int threads = 1;
  std::string saved_by = {};     ///< with Case::saved, the implementation that the forward runs on; empty: the same
  std::int64_t saved_shift = 0;  ///< elements between a 64-byte boundary and the first of saved
  Mover* mover = nullptr;        ///< to another device than the CPU
};

/// Poisoned outputs of the case by the names of the public headers. An in-place pool is a copy of the input pool under
/// "final_state".
Tensors make_outputs(const Case& c, const Tensors& inputs);

/// Views of a case's tensors for chunk_forward, where `mover` (null: the CPU) has them.
ChunkForwardTensors forward_tensors(const Case& c, const Tensors& inputs, const Tensors& outputs, Mover* mover);

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
