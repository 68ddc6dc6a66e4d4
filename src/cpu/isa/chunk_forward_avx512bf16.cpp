// chunk_forward on avx512bf16.
#include <cstddef>
#include <cstdint>

#include "common/arguments.hpp"
#include "common/parallel.hpp"
#include "cpu/operations.hpp"
#include "cpu/refusal.hpp"
#include "cpu/simd/avx512bf16.hpp"

#include "cpu/simd/avx512bf16_begin.inc"

#include "cpu/kernels/chunk_forward_run.inl"
#include "cpu/kernels/gemm_bf16.inl"

#include "cpu/kernels/chunk_forward_packed.inl"

namespace {

using Dot = Bf16Dot;
constexpr int kTokens = 32;

std::size_t forward_workspace(const ChunkForward& descriptor, int threads) {
  return forward_slot_bytes<Dot, kTokens>(descriptor.problem) * static_cast<std::size_t>(threads);
}

}  // namespace

const ChunkForwardOperation kChunkForward{refuse_all_but_bf16<ChunkForward>, forward_workspace, run_chunk_forward<Dot, kTokens>};

#include "cpu/simd/avx512bf16_end.inc"
