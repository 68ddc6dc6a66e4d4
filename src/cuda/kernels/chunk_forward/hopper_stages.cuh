// Shared memory of advance_states_hopper and its division of work. A block has 64 rows of V of the state: a warpgroup advances it
// (state group), one makes outputs from what that leaves (output group), and of the third two warps start copies and two make
// TF32 of `solve` (copy group). Two blocks with neighbouring rows of V of one head are a cluster: each copies half of what
// both need into the shared memory of both.
//
//   member        written by                            read by
//   stages        copies, as many chunks ahead as fit   state group and widening warps
//   query_stages  copies, likewise                      output group
//   solves        widening warps, two in turn           state group
//   state         state group, before every chunk       the same lanes of the output group
//   errors        state group                           the same lanes of the output group
//   output        output group                          copies
//
//   barrier       arrivals                              waits
//   full          copies' bytes, their warp             widening warps, output group, before they read a stage
//   empty         state or output groups of both        their warp, before it fills the stage again
//                 blocks
//   solve_ready   widening warps, when rows past the    state group, before it reads the stage
//                 end of a chunk have been cleared, too
//   solve_free    state group                           widening warps, before they write it again
//   state_free    output group's warps                  state group, before it writes the next state
//
// Named barriers of the state and output groups, where one comes and the other waits:
//   kStateReady, kErrorsReady   the state group comes when it has written them
//   kErrorsFree                 the output group comes, and the state group may write the next errors
// and of one group: kVote (state group), kOutput (output group).
#pragma once

#include <cstddef>

#include "cuda/kernels/chunk_forward/work.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk_copy.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/tile/fragments.cuh"

