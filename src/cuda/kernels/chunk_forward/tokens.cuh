// Chunks that are walked token by token in f32, as recurrent_forward does, by two warps of the team that has the state's rows.
//
// E (or its gradient) is f16 for its product with `solve`, one power of two for 16 tokens of a row of V, and `solve` is f16
// itself. Where the decays of a chunk are so strong, and what its last (or first) tokens add is so little, that all that gets
// through the chunk is below what that rounding leaves, the state (or its gradient) would be noise. The same for what a decay
// makes smaller than any normal f32. Rare: it takes values (or gradients of outputs) of zero.
#pragma once

#include <cstddef>

#include "cuda/kernels/chunk_forward/advance.cuh"
#include "cuda/kernels/chunk_forward/kept.cuh"

namespace flashqla::cuda {

/// What has to get through a chunk, from its unit: of the tokens' largest and of the state's; 0: always enough does.
struct Least {
  float of_tokens, of_state;
};
/// `least`: offset in the unit.
FLASHQLA_DEVICE Least least_of(const std::byte* unit, int least) {
  return {*reinterpret_cast<const float*>(unit + least), *reinterpret_cast<const float*>(unit + ChunkUnit::kLeastOfState)};
}
/// Whether there is anything to look at. f16 inputs: the state is rounded to f16 for its products, and what is added to it.
template <class Element>
FLASHQLA_DEVICE bool watched(const Least& least) {
  return std::is_same_v<Element, ptx::F16> || least.of_tokens != 0.0f || least.of_state != 0.0f;
}

/// What a warp has before a chunk, of its tokens and its part of the state, and what of the tokens' gets through: the largest.
struct Reach {
  float tokens = 0.0f, through = 0.0f, state = 0.0f;
};
/// `factors`: to the end of the chunk (or its start).
template <class Element, int kDimK>
FLASHQLA_DEVICE Reach reach_of(const std::byte* unit, const Least& least, int factors, const LanePlace& place,
                               const tile::Accumulator (&e)[2], const StatePart<kDimK>& part) {
  Reach reach;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 f = column_factors(unit, factors, 2 * place.part + n);
    const float left = fmaxf(fabsf(e[n].c[0]), fabsf(e[n].c[2])), right = fmaxf(fabsf(e[n].c[1]), fabsf(e[n].c[3]));
    reach.tokens = fmaxf(reach.tokens, fmaxf(left, right));
    reach.through = fmaxf(reach.through, fmaxf(fabsf(f.x) * left, fabsf(f.y) * right));
  }
  reach.tokens = block::warp_largest_positive(reach.tokens);
  reach.through = block::warp_largest_positive(reach.through);
  if (!std::is_same_v<Element, ptx::F16> && least.of_state == 0.0f) return reach;
#pragma unroll
  for (const tile::Accumulator& s : part.s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) reach.state = fmaxf(reach.state, fabsf(s.c[i]));
  }
  reach.state = block::warp_largest_positive(reach.state);
  return reach;
}

/// Whether the chunk has to be walked, from what all parts have.
template <class Element>
FLASHQLA_DEVICE bool is_lost(const Least& least, const float4 (&reach)[kTeam]) {
  Reach all;
#pragma unroll
  for (const float4& part : reach) {
    all.tokens = fmaxf(all.tokens, part.x);
    all.through = fmaxf(all.through, part.y);
    all.state = fmaxf(all.state, part.z);
  }
  if (std::is_same_v<Element, ptx::F16>) {
    if (fmaxf(all.state, all.through) > 0x1p15f || (all.through < 0x1p-14f && all.tokens > 0.0f)) return true;
  }
  return all.through < least.of_tokens * all.tokens || all.through < least.of_state * all.state;
}

template <class Element, int kColumns>
FLASHQLA_DEVICE float2 pair_of_row(const std::byte* rows, int token, int column) {
  const int at = tile::SharedTile<kChunkTokens, kColumns>::offset(token, column / 8) + column % 8 * 2;
  return ptx::unpack_pair<Element>(*reinterpret_cast<const std::uint32_t*>(rows + at));
}

/// A row of S^T (or its gradient) over four lanes: lane t of them has columns 8 m + 2 t and the next one.
template <int kDimK>
struct RowSlice {
  static constexpr int kCount = kDimK / 8;
  float2 s[kCount];

