// chunk_forward on avx2.
#include <cstddef>
#include <cstdint>

#include "common/arguments.hpp"
#include "common/parallel.hpp"
#include "cpu/operations.hpp"
#include "cpu/refusal.hpp"
#include "cpu/simd/avx2.hpp"

#include "cpu/simd/avx2_begin.inc"

#include "cpu/kernels/chunk_forward_run.inl"

namespace {

using Dot = F32Dot;
constexpr int kTokens = 16;

std::size_t forward_workspace(const ChunkForward& descriptor, int threads) {
  return forward_slot_bytes<Dot, kTokens>(descriptor.problem) * static_cast<std::size_t>(threads);
}

}  // namespace

const ChunkForwardOperation kChunkForward{refuse_f64<ChunkForward>, forward_workspace, run_chunk_forward<Dot, kTokens>,
                                          kSaves<Dot>};

#include "cpu/simd/avx2_end.inc"