namespace flashqla::cuda {

inline constexpr int kHopperDimK = 128, kGroupRows = 64, kGroupThreads = 128;
inline constexpr int kCopyingWarps = 2, kWideningWarps = 2;  // of the copy group
/// A box of 64 tokens by 64 columns: rows of 128 bytes, in which piece p of 16 bytes of row r is at place p ^ r % 8.
inline constexpr int kBoxColumns = 64, kBoxRowBytes = 128, kBoxBytes = kChunkTokens * kBoxRowBytes;

/// A triangle of a unit in shared memory: pieces of 8 x 8, 128 bytes each, for the first 32 tokens rows of four of them, for the
/// others rows of eight. Wide: f32, a piece of 8 x 4 for the even and one for the odd ones of eight columns; first those of the
/// first 32 columns, for all tokens, then those of the others, for the last 32 tokens, rows of eight pieces.
struct HopperTriangle {
  static constexpr int kEarlyBytes = 4 * 4 * 128, kBytes = kEarlyBytes + 4 * 8 * 128;
  static constexpr int kWideEarlyBytes = 8 * 8 * 128;
  /// Where the two wide pieces for piece `number` are.
  static FLASHQLA_DEVICE int wide_piece(int number) {
    const bool early = number < kEarlyBytes / 128;
    const int row = early ? number / 4 : 4 + (number - kEarlyBytes / 128) / 8, column = early ? number % 4 : number % 8;
    return column < 4 ? row * 1024 + column * 256 : kWideEarlyBytes + (row - 4) * 1024 + (column - 4) * 256;
  }
};

/// A lane's place in its warpgroup.
struct GroupPlace {
  int warp, lane, thread;  // of the group
  int row, pair;           // in an accumulator: g, also g + 8; 2 t
};
FLASHQLA_DEVICE GroupPlace group_place() {
  const int warp = tile::warp_number(), lane = tile::lane_id();
  return {warp % 4, lane, static_cast<int>(threadIdx.x) % kGroupThreads, lane / 4, lane % 4 * 2};
}

/// Warpgroups. Registers a thread are given out by them: all start with 168, and take or keep what their role needs.
struct HopperGroups {
  static constexpr int kState = 0, kOutput = 1, kCopy = 2, kThreads = 3 * kGroupThreads;
  static constexpr int kStateRegisters = 240, kOutputRegisters = 168, kCopyRegisters = 40;
};

/// A unit's factors.
struct UnitFactors {
  std::byte bytes[ChunkUnit::kBytes - ChunkUnit::kStrength];
  /// What is at that offset of the unit.
  template <class Number>
  FLASHQLA_DEVICE const Number& at(int offset) const {
    return *reinterpret_cast<const Number*>(bytes + offset - ChunkUnit::kStrength);
  }
};

/// Of a block.
struct HopperShared {
  static constexpr int kStages = 3, kQueryStages = 2;
  static constexpr int kBlocks = 2;  // of a cluster
  /// For the state group.
  struct alignas(1024) Stage {
    std::byte keys[2][kBoxBytes];  // halves of K
    std::byte values[kBoxBytes];
    std::byte solve[HopperTriangle::kBytes];
    UnitFactors factors;
  };
  /// For the output group.
  struct alignas(1024) QueryStage {
    std::byte queries[2][kBoxBytes];
    std::byte answers[HopperTriangle::kBytes];
    UnitFactors factors;
  };
  Stage stages[kStages];
  QueryStage query_stages[kQueryStages];
  std::byte output[kBoxBytes];  // [token][V]
  std::byte solves[2][2 * HopperTriangle::kBytes];
  uint4 state[8][kGroupThreads];                      // S^T, rounded, as left operands
  uint4 errors[8][kGroupThreads];                     // E^T as accumulators c0, c2, c1, c3; or O^T where the chunk was walked
  int walked;                                         // whether it was
  std::uint64_t full[2][kStages], empty[2][kStages];  // of stages; of query_stages, which are fewer
  std::uint64_t solve_ready[2], solve_free[2], state_free;
};

/// Rings of stages, and of query stages.
enum class Ring { state, output };

/// Which stage a turn of the ring uses, and the parity of its phase.
template <Ring kRing>
struct RingPlace {
  int stage = 0, parity = 0;
  FLASHQLA_DEVICE void move() {
    if (++stage == (kRing == Ring::state ? HopperShared::kStages : HopperShared::kQueryStages)) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// Barriers, and the blocks of triangles that no copy fills. By all threads, before anything else.
FLASHQLA_DEVICE void make_barriers(HopperShared& shared) {
  const auto clear = [](std::byte* triangle) {
    auto* const pieces = reinterpret_cast<uint4*>(triangle);
    for (int at = static_cast<int>(threadIdx.x); at < HopperTriangle::kBytes / 16; at += HopperGroups::kThreads) {
      pieces[at] = {0, 0, 0, 0};
    }
  };
  for (auto& stage : shared.stages) clear(stage.solve);
  for (auto& stage : shared.query_stages) clear(stage.answers);
  ptx::fence_async_shared();
  if (threadIdx.x == 0) {
    const auto init = [](std::uint64_t& barrier, int arrivals) { ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals); };
    for (int i = 0; i < 2; ++i) {
      for (int s = 0; s < HopperShared::kStages; ++s) {
        init(shared.full[i][s], 1);
        init(shared.empty[i][s], HopperShared::kBlocks);
      }
      init(shared.solve_ready[i], kWideningWarps);
      init(shared.solve_free[i], 1);
    }
    init(shared.state_free, 4);
    ptx::mbarrier_fence();
  }
  ptx::cluster_barrier();  // barriers, for all threads of the cluster
}

/// Places in shared memory as PTX takes them, from one address that the compiler knows to be the block's.
struct HopperPlaces {
  using Shared = HopperShared;
  using Stage = HopperShared::Stage;
  using QueryStage = HopperShared::QueryStage;
  std::uint32_t base;
  FLASHQLA_DEVICE explicit HopperPlaces(const Shared& shared) : base(ptx::shared_address(&shared)) {}
  FLASHQLA_DEVICE std::uint32_t stage(int s) const { return at(offsetof(Shared, stages), s, sizeof(Stage)); }
  FLASHQLA_DEVICE std::uint32_t keys(int s) const { return stage(s) + offsetof(Stage, keys); }
  FLASHQLA_DEVICE std::uint32_t values(int s) const { return stage(s) + offsetof(Stage, values); }
  FLASHQLA_DEVICE std::uint32_t query_stage(int s) const { return at(offsetof(Shared, query_stages), s, sizeof(QueryStage)); }
  FLASHQLA_DEVICE std::uint32_t queries(int s) const { return query_stage(s) + offsetof(QueryStage, queries); }
  FLASHQLA_DEVICE std::uint32_t answers(int s) const { return query_stage(s) + offsetof(QueryStage, answers); }
  FLASHQLA_DEVICE std::uint32_t wide_solve(int turn) const {
    return at(offsetof(Shared, solves), turn, sizeof(Shared::solves[0]));
  }
  FLASHQLA_DEVICE std::uint32_t output() const { return base + offsetof(Shared, output); }
  FLASHQLA_DEVICE std::uint32_t full(Ring ring, int s) const { return barrier(offsetof(Shared, full), ring, s); }
  FLASHQLA_DEVICE std::uint32_t empty(Ring ring, int s) const { return barrier(offsetof(Shared, empty), ring, s); }
  FLASHQLA_DEVICE std::uint32_t solve_ready(int turn) const { return at(offsetof(Shared, solve_ready), turn, 8); }
  FLASHQLA_DEVICE std::uint32_t solve_free(int turn) const { return at(offsetof(Shared, solve_free), turn, 8); }
  FLASHQLA_DEVICE std::uint32_t state_free() const { return base + offsetof(Shared, state_free); }

