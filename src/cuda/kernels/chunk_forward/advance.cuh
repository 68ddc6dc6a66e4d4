// The part of chunk_forward that goes from chunk to chunk: one block a (sequence, value head, slab of V). Everything is
// transposed, so that V lies along the rows of the products and what one leaves in the accumulators is the next one's left
// operand:
//
//   E^T = strength o v^T - read_k o (S^T K^T)          [V x 64]     e^T = E^T solve^T
//   O^T = read_q o (S^T Q^T) + rise o (e^T scores^T)                S^T = total S^T + (write_k o e^T) K
//
// S^T stays in the accumulators (f32) from the first chunk to the last. Who has what: shared.cuh.
//
// Rounding: S for its products with K and Q to the inputs' type, except that chunks with ChunkUnit::kPrecise add what that
// leaves; E, e, solve and scores to f16, rows of E and e divided by powers of two; write_k o e for the update to two numbers of
// the inputs' type, 16 bits or more. With one bf16 for each of these the state would be 3e-3 to 6e-2 off where keys repeat or
// nothing decays.
#pragma once

#include "cuda/block/gates.cuh"
#include "cuda/kernels/chunk_forward/states.cuh"
#include "cuda/ptx/barrier.cuh"

namespace flashqla::cuda {

/// Factors of the two columns that a lane has in accumulator `n` of the chunk.
FLASHQLA_DEVICE float2 column_factors(const std::byte* unit, int offset, int n) {
  return *reinterpret_cast<const float2*>(unit + offset + (8 * n + tile::lane_id() % 4 * 2) * 4);
}

FLASHQLA_DEVICE void scale_columns(tile::Accumulator& c, const float2& factors) {
  c.c[0] *= factors.x;
  c.c[1] *= factors.y;
  c.c[2] *= factors.x;
  c.c[3] *= factors.y;
}

FLASHQLA_DEVICE void scale_rows(tile::Accumulator& c, const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) c.c[i] *= factors[i / 2];
}

FLASHQLA_DEVICE tile::FragmentB load_block(const std::byte* unit, int triangle, int block_i, int block_j) {
  const int number = block_i * (block_i + 1) / 2 + block_j;
  const uint4 b = *reinterpret_cast<const uint4*>(unit + triangle + number * 512 + tile::lane_id() * 16);
  return {{b.x, b.y, b.z, b.w}};
}

/// Leaves the warp's quarter of S^T, rounded, for the team; kRest: likewise what the rounding left.
template <class Element, int kDimK, bool kRest>
FLASHQLA_DEVICE void leave_state(uint4 (&to)[kDimK / 16][32], const LanePlace& place, const StatePart<kDimK>& part) {
  constexpr int kOwn = kDimK / 16 / kTeam;
#pragma unroll
  for (int step = 0; step < kOwn; ++step) {
    const tile::Accumulator &x = part.s[2 * step], &y = part.s[2 * step + 1];
    const tile::FragmentA rounded = tile::to_a<Element>(x, y);
    store_left(to[place.part * kOwn + step], kRest ? tile::rest_of<Element>(x, y, rounded) : rounded);
  }
}

/// Addresses of a lane for blocks of 16 x 16 of the own tokens' rows, as right operands whose columns are the tokens.
template <int kDimK>
FLASHQLA_DEVICE tile::BlockAddresses<kChunkTokens, kDimK> own_tokens(const tile::SharedTile<kChunkTokens, kDimK>& rows,
                                                                     const LanePlace& place) {
  using Rows = tile::SharedTile<kChunkTokens, kDimK>;
  return tile::addresses_b(Rows{rows.base + static_cast<std::uint32_t>(place.part * kPartTokens * Rows::kRowBytes)});
}

