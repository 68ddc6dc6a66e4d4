// The warpgroup of advance_states_hopper that feeds the others: two warps start copies, two make TF32 of `solve`.
#pragma once

#include "cuda/kernels/chunk_forward/hopper_stages.cuh"
#include "cuda/ptx/mma.cuh"

namespace flashqla::cuda {

inline constexpr std::uint16_t kBothBlocks = 3;

/// What a lane copies of every unit: a run of pieces of a triangle, or the factors.
struct UnitPart {
  static constexpr int kRuns = 6, kLanes = kRuns + 1;
  int from, to, bytes;  // in the triangle
  bool factors;

  FLASHQLA_DEVICE explicit UnitPart(int lane) : from(0), to(0), bytes(sizeof(UnitFactors)), factors(lane == kRuns) {
    // Rows of pieces: 256, 256, 512, 512 bytes, then 768, 768, 1024, 1024. Those as long as a row in shared memory are one run.
    constexpr int kFrom[kRuns] = {0, 256, 512, 1536, 2304, 3072}, kTo[kRuns] = {0, 512, 1024, 2048, 3072, 4096};
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      if (lane != i) continue;
      from = kFrom[i];
      to = kTo[i];
      bytes = (i + 1 < kRuns ? kFrom[i + 1] : ChunkUnit::kTriangleBytes) - kFrom[i];
    }
  }
};

/// A ring's copies of all of a sequence's chunks: of keys or queries each block of the cluster a half for both, of units the
/// first block the triangle and the second the factors, and each its values. By one warp.
template <Ring kRing>
FLASHQLA_DEVICE void copy_chunks(const ChunkForwardParams& p, const ChunkForwardMaps& maps, const AdvanceWork& work,
                                 const HopperPlaces& at) {
  constexpr bool kState = kRing == Ring::state;
  constexpr int kBytes = (kState ? 3 : 2) * kBoxBytes + ChunkUnit::kTriangleBytes + static_cast<int>(sizeof(UnitFactors));
  const int rank = ptx::cluster_rank(), lane = tile::lane_id(), batch = static_cast<int>(work.rows.batch);
  const ChunkNumbers chunks(work.rows);
  const UnitPart part(lane);
  const bool copies = lane < UnitPart::kLanes && part.factors == (rank == 1);
  const int from = part.factors ? ChunkUnit::kStrength : (kState ? ChunkUnit::kSolve : ChunkUnit::kAnswers) + part.from;
  const std::byte* unit = p.units + (work.rows.first_chunk * p.heads_v + work.head) * ChunkUnit::kBytes + from;
  int token = static_cast<int>(work.rows.begin);
  RingPlace<kRing> ring;
  for (int chunk = 0; chunk < chunks.count; ++chunk, ring.move()) {
    const std::uint32_t full = at.full(kRing, ring.stage), rows = kState ? at.keys(ring.stage) : at.queries(ring.stage);
    // All who read what this stage had have left it; the first time there is nothing to wait for.
    ptx::mbarrier_wait(at.empty(kRing, ring.stage), ring.parity ^ 1);
    if (lane == 0) {
      ptx::mbarrier_arrive_expecting(full, kBytes);
      ptx::copy_box_to_all(rows + static_cast<std::uint32_t>(rank * kBoxBytes), kState ? &maps.k : &maps.q, rank * kBoxColumns,
                           work.head_qk, token, batch, full, kBothBlocks);
      if constexpr (kState) ptx::copy_box(at.values(ring.stage), &maps.v, work.first_v, work.head, token, batch, full);
    }
    if (copies) {
      const std::uint32_t triangle = rows + (kState ? offsetof(HopperShared::Stage, solve)
                                                    : offsetof(HopperShared::QueryStage, answers)),
                          to = triangle + static_cast<std::uint32_t>(part.factors ? HopperTriangle::kBytes : part.to);
      ptx::copy_bytes_to_all(to, unit, part.bytes, full, kBothBlocks);
    }
    unit += std::int64_t{p.heads_v} * ChunkUnit::kBytes;
    token += chunk == 0 ? kChunkTokens - work.rows.shift : kChunkTokens;
    __syncwarp();
  }
}

/// `solve` of a chunk as TF32. Thread `thread` of the widening warps.
FLASHQLA_DEVICE void widen_solve(const std::byte* from, std::byte* to, int thread) {
  constexpr int kRows = HopperTriangle::kBytes / 16;  // of pieces: eight elements each
#pragma unroll
  for (int at = thread; at < kRows; at += kWideningWarps * 32) {
    const uint4 row = *reinterpret_cast<const uint4*>(from + at * 16);
    const float2 a = ptx::unpack_pair<ptx::F16>(row.x), b = ptx::unpack_pair<ptx::F16>(row.y),
                 c = ptx::unpack_pair<ptx::F16>(row.z), d = ptx::unpack_pair<ptx::F16>(row.w);
    auto* const pieces = reinterpret_cast<float4*>(to + HopperTriangle::wide_piece(at / 8) + at % 8 * 16);
    pieces[0] = {a.x, b.x, c.x, d.x};
    pieces[8] = {a.y, b.y, c.y, d.y};
  }
}

/// Rows of keys and values past the end of a chunk that is not whole are another chunk's, or nobody's: zeros, so that no NaN of
/// theirs counts. Thread `thread` of the widening warps.
FLASHQLA_DEVICE void clear_tail(HopperShared::Stage& stage, int tokens, int thread) {
  const int pieces = (kChunkTokens - tokens) * 8;
#pragma unroll 1
  for (int at = thread; at < 3 * pieces; at += kWideningWarps * 32) {
    std::byte* const box = at < 2 * pieces ? stage.keys[at / pieces] : stage.values;
    *reinterpret_cast<uint4*>(box + tokens * kBoxRowBytes + at % pieces * 16) = {0, 0, 0, 0};
  }
}

/// All of a sequence's chunks. By the widening warps.
FLASHQLA_DEVICE void widen_solves(const AdvanceWork& work, HopperShared& shared, const HopperPlaces& at) {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads - kCopyingWarps * 32;
  const ChunkNumbers chunks(work.rows);
  RingPlace<Ring::state> ring;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks.count; ++chunk, ring.move()) {
    HopperShared::Stage& stage = shared.stages[ring.stage];
    ptx::mbarrier_wait(at.full(Ring::state, ring.stage), ring.parity);
    if (!chunks.whole(chunk)) clear_tail(stage, work.rows.tokens(chunk), thread);
    ptx::mbarrier_wait(at.solve_free(chunk % 2), chunk / 2 % 2 ^ 1);
    widen_solve(stage.solve, shared.solves[chunk % 2], thread);
    ptx::fence_async_shared();
    warp_arrive(at.solve_ready(chunk % 2));
  }
}

}  // namespace flashqla::cuda
