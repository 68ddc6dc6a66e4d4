// The chunk_backward operation of an instruction set that computes in f32, whatever the dtype of the tensors. Included inside its
// namespace; each file below needs those before it.

#include "cpu/kernels/math.inl"

#include "cpu/kernels/rows.inl"

#include "cpu/kernels/gates.inl"

#include "cpu/kernels/gemm.inl"

#include "cpu/kernels/chunk_backward_blocks.inl"

#include "cpu/kernels/chunk_backward_gates.inl"

#include "cpu/kernels/chunk_backward_group.inl"

#include "cpu/kernels/chunk_backward_states.inl"

#include "cpu/kernels/chunk_backward_reverse.inl"

#include "cpu/kernels/chunk_backward.inl"

inline constexpr BackwardKernel kBackwardKernel{backward_scratch_bytes<F32Dot>, backward_item<F32Dot>};

inline std::string refuse_backward(const ChunkBackward& descriptor) {
  return descriptor.problem.dtype == DType::f64 ? "float64 is computed by the reference only" : "";
}
inline std::size_t backward_workspace(const ChunkBackward& descriptor, int threads) {
  return flashqla::cpu::chunk_backward_workspace(descriptor, threads, kBackwardKernel);
}
inline void run_backward(const ChunkBackwardArguments& arguments, std::byte* workspace, const Parallel& parallel) {
  flashqla::cpu::chunk_backward(arguments, workspace, parallel, kBackwardKernel);
}

const ChunkBackwardOperation kChunkBackward{refuse_backward, backward_workspace, run_backward};
