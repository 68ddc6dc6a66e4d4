// The ring of stages of chunk_gradients: tiles of V of the value heads, one after another, `depth` steps ahead.
#pragma once

#include <cstddef>

#include "cuda/kernels/chunk_backward/gradient_rows.cuh"

namespace flashqla::cuda {

/// Copies tiles to stages. Warps 0-3 copy e of 16 tokens each, 4-7 dV, 8-11 dO; every warp besides a block of S or dS, with
/// K = 256 one of each: 512 bytes a warp, 16 a lane.
template <class Element, int kDimK>
struct TileLoader {
  using Shared = GradientShared<kDimK>;
  using Stage = typename Shared::Stage;
  static constexpr int kTilesOfK = Shared::kTilesOfK;
  static constexpr int kErrorsAt = offsetof(Stage, errors), kDVAt = offsetof(Stage, d_v), kDOAt = offsetof(Stage, d_o),
                       kStatesAt = offsetof(Stage, states);

  const std::byte *rows = nullptr, *states = nullptr;  // of the next tile
  std::uint32_t rows_to = 0, states_to = 0;            // in a stage
  int rows_step = 0;                                   // bytes a tile; 0 for warps without
  bool rows_there = true, states_there = true;
  int head = 0, tile = 0, slot = 0;  // of the next tile; head of the group

  FLASHQLA_DEVICE TileLoader(const ChunkBackwardParams& p, const PreparedChunk& chunk) { begin_head(p, chunk); }

  /// From the first tile of head `first` of the group on, to stage `to`. None of its own is under way.
  FLASHQLA_DEVICE void restart(const ChunkBackwardParams& p, const PreparedChunk& chunk, int first, int to) {
    head = first;
    tile = 0;
    slot = to;
    begin_head(p, chunk);
  }
  FLASHQLA_DEVICE void begin_head(const ChunkBackwardParams& p, const PreparedChunk& chunk) {
    const int warp = tile::warp_number(), lane = tile::lane_id(), tiles_v = p.dim_v / 16, tiles_k = p.dim_k / 16;
    const std::int32_t head_v = chunk.head_qk * p.group + head;
    const std::int64_t unit = chunk.index * p.heads_v + head_v;
    if (warp < 8) {
      const std::byte* const from = warp < 4 ? p.kept.rows : p.d_kept.rows;
      rows = from + (unit * kTokenTiles + warp % 4) * tiles_v * 512 + lane * 16;
      rows_to = static_cast<std::uint32_t>((warp < 4 ? kErrorsAt : kDVAt) + warp % 4 * 512 + lane * 16);
      rows_step = 512;
    } else if (warp < 12) {
      const int row = warp % 4 * 16 + lane / 2;
      rows_there = row < chunk.tokens;
      const auto* const from =
          static_cast<const Element*>(p.d_o.data) + offset_of(p.d_o, chunk.batch, chunk.token + (rows_there ? row : 0), head_v);
      rows = reinterpret_cast<const std::byte*>(from + lane % 2 * tile::kPieceElements);
      rows_to = static_cast<std::uint32_t>(kDOAt + Shared::Slab::offset(row, lane % 2));
      rows_step = 32;
    }
    const int of_k = warp % kTilesOfK;
    const std::byte* const from = warp < kTilesOfK ? p.kept.states : p.d_kept.states;
    states_there = of_k < tiles_k;
    states = from + (unit * tiles_v * tiles_k + (states_there ? of_k : 0)) * 512 + lane * 16;
    states_to = static_cast<std::uint32_t>(kStatesAt + warp * 512 + lane * 16);  // S, then dS
  }

  FLASHQLA_DEVICE void copy_tile(const ChunkBackwardParams& p, Stage& stage) {
    const std::uint32_t to = ptx::shared_address(&stage);
    if (rows_step == 512 || (rows_step != 0 && p.aligned != 0)) {
      ptx::cp_async_16_or_zeros(to + rows_to, rows, rows_there);
    } else if (rows_step != 0) {
      auto* const at = reinterpret_cast<std::uint16_t*>(reinterpret_cast<std::byte*>(&stage) + rows_to);
      const auto* const elements = reinterpret_cast<const std::uint16_t*>(rows);
      for (int i = 0; i < tile::kPieceElements; ++i) at[i] = rows_there ? elements[i] : std::uint16_t{0};
    }
    rows += rows_step;
    if (2 * kTilesOfK >= kGradientWarps || tile::warp_number() < 2 * kTilesOfK) {
      ptx::cp_async_16_or_zeros(to + states_to, states, states_there);
    }
    if constexpr (2 * kTilesOfK > kGradientWarps) {
      static_assert(kTilesOfK == kGradientWarps, "a block of S a warp, and one of dS");
      ptx::cp_async_16_or_zeros(to + states_to + kTilesOfK * 512, states + (p.d_kept.states - p.kept.states), states_there);
    }
    states += p.dim_k / 16 * 512;
  }

  /// Starts the copies of the next step, as one group of cp.async: an empty one past the last head.
  FLASHQLA_DEVICE void load_step(const ChunkBackwardParams& p, const PreparedChunk& chunk, Shared& shared,
                                 const GradientRing& ring) {
    const int tiles_v = p.dim_v / 16;
    if (head < p.group) {
      for (int i = 0; i < ring.tiles && tile < tiles_v; ++i, ++tile) {
        copy_tile(p, shared.stage(slot));
        slot = slot + 1 == ring.stages() ? 0 : slot + 1;
      }
      if (tile == tiles_v) {
        tile = 0;
        if (++head < p.group) begin_head(p, chunk);
      }
    }
    ptx::cp_async_commit();
  }
};

/// Waits for the step that is next, from all threads, and starts the copies of one that takes the place of the last.
template <class Element, int kDimK>
FLASHQLA_DEVICE void next_step(const ChunkBackwardParams& p, const PreparedChunk& chunk, const GradientRing& ring,
                               GradientShared<kDimK>& shared, TileLoader<Element, kDimK>& loader) {
  if (ring.depth == 1) {
    __syncthreads();  // all have left the only stages, and what lies over them
    loader.load_step(p, chunk, shared, ring);
  }
  if (ring.depth == 4) {
    ptx::cp_async_wait<2>();
  } else {
    ptx::cp_async_wait<0>();
  }
  __syncthreads();  // this step's tiles, from all; and all have left the last step's
  if (ring.depth > 1) loader.load_step(p, chunk, shared, ring);
}

}  // namespace flashqla::cuda
