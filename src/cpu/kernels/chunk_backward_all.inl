// All of chunk_backward for one instruction set. Included inside its namespace; each file below needs those before it.
#pragma once

#include "cpu/kernels/math.inl"

#include "cpu/kernels/rows.inl"

#include "cpu/kernels/gates.inl"

#include "cpu/kernels/gemm.inl"

#include "cpu/kernels/prefetch.inl"

#include "cpu/kernels/chunk_backward_blocks.inl"

#include "cpu/kernels/chunk_backward_gates.inl"

#include "cpu/kernels/chunk_backward_group.inl"

#include "cpu/kernels/chunk_backward_states.inl"

#include "cpu/kernels/chunk_backward_reverse.inl"

#include "cpu/kernels/chunk_backward_rows.inl"

#include "cpu/kernels/chunk_backward_check.inl"

#include "cpu/kernels/chunk_backward.inl"

template <class Dot>
inline constexpr BackwardKernel kBackwardKernel{
    backward_scratch_bytes<Dot>, [](const BackwardItem& item) { static_cast<void>(backward_item<Dot>(item)); }, kWidth};

template <class Dot>
inline std::size_t backward_workspace(const ChunkBackward& descriptor, int threads) {
  return flashqla::cpu::chunk_backward_workspace(descriptor, threads, kBackwardKernel<Dot>);
}
template <class Dot>
inline void run_backward(const ChunkBackwardArguments& arguments, std::byte* workspace, const Parallel& parallel) {
  flashqla::cpu::chunk_backward(arguments, workspace, parallel, kBackwardKernel<Dot>);
}
