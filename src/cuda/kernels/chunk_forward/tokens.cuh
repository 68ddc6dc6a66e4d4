// Chunks that are walked token by token in f32, as recurrent_forward does, by the two warps that have the state's rows.
//
// E (or its gradient) is f16 for its product with `solve`, one power of two for the 64 tokens of a row of V, and `solve` is f16
// itself. Where the decays of a chunk are so strong, and what its last (or first) tokens add is so little, that all that gets
// through the chunk is below what that rounding leaves, the state (or its gradient) would be noise. The same for what a decay
// makes smaller than any normal f32. Rare: it takes values (or gradients of outputs) of zero.
#pragma once

#include "cuda/kernels/chunk_forward/advance.cuh"
#include "cuda/kernels/chunk_forward/kept.cuh"

namespace flashqla::cuda {

/// What a warp has before a chunk, of its tokens and its part of the state, and what of the tokens' gets through: the largest.
struct Reach {
  float least, least_of_state;  // what has to get through of the tokens' largest and of the state's, ChunkUnit; 0: always enough
  float tokens = 0.0f, through = 0.0f, state = 0.0f;
};

/// Whether there is anything to look at. f16 inputs: the state is rounded to f16 for its products, and what is added to it.
template <class Element>
FLASHQLA_DEVICE bool watched(const Reach& reach) {
  return std::is_same_v<Element, ptx::F16> || reach.least != 0.0f || reach.least_of_state != 0.0f;
}
/// `factors`: to the end of the chunk (or its start); `least`: offset in the unit.
template <class Element, int kDimK>
FLASHQLA_DEVICE Reach reach_of(const std::byte* unit, int least, int factors, const LanePlace& place, const float (&largest)[2],
                               const tile::Accumulator (&e)[4], const StatePart<kDimK>& part) {
  Reach reach{*reinterpret_cast<const float*>(unit + least), *reinterpret_cast<const float*>(unit + ChunkUnit::kLeastOfState)};
  if (!watched<Element>(reach)) return reach;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 f = column_factors(unit, factors, 4 * place.half + n);
    const float left = fmaxf(fabsf(e[n].c[0]), fabsf(e[n].c[2])), right = fmaxf(fabsf(e[n].c[1]), fabsf(e[n].c[3]));
    reach.through = fmaxf(reach.through, fmaxf(fabsf(f.x) * left, fabsf(f.y) * right));
  }
  reach.tokens = block::warp_largest_positive(fmaxf(largest[0], largest[1]));
  reach.through = block::warp_largest_positive(reach.through);
  if (!std::is_same_v<Element, ptx::F16> && reach.least_of_state == 0.0f) return reach;
#pragma unroll
  for (const tile::Accumulator& s : part.s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) reach.state = fmaxf(reach.state, fabsf(s.c[i]));
  }
  reach.state = block::warp_largest_positive(reach.state);
  return reach;
}

/// Whether the chunk has to be walked, from what both warps have.
template <class Element>
FLASHQLA_DEVICE bool is_lost(const Reach& own, const float4& other) {
  const float tokens = fmaxf(own.tokens, other.x), through = fmaxf(own.through, other.y), state = fmaxf(own.state, other.z);
  if (std::is_same_v<Element, ptx::F16>) {
    if (fmaxf(state, through) > 0x1p15f || (through < 0x1p-14f && tokens > 0.0f)) return true;
  }
  return through < own.least * tokens || through < own.least_of_state * state;
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

  FLASHQLA_DEVICE WalkedRow(const OperationParams& p, const std::byte* of, int t) : rows(of), token(t), factor(1.0f) {
    if (p.l2norm_eps < 0.0f) return;
    float square = 0.0f;
#pragma unroll 4
    for (int m = 0; m < kDimK / 8; ++m) square = fmaf(at(m).x, at(m).x, fmaf(at(m).y, at(m).y, square));
    factor = rsqrtf(total_of_four(square) + p.l2norm_eps);
  }
  FLASHQLA_DEVICE float2 at(int m) const { return pair_of_row<Element, kDimK>(rows, token, 8 * m + tile::lane_id() % 4 * 2); }
  FLASHQLA_DEVICE float dot(const RowSlice<kDimK>& slice) const {
    float sum = 0.0f;
#pragma unroll
    for (int m = 0; m < kDimK / 8; ++m) sum = fmaf(at(m).x, slice.s[m].x, fmaf(at(m).y, slice.s[m].y, sum));
    return factor * total_of_four(sum);
  }
  FLASHQLA_DEVICE void add_times(float x, RowSlice<kDimK>& slice) const {
    x *= factor;
#pragma unroll
    for (int m = 0; m < kDimK / 8; ++m) slice.s[m] = {fmaf(at(m).x, x, slice.s[m].x), fmaf(at(m).y, x, slice.s[m].y)};
  }
};

