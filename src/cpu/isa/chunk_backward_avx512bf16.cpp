// chunk_backward with the bf16 dot products of AVX512_BF16.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cpu/chunk_backward.hpp"
#include "cpu/operations.hpp"
#include "cpu/refusal.hpp"
#include "cpu/simd/avx512bf16.hpp"

#include "cpu/simd/avx512bf16_begin.inc"

#include "cpu/kernels/chunk_backward_all.inl"

#include "cpu/kernels/gemm_bf16.inl"

#include "cpu/kernels/chunk_backward_bf16.inl"

namespace {

/// Narrow heads go through f32: a sum of few rounded products keeps their error, and packing costs more than the dot products
/// save.
bool narrow(const Problem& problem) { return problem.dim_k < 64 || problem.dim_v < 64; }

std::size_t workspace(const ChunkBackward& descriptor, int threads) {
  return narrow(descriptor.problem) ? avx512::kChunkBackward.workspace_bytes(descriptor, threads)
                                    : backward_workspace<Bf16Dot>(descriptor, threads);
}

void run(const ChunkBackwardArguments& arguments, std::byte* memory, const Parallel& parallel) {
  narrow(arguments.inputs.problem) ? avx512::kChunkBackward.run(arguments, memory, parallel)
                                   : run_backward<Bf16Dot>(arguments, memory, parallel);
}

}  // namespace

const ChunkBackwardOperation kChunkBackward{refuse_all_but_bf16<ChunkBackward>, workspace, run};

#include "cpu/simd/avx512bf16_end.inc"
