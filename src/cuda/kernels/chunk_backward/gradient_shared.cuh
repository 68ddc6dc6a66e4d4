// Shared memory and the division of work of chunk_gradients: one block of 16 warps a chunk and q/k head, value heads one after
// another. Warp (tile, group) has tokens 16 tile .. + 15 and a quarter of K of the gradients of q and k. Of the products between
// tokens, groups 0 and 1 have dO e^T with the first and second 32 tokens as columns, groups 2 and 3 dV e^T.
//
//   member       written by                 read by
//   rows         all, once                  all: keys and queries as f16, rows divided by powers of two
//   factors      all, once                  all
//   head         all (gates: warp 0)        all: of one value head
//   stages       cp.async of all            all: a slab of V of one value head
//   end          all, over the stages       all: dP and dKK; warp 0: sums
#pragma once

#include "cuda/block/gates.cuh"
#include "cuda/kernels/chunk_backward/params.hpp"
#include "cuda/kernels/chunk_forward/prepare_kernel.cuh"
#include "cuda/ptx/pairs.cuh"
#include "cuda/tile/fragments.cuh"
#include "cuda/tile/rows.cuh"

namespace flashqla::cuda {

inline constexpr int kGradientThreads = 512, kGradientWarps = 16, kGroups = 4, kTokenTiles = 4;
inline constexpr int kMostColumns = 256;  // of V

/// A left operand's columns of V are multiplied by powers of two, of both operands, divided by the largest of them. Which powers:
/// of token half ih (rows), jh (columns) and half kh of K.
struct Multiplier {
  static constexpr int kState = 0;    // + kh: dO with S
  static constexpr int kValues = 2;   // + 2 ih + kh: dV with S
  static constexpr int kErrors = 6;   // + 2 ih + kh: e with dS
  static constexpr int kScores = 10;  // + jh: dO with e
  static constexpr int kGram = 12;    // + 2 ih + jh: dV with e
  static constexpr int kCount = 16;
};

/// Sums that one value head leaves for the warp that finishes its gates.
struct GateSums {
  float query[kGroups][kChunkTokens], key[kGroups][kChunkTokens], write[kGroups][kChunkTokens];  // row dots over a quarter of K
  float across[2][kTokenTiles][kChunkTokens];   // sum over rows i >= t of a tile, columns j < t of t's half
  float columns[2][kTokenTiles][kChunkTokens];  // column sums over the rows of a tile, without beta
  float first_half[2][kChunkTokens];            // row sums over the first 32 columns
  float diagonal[kChunkTokens];                 // dV . e
};

template <int kDimK>
struct GradientShared {
  static constexpr int kColumns = kDimK / kGroups;      // of K, a warp
  static constexpr int kSlab = kDimK == 256 ? 16 : 32;  // columns of V in a stage
  static constexpr int kStages = kDimK == 256 ? 1 : 2;
  static constexpr int kSlabTiles = kSlab / 16, kTilesOfK = kDimK / 16;
  using Rows = tile::SharedTile<kChunkTokens, kDimK>;
  using Slab = tile::SharedTile<kChunkTokens, kSlab>;
  struct Stage {
    alignas(128) std::byte d_o[Slab::kBytes];
    uint4 d_v[kTokenTiles][kSlabTiles][32], errors[kTokenTiles][kSlabTiles][32];
    uint4 states[kSlabTiles][kTilesOfK][32], d_states[kSlabTiles][kTilesOfK][32];
  };
  struct End {
    // dP and dKK by rows, with the factors of the columns' keys; and transposed, with those of the rows.
    uint4 triangles[2][10][32], turned[2][10][32];
    GateSums sums;
  };
  alignas(128) std::byte rows[2][Rows::kBytes];  // keys, queries
  union {
    Stage stages[kStages];
    End end;
  };
  float factors[2][kChunkTokens];  // a normalised row is its factor times what is in `rows`
  float norms[2][kChunkTokens];    // what L2 normalisation multiplies rows by
  float high[kChunkTokens], low[kChunkTokens], beta[kChunkTokens], decay[kChunkTokens], rest[kChunkTokens];
  float rise[kChunkTokens], fall[kChunkTokens];  // 1, with growth 2^h and 2^-h: what kept e and dV lack (HeadGates)
  float d_o_powers[kChunkTokens];
  // Logarithms of the powers of e and dV, [2 e's + token half], and of S and dS, [2 S's + half of K].
  union {
    std::int16_t row_logs[4][kMostColumns];
    float row_dots[2][kGroups][kChunkTokens];  // at the end: of the gradients of keys and queries with them
  };
  std::int16_t state_logs[4][kMostColumns / 16];
  int largest_logs[Multiplier::kCount][kMostColumns / 32];        // of multipliers, over 32 columns
  std::uint16_t multipliers[kStages][Multiplier::kCount][kSlab];  // f16, of a slab
  float maxima[2][kGradientWarps], state_dots[kGradientWarps];    // of both kinds of triangles
};

/// A lane's place.
struct GradientPlace {
  int warp, tile, group;
  int row, pair;  // in an accumulator: g, also g + 8; 2 t
  FLASHQLA_DEVICE int row_half() const { return tile / 2; }
  FLASHQLA_DEVICE int half_of_k() const { return group / 2; }
  FLASHQLA_DEVICE int column_half() const { return group % 2; }
  FLASHQLA_DEVICE int gram() const { return group / 2; }  // 0: dO e^T, 1: dV e^T
  /// Whether products between tokens have anything on or below the diagonal.
  FLASHQLA_DEVICE bool has_pairs() const { return 2 * column_half() <= tile; }
  FLASHQLA_DEVICE int token(int upper) const { return 16 * tile + row + 8 * upper; }
};
FLASHQLA_DEVICE GradientPlace gradient_place() {
  const int lane = tile::lane_id(), warp = static_cast<int>(threadIdx.x) / 32;
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

/// 2^log as f16, log <= 0; 0 below its range.
FLASHQLA_DEVICE std::uint16_t half_power(int log) {
  const int bits = log >= -14 ? (log + 15) << 10 : log >= -24 ? 1 << (log + 24) : 0;
  return static_cast<std::uint16_t>(bits);
}

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
