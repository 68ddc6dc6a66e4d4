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

#include "cpu/kernels/fixed_point.inl"

#include "cpu/kernels/reflection.inl"

#include "cpu/kernels/chunk_backward_bf16.inl"

namespace {

/// Narrow heads go through f32: a sum of few rounded products keeps their error, and packing costs more than the dot products
/// save.
bool needs_f32(const BackwardItem& item) {
  const Problem& problem = item.arguments.inputs.problem;
  return problem.dim_k < 64 || problem.dim_v < 64 || reflects(item);
}

std::size_t scratch_bytes(const BackwardShape& shape) {
  return std::max(backward_scratch_bytes<Bf16Dot>(shape), avx512::kBackwardItems.scratch_bytes(shape));
}

void run_item(const BackwardItem& item) {
  if (!needs_f32(item) && backward_item<Bf16Dot>(item)) return;
  avx512::kBackwardItems.run(item);
}

constexpr BackwardKernel kItems{scratch_bytes, run_item, kBackwardKernel<Bf16Dot>.saved_layout};

std::size_t workspace(const ChunkBackward& descriptor, int threads) {
  return chunk_backward_workspace(descriptor, threads, kItems);
}

void run(const ChunkBackwardArguments& arguments, std::byte* memory, const Parallel& parallel) {
  chunk_backward(arguments, memory, parallel, kItems);
}

}  // namespace

const ChunkBackwardOperation kChunkBackward{refuse_all_but_bf16<ChunkBackward>, workspace, run};

#include "cpu/simd/avx512bf16_end.inc"