/// sk[tile] (2 accumulators, the own 16 tokens) += S^T times the keys, over all of K in order; kQueries: sq likewise with
/// queries; kRest: also what rounding S^T left, times the keys. Operands are loaded kAhead steps before they are used, rows
/// before wait(), which waits for the state.
template <class Element, int kDimK, int kTeamTiles, bool kQueries, bool kRest, class Team, class Wait>
FLASHQLA_DEVICE void project(const tile::BlockAddresses<kChunkTokens, kDimK>& keys,
                             const tile::BlockAddresses<kChunkTokens, kDimK>& queries, const Team* exchange, const Wait& wait,
                             tile::Accumulator (&sk)[kTeamTiles][2], tile::Accumulator (&sq)[kTeamTiles][2]) {
  constexpr int kCount = kDimK / 16, kAhead = 2, kRing = kAhead + 1;
  tile::FragmentB k[kRing], q[kRing];
  tile::FragmentA a[kRing][kTeamTiles], rest[kRing][kTeamTiles];
  const auto load_rows = [&](int i) {
    k[i % kRing] = tile::load_b(keys, 0, i * 16);
    if constexpr (kQueries) q[i % kRing] = tile::load_b(queries, 0, i * 16);
  };
  const auto load_states = [&](int i) {
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      a[i % kRing][t] = stored_left(exchange[t].state[i]);
      if constexpr (kRest) rest[i % kRing][t] = stored_left(exchange[t].rest[i]);
    }
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load_rows(i);
  wait();
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load_states(i);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i + kAhead < kCount) {
      load_rows(i + kAhead);
      load_states(i + kAhead);
    }
    const int use = i % kRing;
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      tile::multiply<Element>(sk[t][0], sk[t][1], a[use][t], k[use]);
      if constexpr (kQueries) tile::multiply<Element>(sq[t][0], sq[t][1], a[use][t], q[use]);
      if constexpr (kRest) tile::multiply<Element>(sk[t][0], sk[t][1], rest[use][t], k[use]);
    }
  }
}

/// Powers of two above the lane's two rows.
FLASHQLA_DEVICE void scales_of_rows(const tile::Accumulator (&x)[2], float (&scale)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float most = 0.0f;
#pragma unroll
    for (int n = 0; n < 2; ++n) most = fmaxf(most, fmaxf(fabsf(x[n].c[2 * i]), fabsf(x[n].c[2 * i + 1])));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    scale[i] = block::power_above(fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2)));
  }
}

/// e, which holds K S, becomes strength o v - read_k o (K S) for the warp's own tokens.
template <class Element, int kSlab>
FLASHQLA_DEVICE void take_errors(const tile::SharedTile<kChunkTokens, kSlab>& values, const std::byte* unit,
                                 const LanePlace& place, tile::Accumulator (&e)[2]) {
  const tile::FragmentA v = tile::load_c_transposed(values, place.tile * kTileRows, place.part * kPartTokens);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 factors = column_factors(unit, ChunkUnit::kReadK, 2 * place.part + half);
    const float2 strengths = column_factors(unit, ChunkUnit::kStrength, 2 * place.part + half);
    const float2 upper = ptx::unpack_pair<Element>(v.a[2 * half]), lower = ptx::unpack_pair<Element>(v.a[2 * half + 1]);
    float* const c = e[half].c;
    c[0] = fmaf(-factors.x, c[0], strengths.x * upper.x);
    c[1] = fmaf(-factors.y, c[1], strengths.y * upper.y);
    c[2] = fmaf(-factors.x, c[2], strengths.x * lower.x);
    c[3] = fmaf(-factors.y, c[3], strengths.y * lower.y);
  }
}

/// Rows of the warp's own tokens divided by `scale`, as a left operand.
FLASHQLA_DEVICE tile::FragmentA pack_rows(const float (&scale)[2], const tile::Accumulator (&x)[2]) {
  const float inverse[2] = {block::inverse_power(scale[0]), block::inverse_power(scale[1])};
  tile::Accumulator divided[2] = {x[0], x[1]};
  scale_rows(divided[0], inverse);
  scale_rows(divided[1], inverse);
  return tile::to_a<ptx::F16>(divided[0], divided[1]);
}

/// The scales of the lane's two rows of a part's tokens, powers of two: the upper halves of both floats say all.
FLASHQLA_DEVICE void leave_scales(std::uint32_t (&to)[8], const float (&scale)[2]) {
  if (tile::lane_id() % 4 == 0) to[tile::lane_id() / 4] = __float_as_uint(scale[0]) >> 16 | __float_as_uint(scale[1]);
}
FLASHQLA_DEVICE void take_scales(const std::uint32_t (&from)[8], float (&scale)[2]) {
  const std::uint32_t both = from[tile::lane_id() / 4];
  scale[0] = __uint_as_float(both << 16);
  scale[1] = __uint_as_float(both & 0xffff0000u);
}

/// c (2 accumulators, the own tokens) += scale o (left times a block).
FLASHQLA_DEVICE void add_product(const tile::FragmentA& left, const tile::FragmentB& block, const float (&scale)[2],
                                 tile::Accumulator (&c)[2]) {
  tile::Accumulator product[2];
  tile::clear(product);
  tile::multiply<ptx::F16>(product[0], product[1], left, block);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[n].c[i] = fmaf(scale[i / 2], product[n].c[i], c[n].c[i]);
  }
}

