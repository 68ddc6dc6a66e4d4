// Shared memory and the division of work of chunk_gradients: one block of 16 warps a chunk and q/k head, value heads one after
// another. Warp (tile, group) has tokens 16 tile .. + 15 and a quarter of K of the gradients of q and k. Of the products between
// tokens, groups 0 and 1 have dO e^T with the first and second 32 tokens as columns, groups 2 and 3 dV e^T.
//
//   member       written by                 read by
//   rows         all, once                  all: keys and queries as f16, rows divided by powers of two
//   factors      all, once                  all
//   heads        all (gates: a warp each)   all: of kHeads value heads
//   stages       cp.async of all            all: 16 columns of V of one value head each, in a ring
//   end          all                        all: dP and dKK; one warp: sums. K = 256: over the stages
#pragma once

#include <cstddef>

#include "cuda/block/gates.cuh"
#include "cuda/kernels/chunk_backward/params.hpp"
#include "cuda/kernels/chunk_forward/kept.cuh"
#include "cuda/kernels/chunk_forward/prepare_kernel.cuh"
#include "cuda/ptx/pairs.cuh"
#include "cuda/tile/fragments.cuh"
#include "cuda/tile/rows.cuh"

namespace flashqla::cuda {

inline constexpr int kGradientThreads = 512, kGradientWarps = 16, kGroups = 4, kTokenTiles = 4;
inline constexpr int kMostTilesOfV = 16;

/// Tiles of V on their way: `depth` steps of `tiles` tiles each, between which the block's warps wait for each other.
struct GradientRing {
  int depth, tiles;
  constexpr __host__ __device__ int stages() const { return depth * tiles; }
};

/// Logarithms of what kept operands have been divided by, of a tile of V: of a quarter of K or of the tokens.
struct KeptLogs {
  static constexpr int kErrors = 0, kDV = 4, kStates = 8, kDStates = 12, kCount = 16;
};

/// Gates of a value head's tokens, and its powers. Of sums of log2 decays one half; so decays (from the chunk's start) and rests
/// (to its end) are roots of theirs, to be applied twice: e^-100 is no normal float, but e^-100 times 1e35 is.
struct alignas(16) ValueHead {  // pairs are read at once
  float high[kChunkTokens], low[kChunkTokens], beta[kChunkTokens], decay[kChunkTokens], rest[kChunkTokens];
  float rise[kChunkTokens], fall[kChunkTokens];  // 1, with growth 2^h and 2^-h: what kept e and dV lack (HeadGates)
  float d_o_powers[kChunkTokens];
  int walked;  // is_walked
  std::int16_t logs[KeptLogs::kCount][kMostTilesOfV];
};
static_assert(alignof(ValueHead) % alignof(float2) == 0 && offsetof(ValueHead, high) % alignof(float2) == 0 &&
                  offsetof(ValueHead, low) % alignof(float2) == 0 && offsetof(ValueHead, beta) % alignof(float2) == 0 &&
                  offsetof(ValueHead, rise) % alignof(float2) == 0,
              "take_pairs and sum_pairs read two floats at a time, of any head of an array");

/// Sums that one value head leaves for the warp that finishes its gates.
struct GateSums {
  float reads[kGroups][kChunkTokens], writes[kGroups][kChunkTokens];  // row dots over a quarter of K
  float across[2][kTokenTiles][kChunkTokens];                         // sum over rows i >= t of a tile, columns j < t of t's half
  float columns[2][kTokenTiles][kChunkTokens];                        // column sums over the rows of a tile, without beta
  float first_half[2][kChunkTokens];                                  // row sums over the first 32 columns
  float diagonal[kChunkTokens];                                       // dV . e
};

template <int kDimK>
struct GradientShared {
  static constexpr int kColumns = kDimK / kGroups;  // of K, a warp
  static constexpr int kTilesOfK = kDimK / 16;
  static constexpr bool kOverlaid = kDimK == 256;   // the end lies over the stages
  static constexpr int kHeads = kOverlaid ? 1 : 4;  // whose gates are there together
  using Rows = tile::SharedTile<kChunkTokens, kDimK>;
  using Slab = tile::SharedTile<kChunkTokens, 16>;
  struct Stage {
    alignas(128) std::byte d_o[Slab::kBytes];
    uint4 errors[kTokenTiles][32], d_v[kTokenTiles][32];
    uint4 states[2][kTilesOfK][32];  // S, dS
  };
  struct End {
    // dP and dKK by rows, with the factors of the columns' keys; and transposed, with those of the rows.
    union {
      struct {
        uint4 triangles[2][10][32], turned[2][10][32];
      };
      float maxima[2][kTokenTiles][kChunkTokens];              // settle_walked
      float walked[2][kChunkTokens * (kChunkTokens + 1) / 2];  // the same as f32, by rows, of chunks that were walked
      float row_dots[2][kGroups][kChunkTokens];  // after the last head: of the gradients of keys and queries with them
    };
    GateSums sums;
  };
  alignas(128) std::byte rows[2][Rows::kBytes];  // keys, queries
  float factors[2][kChunkTokens];                // a normalised row is its factor times what is in `rows`
  float norms[2][kChunkTokens];                  // what L2 normalisation multiplies rows by
  ValueHead heads[kHeads];
  alignas(16) float maxima[2][2][8];  // of both kinds of triangles of dP and dKK, from their warps
  float state_dots[kGradientWarps];

