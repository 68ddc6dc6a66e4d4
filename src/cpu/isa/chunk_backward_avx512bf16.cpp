// chunk_backward with the bf16 dot products of AVX512_BF16.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "common/environment.hpp"
#include "cpu/chunk_backward.hpp"
#include "cpu/operations.hpp"
#include "cpu/refusal.hpp"
#include "cpu/simd/avx512bf16.hpp"

#include "cpu/simd/avx512bf16_begin.inc"

#include "cpu/kernels/chunk_backward_all.inl"

#include "cpu/kernels/fixed_point.inl"

#include "cpu/kernels/chunk_backward_bf16.inl"

namespace {

/// What goes through f32. Narrow heads: a sum of few rounded products keeps their error, and packing costs more than the dot
/// products save. L2 normalisation inside: normalised rows, unlike the caller's, are not exact in bf16, and over a few tokens the
/// gradients of the gate and of beta then leave their bounds.
bool needs_f32(const Problem& problem) { return problem.qk_l2norm || problem.dim_k < 64 || problem.dim_v < 64; }

/// Only by name: with beta |k|^2 near 2, or keys that repeat, the bf16 states and updates leave gradients outside of their bounds
/// (docs/numerics.md).
std::string refuse_unless_named(const ChunkBackward& descriptor) {
  if (environment::forced_implementation() != "cpu-avx512bf16")
    return "its gradients are too coarse for large beta and for keys that repeat; FLASHQLA_IMPL=cpu-avx512bf16 takes it "
           "nevertheless";
  return refuse_all_but_bf16(descriptor);
}

std::size_t workspace(const ChunkBackward& descriptor, int threads) {
  return needs_f32(descriptor.problem) ? avx512::kChunkBackward.workspace_bytes(descriptor, threads)
                                       : backward_workspace<Bf16Dot>(descriptor, threads);
}

void run(const ChunkBackwardArguments& arguments, std::byte* memory, const Parallel& parallel) {
  needs_f32(arguments.inputs.problem) ? avx512::kChunkBackward.run(arguments, memory, parallel)
                                      : run_backward<Bf16Dot>(arguments, memory, parallel);
}

}  // namespace

const ChunkBackwardOperation kChunkBackward{refuse_unless_named, workspace, run};

#include "cpu/simd/avx512bf16_end.inc"
