// The part of chunk_forward that goes from chunk to chunk: one block a (sequence, value head, slab of V). Everything is
// transposed, so that V lies along the rows of the products and what one leaves in the accumulators is the next one's left
// operand:
//
//   E^T = strength o v^T - read_k o (S^T K^T)          [V x 64]     e^T = E^T solve^T
//   O^T = read_q o (S^T Q^T) + rise o (E^T answers^T)               S^T = total S^T + (write_k o e^T) K
//
// S^T stays in the accumulators (f32) from the first chunk to the last. Who has what: shared.cuh.
//
// Rounding: S for its products with K and Q to the inputs' type, except that chunks with ChunkUnit::kPrecise add what that
// leaves; E to TF32, solve and answers to f16, which are made TF32 for their products; write_k o e for the update to two numbers
// of the inputs' type, 16 bits or more. With one bf16 for each of these the state would be 3e-3 to 6e-2 off where keys repeat or
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

FLASHQLA_DEVICE tile::FragmentB load_block(const std::byte* unit, int triangle, int block_i, int block_j) {
  const int number = block_i * (block_i + 1) / 2 + block_j;
  const uint4 b = *reinterpret_cast<const uint4*>(unit + triangle + number * 512 + tile::lane_id() * 16);
  return {{b.x, b.y, b.z, b.w}};
}

/// The block of a triangle as B[i][j].
FLASHQLA_DEVICE tile::FragmentB load_block_turned(const std::byte* unit, int triangle, int block_i, int block_j) {
  const tile::FragmentB b = load_block(unit, triangle, block_i, block_j);
  return {
      {ptx::movmatrix_trans(b.b[0]), ptx::movmatrix_trans(b.b[2]), ptx::movmatrix_trans(b.b[1]), ptx::movmatrix_trans(b.b[3])}};
}

/// The warp's quarter of S^T as left operands, rounded, and in precise chunks what the rounding left.
template <int kDimK, int kTeamTiles>
struct OwnState {
  static constexpr int kCount = kDimK / 16 / kTeam;
  tile::FragmentA state[kCount][kTeamTiles], rest[kCount][kTeamTiles];
};

/// Leaves it for the team, and has it.
template <class Element, int kDimK, int kTeamTiles, bool kRest, class Team>
FLASHQLA_DEVICE OwnState<kDimK, kTeamTiles> leave_state(Team* exchange, const LanePlace& place,
                                                        const StatePart<kDimK> (&state)[kTeamTiles]) {
  using Own = OwnState<kDimK, kTeamTiles>;
  Own own;
#pragma unroll
  for (int step = 0; step < Own::kCount; ++step) {
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      const tile::Accumulator &x = state[t].s[2 * step], &y = state[t].s[2 * step + 1];
      const int block = place.part * Own::kCount + step;
      own.state[step][t] = tile::to_a<Element>(x, y);
      store_left(exchange[t].state[block], own.state[step][t]);
      if constexpr (kRest) {
        own.rest[step][t] = tile::rest_of<Element>(x, y, own.state[step][t]);
        store_left(exchange[t].rest[block], own.rest[step][t]);
      }
    }
  }
  return own;
}

/// Addresses of a lane for blocks of 16 x 16 of the own tokens' rows, as right operands whose columns are the tokens. Blocks
/// along K are numbered from the warp's own quarter on: `turn` of 0 is its first, turn ^ own the block's place in the row.
template <int kDimK>
struct OwnTokens {
  using Rows = tile::SharedTile<kChunkTokens, kDimK>;
  static constexpr int kOwn = kDimK / 16 / kTeam;
  std::uint32_t at[4];
  int high;  // of the own quarter: which eight pieces of a row

  FLASHQLA_DEVICE OwnTokens(const Rows& rows, const LanePlace& place) : high(place.part * kOwn / 4) {
    const tile::LanePiece lane = tile::lane_b();
    const int row = place.part * kPartTokens + lane.row;
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] = rows.piece(row, 2 * (place.part * kOwn ^ i) + lane.piece);
  }
  /// `turn`: a constant after unrolling.
  FLASHQLA_DEVICE tile::FragmentB load(int turn, std::uint32_t offset) const {
    tile::FragmentB b;
    ptx::ldmatrix_x4(b.b, at[turn % 4] + static_cast<std::uint32_t>(((high ^ turn / 4) - high) * 128) + offset);
    return b;
  }
};