/// Addresses of a lane for blocks of 16 x 16 of the own quarter of K, as right operands whose rows are tokens: of tokens 0-15.
template <int kDimK>
struct QuarterAddresses {
  static constexpr int kBlocks = kDimK / 16 / kTeam;
  using Rows = tile::SharedTile<kChunkTokens, kDimK>;
  std::uint32_t at[kBlocks];

  FLASHQLA_DEVICE QuarterAddresses(const Rows& rows, const LanePlace& place) {
    const tile::LanePiece lane = tile::lane_b_transposed();
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) at[n] = rows.piece(lane.row, 2 * (place.part * kBlocks + n) + lane.piece);
  }
  FLASHQLA_DEVICE tile::FragmentB load(int part, int n) const {
    tile::FragmentB b;
    ptx::ldmatrix_x4_trans(b.b, at[n] + part * kPartTokens * Rows::kRowBytes);
    return b;
  }
};

/// Tiles of a team, a bit each. kNone: known to be none.
template <bool kNone>
struct TileSet {
  unsigned bits;
  FLASHQLA_DEVICE bool has(int tile) const { return !kNone && (bits >> tile & 1) != 0; }
};

/// S^T += left rows over all tokens of the chunk in order, but not of tiles that are `left_out`. What is on the left, of a part's
/// tokens: lefts(tile, part) rounded, rests(tile, part) what the rounding left.
template <class Element, int kDimK, int kTeamTiles, bool kAll, class Lefts, class Rests>
FLASHQLA_DEVICE void update_state(const QuarterAddresses<kDimK>& rows, TileSet<kAll> left_out, const Lefts& lefts,
                                  const Rests& rests, StatePart<kDimK> (&state)[kTeamTiles]) {
  constexpr int kBlocks = QuarterAddresses<kDimK>::kBlocks;
#pragma unroll
  for (int part = 0; part < kTeam; ++part) {
    tile::FragmentA left[kTeamTiles], rest[kTeamTiles];
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      if (left_out.has(t)) continue;
      left[t] = lefts(t, part);
      rest[t] = rests(t, part);
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const tile::FragmentB b = rows.load(part, n);
#pragma unroll
      for (int t = 0; t < kTeamTiles; ++t) {
        if (!left_out.has(t)) tile::multiply<Element>(state[t].s[2 * n], state[t].s[2 * n + 1], left[t], b);
      }
#pragma unroll
      for (int t = 0; t < kTeamTiles; ++t) {
        if (!left_out.has(t)) tile::multiply<Element>(state[t].s[2 * n], state[t].s[2 * n + 1], rest[t], b);
      }
    }
  }
}

/// O^T (or gradients of v^T) of the own tokens to the caller's rows, transposed in the registers and put together in the warp's
/// part of the exchange.
template <class Element>
FLASHQLA_DEVICE void store_rows(const ChunkForwardParams& p, const AdvanceWork& work, const TokenTensor& out,
                                const LanePlace& place, std::int64_t chunk, std::byte* memory, const tile::Accumulator (&o)[2]) {
  using Tile = tile::SharedTile<kPartTokens, kTileRows>;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t pair = ptx::movmatrix_trans(ptx::pack_pair<Element>(o[n].c[2 * half], o[n].c[2 * half + 1]));
      *reinterpret_cast<std::uint32_t*>(memory + Tile::offset(8 * n + place.row, half) + place.column * 2) = pair;
    }
  }
  __syncwarp();  // the pieces, for other lanes
  static_assert(kPartTokens * kTileRows == 32 * tile::kPieceElements, "a lane has a piece of 16 bytes");
  const int token = tile::lane_id() / 2, piece = tile::lane_id() % 2, first_token = place.part * kPartTokens;
  const int first = work.first_v + place.tile * kTileRows + piece * tile::kPieceElements;
  if (first_token + token >= work.rows.tokens(chunk) || first >= p.dim_v) return;
  const std::int64_t row_token = work.rows.begin + work.rows.position(chunk) + first_token + token;
  auto* const row = static_cast<Element*>(out.data) + offset_of(out, work.rows.batch, row_token, work.head) + first;
  const std::byte* from = memory + Tile::offset(token, piece);
  if (p.aligned != 0) {
    *reinterpret_cast<uint4*>(row) = *reinterpret_cast<const uint4*>(from);
  } else {
#pragma unroll
    for (int c = 0; c < tile::kPieceElements; ++c) row[c] = reinterpret_cast<const Element*>(from)[c];
  }
}

}  // namespace flashqla::cuda