  static constexpr std::size_t bytes(const GradientRing& ring) {
    const std::size_t stages = static_cast<std::size_t>(ring.stages()) * sizeof(Stage);
    if constexpr (kOverlaid) return sizeof(GradientShared) + (stages < sizeof(End) ? sizeof(End) : stages);
    return sizeof(GradientShared) + sizeof(End) + stages;
  }
  FLASHQLA_DEVICE End& end() { return *reinterpret_cast<End*>(this + 1); }
  FLASHQLA_DEVICE const End& end() const { return *reinterpret_cast<const End*>(this + 1); }
  FLASHQLA_DEVICE Stage& stage(int number) {
    static_assert(kOverlaid || sizeof(End) % alignof(Stage) == 0);
    return reinterpret_cast<Stage*>(reinterpret_cast<std::byte*>(this + 1) + (kOverlaid ? 0 : sizeof(End)))[number];
  }
};

/// A lane's place.
struct GradientPlace {
  int warp, tile, group;
  int row, pair;  // in an accumulator: g, also g + 8; 2 t
  FLASHQLA_DEVICE int column_half() const { return group % 2; }
  FLASHQLA_DEVICE int gram() const { return group / 2; }  // 0: dO e^T, 1: dV e^T
  /// Blocks of 16 columns of the products between tokens with anything on or below the diagonal: up to 2.
  FLASHQLA_DEVICE int pair_blocks() const { return tile - 2 * column_half() + 1; }
  FLASHQLA_DEVICE int token(int upper) const { return 16 * tile + row + 8 * upper; }
};
FLASHQLA_DEVICE GradientPlace gradient_place() {
  const int lane = tile::lane_id(), warp = tile::warp_number();
  // Groups are turned from tile to tile, so that no scheduler has all the warps of one.
  return {warp, warp / 4, (warp + warp / 4) % kGroups, lane / 4, lane % 4 * 2};
}

/// 2^log as two factors, each in the range of f32.
struct TwoPowers {
  float first, second;
};
FLASHQLA_DEVICE TwoPowers two_powers(int log) {
  const int half = log / 2;
  return {__uint_as_float(static_cast<std::uint32_t>(half + 127) << 23),
          __uint_as_float(static_cast<std::uint32_t>(log - half + 127) << 23)};
}
FLASHQLA_DEVICE float times(float x, const TwoPowers& power) { return x * power.first * power.second; }

/// The pair of elements of a row that a lane has in accumulator n of the group's columns, as f16 were stored.
template <int kDimK>
FLASHQLA_DEVICE float2 row_pair(const std::byte* rows, const GradientPlace& place, int token, int n) {
  using Rows = typename GradientShared<kDimK>::Rows;
  const int column = place.group * GradientShared<kDimK>::kColumns + 8 * n + place.pair;
  const std::byte* at = rows + Rows::offset(token, column / tile::kPieceElements) + column % tile::kPieceElements * 2;
  return ptx::unpack_pair<ptx::F16>(*reinterpret_cast<const std::uint32_t*>(at));
}

/// Sum over the four lanes that have a row, in all of them.
FLASHQLA_DEVICE float row_total(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

}  // namespace flashqla::cuda