/// sk[tile] (2 accumulators, the own 16 tokens) = S^T times the keys, over all of K, the own quarter first; kQueries: sq likewise
/// with queries; kRest: also what rounding S^T left, times the keys. Operands are loaded kAhead steps before they are used, those
/// that need no state before wait(), which waits for the team's.
template <class Element, int kDimK, int kTeamTiles, bool kQueries, bool kRest, class Stage, class Team, class Wait>
FLASHQLA_DEVICE void project(const Stage& stage, Team* exchange, const LanePlace& place,
                             const StatePart<kDimK> (&state)[kTeamTiles], const Wait& wait,
                             tile::Accumulator (&sk)[kTeamTiles][2], tile::Accumulator (&sq)[kTeamTiles][2]) {
  constexpr int kCount = kDimK / 16, kOwn = kCount / kTeam, kAhead = 2, kRing = kAhead + 1;
  const OwnTokens<kDimK> rows({ptx::shared_address(stage.keys)}, place);
  const auto own = leave_state<Element, kDimK, kTeamTiles, kRest>(exchange, place, state);
  tile::FragmentB k[kRing], q[kRing];
  tile::FragmentA a[kRing][kTeamTiles], rest[kRing][kTeamTiles];
  const auto load_rows = [&](int turn) {
    k[turn % kRing] = rows.load(turn, 0);
    if constexpr (kQueries) q[turn % kRing] = rows.load(turn, offsetof(Stage, queries) - offsetof(Stage, keys));
  };
  const auto load_states = [&](int turn) {
    const int block = place.part * kOwn ^ turn;
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      a[turn % kRing][t] = stored_left(exchange[t].state[block]);
      if constexpr (kRest) rest[turn % kRing][t] = stored_left(exchange[t].rest[block]);
    }
  };
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
    tile::clear(sk[t]);
    tile::clear(sq[t]);
  }
#pragma unroll
  for (int turn = 0; turn < kAhead; ++turn) load_rows(turn);
#pragma unroll
  for (int turn = 0; turn < kCount; ++turn) {
    if (turn + kAhead < kCount) load_rows(turn + kAhead);
    if (turn == kOwn) {
      wait();
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load_states(turn + i);
    }
    if (turn >= kOwn && turn + kAhead < kCount) load_states(turn + kAhead);
    const int use = turn % kRing;
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      const tile::FragmentA& left = turn < kOwn ? own.state[turn % kOwn][t] : a[use][t];
      tile::multiply<Element>(sk[t][0], sk[t][1], left, k[use]);
      if constexpr (kQueries) tile::multiply<Element>(sq[t][0], sq[t][1], left, q[use]);
      if constexpr (kRest) {
        tile::multiply<Element>(sk[t][0], sk[t][1], turn < kOwn ? own.rest[turn % kOwn][t] : rest[use][t], k[use]);
      }
    }
  }
}

/// e, which holds K S, becomes strength o v - read_k o (K S) for the warp's own tokens. `values`: v^T as pairs in the order of
/// two accumulators.
template <class Element>
FLASHQLA_DEVICE void take_errors(const tile::FragmentA& values, const std::byte* unit, const LanePlace& place,
                                 tile::Accumulator (&e)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 factors = column_factors(unit, ChunkUnit::kReadK, 2 * place.part + half);
    const float2 strengths = column_factors(unit, ChunkUnit::kStrength, 2 * place.part + half);
    const float2 upper = ptx::unpack_pair<Element>(values.a[2 * half]), lower = ptx::unpack_pair<Element>(values.a[2 * half + 1]);
    float* const c = e[half].c;
    c[0] = fmaf(-factors.x, c[0], strengths.x * upper.x);
    c[1] = fmaf(-factors.y, c[1], strengths.y * upper.y);
    c[2] = fmaf(-factors.x, c[2], strengths.x * lower.x);
    c[3] = fmaf(-factors.y, c[3], strengths.y * lower.y);
  }
}

FLASHQLA_DEVICE void store_errors(float4 (&to)[2][32], const tile::WideA& e) {
#pragma unroll
  for (int n = 0; n < 2; ++n) to[n][tile::lane_id()] = {e.a[n][0], e.a[n][1], e.a[n][2], e.a[n][3]};
}
FLASHQLA_DEVICE tile::WideA stored_errors(const float4 (&from)[2][32]) {
  tile::WideA e;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float4 x = from[n][tile::lane_id()];
    e.a[n][0] = x.x;
    e.a[n][1] = x.y;
    e.a[n][2] = x.z;
    e.a[n][3] = x.w;
  }
  return e;
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

/// What a part's tokens add to S^T: as a left operand rounded, and what the rounding left.
struct Update {
  tile::FragmentA left, rest;
};