/// The rows of V and tokens of a pair of warps, [token][16], while they are walked: in its exchange.
struct WalkedRows {
  float errors[kChunkTokens][kTileRows], output[kChunkTokens][kTileRows];
};
FLASHQLA_DEVICE void load_walked(const float (&rows)[kChunkTokens][kTileRows], const LanePlace& place,
                                 tile::Accumulator (&x)[4]) {
  for (int n = 0; n < 4; ++n) {
    for (int i = 0; i < 4; ++i) x[n].c[i] = rows[place.half * kHalfTokens + 8 * n + place.column + i % 2][place.row + i / 2 * 8];
  }
}

/// The tokens of a chunk, first to last, or with kBack last to first: state and rows of the lane's row of V.
template <class Element, int kDimK, int kTiles, bool kBack>
FLASHQLA_DEVICE void walk_row(const ChunkForwardParams& p, const AdvanceWork& work, std::int64_t chunk,
                              const typename AdvanceShared<kDimK, kTiles>::Stage& stage, const LanePlace& place, WalkedRows& rows,
                              RowSlice<kDimK>& slice) {
  using Row = WalkedRow<Element, kDimK>;
  const int lane = tile::lane_id(), row = 8 * place.half + lane / 4, column = place.tile * kTileRows + row;
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
    const float2 values = pair_of_row<Element, kTiles * kTileRows>(stage.values, t, column / 2 * 2);
    const float value = column % 2 == 0 ? values.x : values.y;  // of dO with kBack
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

/// The chunk for a pair of warps: S^T as the exchange's states in f32, in the order of accumulators, before and after. Direction
/// has kBack and finish(...), which stores what the chunk has to.
template <class Element, int kDimK, int kTiles, class Direction>
__device__ __noinline__ void walk_tokens(const typename Direction::Params& p, const AdvanceWork& work, std::int64_t chunk,
                                         const typename AdvanceShared<kDimK, kTiles>::Stage& stage,
                                         Exchange<kDimK> (&exchange)[2 * kTiles]) {
  const LanePlace place = lane_place();
  Exchange<kDimK>* const pair = &exchange[2 * place.tile];
  static_assert(sizeof(WalkedRows) <= 2 * sizeof(Exchange<kDimK>));
  WalkedRows& rows = *reinterpret_cast<WalkedRows*>(pair);
  RowSlice<kDimK> slice;
  ptx::named_barrier(place.barrier(0), 64);  // the state, from both warps
  const auto part_of = [&](int m) {          // columns 8 m ... of the lane's row
    return &reinterpret_cast<float2*>(&pair[m / (kDimK / 16)].walked[m % (kDimK / 16)][tile::lane_id()])[place.half];
  };
#pragma unroll
  for (int m = 0; m < RowSlice<kDimK>::kCount; ++m) slice.s[m] = *part_of(m);
  ptx::named_barrier(place.barrier(1), 64);  // both have the state: rows may come to its place
  walk_row<Element, kDimK, kTiles, Direction::kBack>(p, work, chunk, stage, place, rows, slice);
  ptx::named_barrier(place.barrier(2), 64);  // rows, for both warps
  tile::Accumulator e[4], o[4];
  load_walked(rows.errors, place, e);
  if constexpr (!Direction::kBack) load_walked(rows.output, place, o);
  ptx::named_barrier(place.barrier(0), 64);  // both have the rows: outputs may come to their place
  Direction::template finish<Element>(p, work, chunk, place, stage.unit, exchange[place.own()].output, e, o);
  ptx::named_barrier(place.barrier(1), 64);  // outputs have left: the state may come to their place
#pragma unroll
  for (int m = 0; m < RowSlice<kDimK>::kCount; ++m) *part_of(m) = slice.s[m];
  ptx::named_barrier(place.barrier(2), 64);  // the state, for both warps
}

/// walk_tokens with the warp's part of the state.
template <class Element, int kDimK, int kTiles, class Direction>
FLASHQLA_DEVICE void walk_chunk(const typename Direction::Params& p, const AdvanceWork& work, std::int64_t chunk,
                                const typename AdvanceShared<kDimK, kTiles>::Stage& stage,
                                Exchange<kDimK> (&exchange)[2 * kTiles], StatePart<kDimK>& part) {
  float4(&own)[kDimK / 16][32] = exchange[lane_place().own()].walked;
  const int lane = tile::lane_id();
  __syncwarp();  // all lanes have read what the other warp left here
#pragma unroll
  for (int n = 0; n < StatePart<kDimK>::kTilesOfK; ++n) {
    const float(&c)[4] = part.s[n].c;
    own[n][lane] = {c[0], c[1], c[2], c[3]};
  }
  walk_tokens<Element, kDimK, kTiles, Direction>(p, work, chunk, stage, exchange);
#pragma unroll
  for (int n = 0; n < StatePart<kDimK>::kTilesOfK; ++n) {
    const float4 c = own[n][lane];
    part.s[n] = {{c.x, c.y, c.z, c.w}};
  }
  __syncwarp();  // all lanes have it: the next chunk's state may come here
}

}  // namespace flashqla::cuda