  FLASHQLA_DEVICE void scale(float factor) {
#pragma unroll
    for (float2& x : s) x = {x.x * factor, x.y * factor};
  }
};
FLASHQLA_DEVICE float total_of_four(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/// A token's row of k or q.
template <class Element, int kDimK>
struct WalkedRow {
  const std::byte* rows;
  int token;
  float factor;  // of L2 normalisation

  FLASHQLA_DEVICE WalkedRow(const std::byte* of, int t) : rows(of), token(t), factor(1.0f) {}
  FLASHQLA_DEVICE WalkedRow(const OperationParams& p, const std::byte* of, int t) : WalkedRow(of, t) {
    if (p.l2norm_eps < 0.0f) return;
    float square = 0.0f;
#pragma unroll 4
    for (int m = 0; m < kDimK / 8; ++m) square = fmaf(at(m).x, at(m).x, fmaf(at(m).y, at(m).y, square));
    factor = rsqrtf(total_of_four(square) + p.l2norm_eps);
  }
  FLASHQLA_DEVICE float2 at(int m) const { return pair_of_row<Element, kDimK>(rows, token, 8 * m + tile::lane_id() % 4 * 2); }
  FLASHQLA_DEVICE float dot(const RowSlice<kDimK>& slice) const { return factor * dot_as_given(slice); }
  FLASHQLA_DEVICE float dot_as_given(const RowSlice<kDimK>& slice) const {
    float sum = 0.0f;
#pragma unroll
    for (int m = 0; m < kDimK / 8; ++m) sum = fmaf(at(m).x, slice.s[m].x, fmaf(at(m).y, slice.s[m].y, sum));
    return total_of_four(sum);
  }
  FLASHQLA_DEVICE void add_times(float x, RowSlice<kDimK>& slice) const {
    x *= factor;
#pragma unroll
    for (int m = 0; m < kDimK / 8; ++m) slice.s[m] = {fmaf(at(m).x, x, slice.s[m].x), fmaf(at(m).y, x, slice.s[m].y)};
  }
};

/// The rows of V and tokens of a tile, [token][16], while they are walked: in its exchange.
struct WalkedRows {
  float errors[kChunkTokens][kTileRows], output[kChunkTokens][kTileRows];
};
FLASHQLA_DEVICE void load_walked(const float (&rows)[kChunkTokens][kTileRows], const LanePlace& place,
                                 tile::Accumulator (&x)[2]) {
  for (int n = 0; n < 2; ++n) {
    for (int i = 0; i < 4; ++i) x[n].c[i] = rows[place.part * kPartTokens + 8 * n + place.column + i % 2][place.row + i / 2 * 8];
  }
}

/// The tokens of a chunk, first to last, or with kBack last to first: state and rows of the lane's row of V.
template <class Element, int kDimK, int kSlab, class Direction, class Stage>
FLASHQLA_DEVICE void walk_row(const typename Direction::Params& p, const AdvanceWork& work, std::int64_t chunk,
                              const Stage& stage, const LanePlace& place, WalkedRows& rows, RowSlice<kDimK>& slice) {
  using Row = WalkedRow<Element, kDimK>;
  constexpr bool kBack = Direction::kBack;
  const int lane = tile::lane_id(), row = 8 * place.part + lane / 4, column = place.tile * kTileRows + row;
  const std::int64_t first = work.rows.begin + work.rows.position(chunk);
  float half_decay[2], beta[2];
  for (int half = 0; half < 2; ++half) {
    const block::TokenGates gates =
        block::token_gates(p, work.rows.batch, first, work.head, lane + 32 * half, work.rows.tokens(chunk));
    half_decay[half] = expf(0.5f * static_cast<float>(gates.log_decay));  // twice: the whole may be no normal number
    beta[half] = gates.beta;
  }
#pragma unroll 1
  for (int turn = 0; turn < kChunkTokens; ++turn) {
    const int t = kBack ? kChunkTokens - 1 - turn : turn;
    const float decay = __shfl_sync(0xffffffffu, t < 32 ? half_decay[0] : half_decay[1], t % 32),
                strength = __shfl_sync(0xffffffffu, t < 32 ? beta[0] : beta[1], t % 32);
    const float fall = reinterpret_cast<const float*>(stage.unit + ChunkUnit::kStrength)[t];
    const float2 values = pair_of_row<Element, kSlab>(stage.values, t, column / 2 * 2);  // of dO with kBack
    const float value = column % 2 == 0 ? values.x : values.y;
    const Row k(p, stage.keys, t), q(p, stage.queries, t);
    if constexpr (kBack) {
      q.add_times(p.scale * value, slice);
      const float d_v = strength * k.dot(slice);
      k.add_times(-d_v, slice);
      if (lane % 4 == 0) rows.errors[t][row] = d_v / fall;
    }
    slice.scale(decay);
    slice.scale(decay);
    if constexpr (!kBack) {
      const float e = value - k.dot(slice);
      k.add_times(strength * e, slice);
      const float o = p.scale * q.dot(slice);
      if (lane % 4 == 0) {
        rows.errors[t][row] = fall * e;
        rows.output[t][row] = o;
      }
    }
  }
}

/// Keys as given times the state before the walk, of all tokens: what the common path's product gives to Direction::projected.
template <class Element, int kDimK, class Direction, class Stage>
FLASHQLA_DEVICE void project_walked(const typename Direction::Params& p, const AdvanceWork& work, std::int64_t chunk,
                                    const Stage& stage, const LanePlace& place, WalkedRows& rows, const RowSlice<kDimK>& slice) {
  if (place.part < 2) {
#pragma unroll 1
    for (int t = 0; t < kChunkTokens; ++t) {
      const float x = WalkedRow<Element, kDimK>(stage.keys, t).dot_as_given(slice);
      if (tile::lane_id() % 4 == 0) rows.output[t][8 * place.part + tile::lane_id() / 4] = x;
    }
  }
  ptx::named_barrier(place.barrier(2), kTeamThreads);  // products, for all parts
  tile::Accumulator products[2];
  load_walked(rows.output, place, products);
  Direction::projected(p, work, chunk, place, products);
}

/// The chunk for a tile: S^T as the exchange's in f32 before and after. Parts 0 and 1 walk, each eight rows. Direction has kBack,
/// finish(...), which stores what the chunk has to, and with kBack projected(...), which takes dS^T K^T of keys as given for
/// kKeepsRests.
template <class Element, int kDimK, int kSlab, class Direction, class Stage>
__device__ __noinline__ void walk_tokens(const typename Direction::Params& p, const AdvanceWork& work, std::int64_t chunk,
                                         const Stage& stage, LanePlace place, Exchange<kDimK>& exchange) {
  static_assert(sizeof(WalkedRows) <= sizeof(exchange.walked) || kDimK < 128);
  static_assert(sizeof(WalkedRows) <= offsetof(Exchange<kDimK>, reach));
  WalkedRows& rows = *reinterpret_cast<WalkedRows*>(&exchange);
  RowSlice<kDimK> slice;
  const bool walks = place.part < 2;
  ptx::named_barrier(place.barrier(0), kTeamThreads);  // the state, from all parts
  const auto part_of = [&](int m) {                    // columns 8 m ... of the lane's row
    return &reinterpret_cast<float2*>(&exchange.walked[m][tile::lane_id()])[place.part];
  };
  if (walks) {
#pragma unroll
    for (int m = 0; m < RowSlice<kDimK>::kCount; ++m) slice.s[m] = *part_of(m);
  }
  ptx::named_barrier(place.barrier(1), kTeamThreads);  // the state has been read: rows may come to its place
  if constexpr (Direction::kBack && kKeepsRests<Element>) {
    project_walked<Element, kDimK, Direction>(p, work, chunk, stage, place, rows, slice);
  }
  if (walks) walk_row<Element, kDimK, kSlab, Direction>(p, work, chunk, stage, place, rows, slice);
  ptx::named_barrier(place.barrier(2), kTeamThreads);  // rows, for all parts
  tile::Accumulator e[2], o[2];
  load_walked(rows.errors, place, e);
  if constexpr (!Direction::kBack) load_walked(rows.output, place, o);
  ptx::named_barrier(place.barrier(0), kTeamThreads);  // the rows have been read: outputs may come to their place
  Direction::template finish<Element>(p, work, chunk, place, stage.unit, exchange.output[place.part], e, o);
  ptx::named_barrier(place.barrier(1), kTeamThreads);  // outputs have left: the state may come to their place
  if (walks) {
#pragma unroll
    for (int m = 0; m < RowSlice<kDimK>::kCount; ++m) *part_of(m) = slice.s[m];
  }
  ptx::named_barrier(place.barrier(2), kTeamThreads);  // the state, for all parts
}

/// Calls body(element, place in the exchange) for the accumulators of the warp's part of the state.
template <int kDimK, class Body>
FLASHQLA_DEVICE void for_each_walked(Exchange<kDimK>& exchange, const LanePlace& place, StatePart<kDimK>& part,
                                     const Body& body) {
  constexpr int kCount = StatePart<kDimK>::kCount;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    body(part.s[n], *reinterpret_cast<tile::Accumulator*>(&exchange.walked[place.part * kCount + n][tile::lane_id()]));
  }
}