/// S^T += a part's updates times its rows, but not of tiles that are `left_out`.
template <class Element, int kDimK, int kTeamTiles, bool kAll>
FLASHQLA_DEVICE void add_update(const QuarterAddresses<kDimK>& rows, int part, TileSet<kAll> left_out,
                                const Update (&updates)[kTeamTiles], StatePart<kDimK> (&state)[kTeamTiles]) {
#pragma unroll
  for (int n = 0; n < QuarterAddresses<kDimK>::kBlocks; ++n) {
    const tile::FragmentB b = rows.load(part, n);
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      if (!left_out.has(t)) tile::multiply<Element>(state[t].s[2 * n], state[t].s[2 * n + 1], updates[t].left, b);
    }
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      if (!left_out.has(t)) tile::multiply<Element>(state[t].s[2 * n], state[t].s[2 * n + 1], updates[t].rest, b);
    }
  }
}

/// The same for the parts place.part ^ kFirst, ^ kFirst + 1, ...; take(tile, part) has their updates.
template <int kFirst, class Element, int kDimK, int kTeamTiles, bool kAll, class Take>
FLASHQLA_DEVICE void add_updates(const QuarterAddresses<kDimK>& rows, const LanePlace& place, TileSet<kAll> left_out,
                                 const Take& take, StatePart<kDimK> (&state)[kTeamTiles]) {
#pragma unroll
  for (int turn = kFirst; turn < kTeam; ++turn) {
    const int part = place.part ^ turn;
    Update updates[kTeamTiles];
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      if (!left_out.has(t)) updates[t] = take(t, part);
    }
    add_update<Element>(rows, part, left_out, updates, state);
  }
}

/// O^T (or gradients of v^T) of the own tokens, transposed in the registers and put together in the warp's part of the exchange.
template <class Element>
FLASHQLA_DEVICE void put_together(std::byte* memory, const LanePlace& place, const tile::Accumulator (&o)[2]) {
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
}

/// A lane's piece of them: of this token of the part, from this element of the tile on, and its place in the part's memory.
struct OutputPiece {
  int token, element, at;
  FLASHQLA_DEVICE OutputPiece() : token(tile::lane_id() / 2), element(tile::lane_id() % 2 * tile::kPieceElements) {
    at = tile::SharedTile<kPartTokens, kTileRows>::offset(token, tile::lane_id() % 2);
  }
};

/// Stores it to the caller's rows, wherever they are.
template <class Element>
__device__ __noinline__ void store_piece(const ChunkForwardParams& p, const AdvanceWork& work, const TokenTensor& out,
                                         LanePlace place, std::int64_t chunk, const std::byte* memory) {
  const OutputPiece piece;
  const int token = place.part * kPartTokens + piece.token, first = work.first_v + place.tile * kTileRows + piece.element;
  if (token >= work.rows.tokens(chunk) || first >= p.dim_v) return;
  const std::int64_t row_token = work.rows.begin + work.rows.position(chunk) + token;
  auto* const row = static_cast<Element*>(out.data) + offset_of(out, work.rows.batch, row_token, work.head) + first;
  if (p.aligned != 0) {
    *reinterpret_cast<uint4*>(row) = *reinterpret_cast<const uint4*>(memory + piece.at);
  } else {
    for (int c = 0; c < tile::kPieceElements; ++c) row[c] = reinterpret_cast<const Element*>(memory + piece.at)[c];
  }
}

/// Stores rows of 16-bit elements chunk after chunk, kStep 1 or -1.
template <class Element, int kStep>
struct RowWriter {
  std::byte* at;       // the lane's piece of the team's first tile, in this chunk
  std::int64_t step;   // bytes from chunk to chunk
  std::int32_t whole;  // chunks up to here are stored directly

  FLASHQLA_DEVICE RowWriter(const ChunkForwardParams& p, const AdvanceWork& work, const TokenTensor& out, const LanePlace& place,
                            std::int64_t first_chunk, int slab)
      : step(kStep * kChunkTokens * out.stride_token * 2), whole(whole_chunks(p, work, work.first_v + slab <= p.dim_v)) {
    const OutputPiece piece;
    const std::int64_t row = work.rows.begin + first_chunk * kChunkTokens + place.part * kPartTokens + piece.token;
    const std::int64_t first = work.first_v + place.tile * kTileRows + piece.element;
    at = static_cast<std::byte*>(out.data) + (offset_of(out, work.rows.batch, row, work.head) + first) * 2;
  }
  /// Of the team's tile number `number`, in which `place` is.
  FLASHQLA_DEVICE void store(const ChunkForwardParams& p, const AdvanceWork& work, const TokenTensor& out, const LanePlace& place,
                             int number, std::int32_t chunk, std::byte* memory, const tile::Accumulator (&o)[2]) const {
    put_together<Element>(memory, place, o);
    if (chunk < whole) {
      *reinterpret_cast<uint4*>(at + number * kTileRows * 2) = *reinterpret_cast<const uint4*>(memory + OutputPiece().at);
    } else {
      store_piece<Element>(p, work, out, place, chunk, memory);
    }
  }
  FLASHQLA_DEVICE void move() { at += step; }
};

}  // namespace flashqla::cuda
