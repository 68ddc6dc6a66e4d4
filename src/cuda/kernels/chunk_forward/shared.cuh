// Shared memory and the division of work of advance_states. Two warps have 16 rows of V together: warp 2 r + h of the block rows
// 16 r to 16 r + 15 of its slab, of S^T the columns of half h of K, and of E, e and O tokens 32 h to 32 h + 31.
//
//   member      bytes (K = 128)  written by                  read by
//   stage       2 x (43 K + 128 a column of V)  all threads, a chunk ahead  all warps
//   exchange    4.2 K a warp     see below                   the other warp of the pair
//
// exchange[w] holds, one after another in a chunk: w's half of S^T as left operands (and what rounding left of it); when the
// other has read those, what the other leaves for w there: its updates of S, and half 0 for half 1 its E and e besides; when
// w has read these, w's output on its way to the caller's rows. Walked token by token (tokens.cuh): the halves of S^T in f32,
// then over both warps' memory the rows of errors and outputs, then outputs, then S^T again.
#pragma once

#include "cuda/kernels/chunk_forward/work.cuh"
#include "cuda/tile/fragments.cuh"

namespace flashqla::cuda {

inline constexpr int kTileRows = 16;    // of V: two warps have them
inline constexpr int kHalfTokens = 32;  // of a chunk
inline constexpr int kMaxStages = 2;

/// What one warp of a pair leaves for the other, after it has read the other's half of the state.
struct Answer {
  uint4 errors[2][32], updates[2][32];  // of the first half's tokens, for the second
  float2 scales[8];                     // of the lanes' rows
  float4 reach;                         // tokens.cuh: Reach
  int lost;                             // the chunk is walked token by token
  uint4 left[2][32], rest[2][32];
};

template <int kDimK>
struct Exchange {
  union {
    struct {
      uint4 state[kDimK / 32][32], rest[kDimK / 32][32];
    };
    Answer answer;
    float4 walked[kDimK / 16][32];  // the warp's half of S^T in f32
    alignas(128) std::byte output[tile::SharedTile<kHalfTokens, kTileRows>::kBytes];
  };
};

template <int kDimK, int kTiles>
struct AdvanceShared {
  static constexpr int kSlab = kTiles * kTileRows, kThreads = kTiles * 64;
  using Rows = tile::SharedTile<kChunkTokens, kDimK>;
  using Values = tile::SharedTile<kChunkTokens, kSlab>;
  struct Stage {
    alignas(128) std::byte keys[Rows::kBytes];
    alignas(128) std::byte queries[Rows::kBytes];
    alignas(128) std::byte values[Values::kBytes];
    alignas(128) std::byte unit[ChunkUnit::kBytes];
  };
  alignas(128) Exchange<kDimK> exchange[2 * kTiles];
  Stage stages[kMaxStages];  // as many as ChunkForwardParams::stages has memory for
};

/// A lane's place.
struct LanePlace {
  int tile, half;   // rows of V of the warp; its half of K and of the tokens
  int row, column;  // in an accumulator: g, also g + 8; 2 t
  FLASHQLA_DEVICE int other() const { return 2 * tile + 1 - half; }
  FLASHQLA_DEVICE int own() const { return 2 * tile + half; }
  /// The barrier on which the pair waits for each other; `number` 0 to 2 is the place in the chunk.
  FLASHQLA_DEVICE int barrier(int number) const { return 1 + 3 * tile + number; }
};
FLASHQLA_DEVICE LanePlace lane_place() {
  const int lane = tile::lane_id(), warp = static_cast<int>(threadIdx.x) / 32;
  return {warp / 2, warp % 2, lane / 4, lane % 4 * 2};
}

}  // namespace flashqla::cuda