/// Leaves the states before the chunk of the team's tiles that are `lost`, where their updates are, which nobody reads.
template <int kDimK, int kTeamTiles, class Team>
FLASHQLA_DEVICE void leave_lost(unsigned lost, Team* exchange, const LanePlace& place, StatePart<kDimK> (&state)[kTeamTiles]) {
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
    if ((lost >> t & 1) == 0) continue;
    for_each_walked<kDimK>(exchange[t], place, state[t], [](tile::Accumulator& own, tile::Accumulator& left) { left = own; });
  }
}
/// Walks them.
template <class Element, int kSlab, class Direction, int kDimK, int kTeamTiles, class Stage, class Team>
FLASHQLA_DEVICE void walk_lost(const typename Direction::Params& p, const AdvanceWork& work, std::int64_t chunk,
                               const Stage& stage, unsigned lost, Team* exchange, const LanePlace& place,
                               StatePart<kDimK> (&state)[kTeamTiles]) {
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
    if ((lost >> t & 1) == 0) continue;
    walk_tokens<Element, kDimK, kSlab, Direction>(p, work, chunk, stage, place.in_tile(t), exchange[t]);
    for_each_walked<kDimK>(exchange[t], place, state[t], [](tile::Accumulator& own, tile::Accumulator& left) { own = left; });
  }
}

}  // namespace flashqla::cuda