 private:
  FLASHQLA_DEVICE std::uint32_t barrier(std::size_t first, Ring ring, int s) const {
    return at(first, static_cast<int>(ring) * Shared::kStages + s, 8);
  }
  FLASHQLA_DEVICE std::uint32_t at(std::size_t first, int number, std::size_t bytes) const {
    return base + static_cast<std::uint32_t>(first + number * bytes);
  }
};

/// Named barriers.
struct HopperBarriers {
  static constexpr int kOutput = 1, kVote = 2, kStateReady = 3, kErrorsReady = 4, kErrorsFree = 5;
  static FLASHQLA_DEVICE void wait(int id) { ptx::named_barrier(id, 2 * kGroupThreads); }
  static FLASHQLA_DEVICE void come(int id) { ptx::named_barrier_arrive(id, 2 * kGroupThreads); }
};

/// By all lanes of a warp, for what they have read or written before.
FLASHQLA_DEVICE void warp_arrive(std::uint32_t barrier) {
  __syncwarp();
  if (tile::lane_id() == 0) ptx::mbarrier_arrive(barrier);
}

/// Where one thread of a warpgroup says that it has left a stage, to both blocks.
struct StageLeaver {
  std::uint32_t empty[HopperShared::kBlocks];
  FLASHQLA_DEVICE StageLeaver(const HopperPlaces& at, Ring ring) {
#pragma unroll
    for (int rank = 0; rank < HopperShared::kBlocks; ++rank) empty[rank] = ptx::address_in_block(at.empty(ring, 0), rank);
  }
  FLASHQLA_DEVICE void leave(int stage) const {
#pragma unroll
    for (std::uint32_t barrier : empty) ptx::mbarrier_arrive_in_cluster(barrier + static_cast<std::uint32_t>(stage) * 8);
  }
};

/// A number that all lanes of a warp share, so that the compiler sees it.
FLASHQLA_DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

/// Chunks of a sequence by number: those from `first_whole` up to `end_whole` have 64 tokens.
struct ChunkNumbers {
  int count, first_whole, end_whole;
  FLASHQLA_DEVICE explicit ChunkNumbers(const SequenceRows& rows) {
    count = uniform(static_cast<int>(rows.chunks()));
    first_whole = uniform(rows.shift > 0 ? 1 : 0);
    end_whole = uniform(static_cast<int>((rows.shift + rows.length) / kChunkTokens));
  }
  FLASHQLA_DEVICE bool whole(int chunk) const { return chunk >= first_whole && chunk < end_whole; }
};

/// What a block of a Hopper GPU has.
static_assert(sizeof(HopperShared) <= 227 * 1024);

}  // namespace flashqla::cuda
