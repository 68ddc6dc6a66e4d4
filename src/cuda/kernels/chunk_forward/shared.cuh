// Shared memory and the division of work of advance_states. A team of four warps has one or two tiles of 16 rows of V: part p has
// of S^T the columns of quarter p of K, and of E, e and O tokens 16 p to 16 p + 15. Right operands serve all tiles of a team: two
// halve the traffic of shared memory, one has twice as many warps where there are few heads.
//
//   member      bytes (K = 128)                 written by                  read by
//   stages      43 K + 128 a column of V each   all threads, a chunk ahead  all warps
//   exchange    8.4 K a tile                    see below                   the other warps of the team
//
// An exchange holds, one after another in a chunk: every part's quarter of S^T as left operands, with what rounding left of it
// in precise chunks; when all have read those, every part's updates of S beside its E; when they have read these, its output on
// its way to the caller's rows. What is a part's own it keeps in registers. Walked token by token (tokens.cuh): S^T in f32, then
// over its memory the rows of errors and outputs, then outputs, then S^T again.
#pragma once

#include <type_traits>

#include "cuda/kernels/chunk_forward/work.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/fragments.cuh"

namespace flashqla::cuda {

inline constexpr int kTileRows = 16;                 // of V: a team has them
inline constexpr int kTeam = 4, kTeamThreads = 128;  // warps
inline constexpr int kPartTokens = 16;               // of a chunk: a warp has them
inline constexpr int kMaxStages = 2;

template <int kDimK>
struct Exchange {
  static constexpr int kFragments = kDimK / 16;
  // E lies past the state, which others may still read when it is written; not past `rest`, though.
  static constexpr int kUpdateRests = kFragments > 2 * kTeam ? kFragments - kTeam : kTeam;
  static constexpr bool kErrorsOverRest = kFragments >= 2 * kTeam;
  union {
    struct {
      uint4 state[kFragments][32], rest[kFragments][32];
    };
    struct {
      uint4 left[kTeam][32], left_rest[kUpdateRests][32];  // updates of S
      union {
        float4 errors[kTeam][2][32];  // E as tile::WideA
        std::byte output[kTeam][tile::SharedTile<kPartTokens, kTileRows>::kBytes];
      };
    };
    float4 walked[kDimK / 8][32];  // S^T in f32, accumulator after accumulator along K
  };
  float4 reach[kTeam];  // tokens.cuh: Reach
};

/// With what chunk_backward exchanges besides on the way back, before anything else: dO of every part's tokens for the update of
/// the state.
template <int kDimK>
struct ExchangeBothWays : Exchange<kDimK> {
  uint4 given_left[kTeam][32], given_rest[kTeam][32];
};

/// Tiles of V a team has, in a block of so many.
constexpr int team_tiles(int tiles) { return tiles < 4 ? 1 : 2; }

template <int kDimK, int kTiles, bool kBothWays = false>
struct AdvanceShared {
  static constexpr int kTeamTiles = team_tiles(kTiles);
  static constexpr int kTeams = kTiles / kTeamTiles, kSlab = kTiles * kTileRows, kThreads = kTeams * kTeam * 32;
  using Team = std::conditional_t<kBothWays, ExchangeBothWays<kDimK>, Exchange<kDimK>>;
  using Rows = tile::SharedTile<kChunkTokens, kDimK>;
  using Values = tile::SharedTile<kChunkTokens, kSlab>;
  struct Stage {
    alignas(128) std::byte keys[Rows::kBytes];
    alignas(128) std::byte queries[Rows::kBytes];
    alignas(128) std::byte values[Values::kBytes];
    alignas(128) std::byte unit[ChunkUnit::kBytes];
  };
  alignas(128) Team exchange[kTiles];
  Stage stages[kMaxStages];  // as many as ChunkForwardParams::stages has memory for
};

/// A lane's place.
struct LanePlace {
  int team, part;   // the warp's quarter of K and of the tokens
  int tile;         // of V, in the block's slab: the team's first, or of it
  int row, column;  // in an accumulator: g, also g + 8; 2 t
  /// The barrier on which the team waits for each other; `number` 0 to 2 is the place in the chunk.
  FLASHQLA_DEVICE int barrier(int number) const { return 1 + 3 * team + number; }
  /// In the team's tile number `number`.
  FLASHQLA_DEVICE LanePlace in_tile(int number) const { return {team, part, tile + number, row, column}; }
};
/// Who copies the next chunk's rows: with two teams the two warps of each that have the least to do between barriers 1 and 2,
/// where they do it. kStep 1: those with the first tokens.
template <class Shared, int kStep>
struct Copier {
  static constexpr int kThreads = Shared::kTeams == 2 ? kTeamThreads : Shared::kThreads;
  static_assert(Shared::kTeams <= 2);
  bool copies;
  unsigned thread;  // of those who copy
  FLASHQLA_DEVICE explicit Copier(const LanePlace& place) : copies(true), thread(threadIdx.x) {
    if constexpr (Shared::kTeams == 2) {
      const int turn = kStep > 0 ? place.part : kTeam - 1 - place.part;
      copies = turn < kTeam / 2;
      thread = static_cast<unsigned>(copies ? place.team * (kTeamThreads / 2) + turn * 32 + tile::lane_id() : 0);
    }
  }
};

template <int kTeamTiles>
FLASHQLA_DEVICE LanePlace lane_place() {
  const int lane = tile::lane_id(), warp = tile::warp_number(), team = warp / kTeam;
  // The later tokens the more to do: a scheduler has two warps, of which one has as many tokens before it as the other after it.
  const int part = team % 2 == 0 ? warp % kTeam : kTeam - 1 - warp % kTeam;
  return {team, part, team * kTeamTiles, lane / 4, lane % 4 * 2};
}
FLASHQLA_DEVICE tile::FragmentA stored_left(const uint4 (&block)[32]) {
  const uint4 a = block[tile::lane_id()];
  return {{a.x, a.y, a.z, a.w}};
}
FLASHQLA_DEVICE void store_left(uint4 (&block)[32], const tile::FragmentA& a) {
  block[tile::lane_id()] = {a.a[0], a.a[1], a.a[2], a.a[3]};
}

}  // namespace flashqla::cuda
