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

/// Leaves the warp's half of S^T, rounded, for the other warp.
template <class Element, int kDimK>
FLASHQLA_DEVICE void leave_state(Exchange<kDimK>& to, const StatePart<kDimK>& part, tile::FragmentA (&own)[kDimK / 32]) {
#pragma unroll
  for (int step = 0; step < kDimK / 32; ++step) {
    own[step] = tile::to_a<Element>(part.s[2 * step], part.s[2 * step + 1]);
    to.state[step][tile::lane_id()] = {own[step].a[0], own[step].a[1], own[step].a[2], own[step].a[3]};
  }
}
/// Likewise what the rounding left.
template <class Element, int kDimK>
FLASHQLA_DEVICE void leave_rest(Exchange<kDimK>& to, const StatePart<kDimK>& part, tile::FragmentA (&own)[kDimK / 32]) {
#pragma unroll
  for (int step = 0; step < kDimK / 32; ++step) {
    own[step] = tile::rest_of<Element>(part.s[2 * step], part.s[2 * step + 1], own[step]);
    to.rest[step][tile::lane_id()] = {own[step].a[0], own[step].a[1], own[step].a[2], own[step].a[3]};
  }
}

/// c (4 accumulators, the own 32 tokens) += S^T times the rows, over the half of K that `state` is of; `addresses` begin at the
/// own tokens and that half. Right operands are loaded kAhead products before they are used.
template <class Element, int kDimK>
FLASHQLA_DEVICE void project(const tile::BlockAddresses<kChunkTokens, kDimK>& addresses,
                             const tile::FragmentA (&state)[kDimK / 32], tile::Accumulator (&c)[4]) {
  constexpr int kCount = kDimK / 32 * 2, kAhead = kCount < 4 ? kCount : 4, kRing = kAhead + 1;
  tile::FragmentB b[kRing];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) b[i] = tile::load_b(addresses, i % 2 * 16, i / 2 * 16);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int next = i + kAhead, t = i % 2;
    if (next < kCount) b[next % kRing] = tile::load_b(addresses, next % 2 * 16, next / 2 * 16);
    tile::multiply<Element>(c[2 * t], c[2 * t + 1], state[i / 2], b[i % kRing]);
  }
}

/// Where a lane finds the warp's own tokens in a tile of rows, from half `half` of K on.
template <int kDimK>
FLASHQLA_DEVICE tile::BlockAddresses<kChunkTokens, kDimK> own_tokens(const tile::SharedTile<kChunkTokens, kDimK>& rows,
                                                                     const LanePlace& place, int half) {
  using Rows = tile::SharedTile<kChunkTokens, kDimK>;
  return tile::from_column(tile::addresses_b(Rows{rows.base + place.half * kHalfTokens * Rows::kRowBytes}), half * (kDimK / 2));
}

/// e, which holds K S, becomes strength o v - read_k o (K S) for the warp's own tokens; the largest of each of the lane's two
/// rows.
template <class Element, int kSlab>
FLASHQLA_DEVICE void take_errors(const tile::SharedTile<kChunkTokens, kSlab>& values, const std::byte* unit,
                                 const LanePlace& place, tile::Accumulator (&e)[4], float (&largest)[2]) {
  largest[0] = largest[1] = 0.0f;
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const tile::FragmentA v = tile::load_c_transposed(values, place.tile * kTileRows, place.half * kHalfTokens + 16 * t);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 factors = column_factors(unit, ChunkUnit::kReadK, 4 * place.half + 2 * t + half);
      const float2 strengths = column_factors(unit, ChunkUnit::kStrength, 4 * place.half + 2 * t + half);
      const float2 upper = ptx::unpack_pair<Element>(v.a[2 * half]), lower = ptx::unpack_pair<Element>(v.a[2 * half + 1]);
      float* const c = e[2 * t + half].c;
      c[0] = fmaf(-factors.x, c[0], strengths.x * upper.x);
      c[1] = fmaf(-factors.y, c[1], strengths.y * upper.y);
      c[2] = fmaf(-factors.x, c[2], strengths.x * lower.x);
      c[3] = fmaf(-factors.y, c[3], strengths.y * lower.y);
      largest[0] = fmaxf(largest[0], fmaxf(fabsf(c[0]), fabsf(c[1])));
      largest[1] = fmaxf(largest[1], fmaxf(fabsf(c[2]), fabsf(c[3])));
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 1));
    largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 2));
  }
}

/// The warp's own errors divided by their rows' scales, as left operands.
FLASHQLA_DEVICE void pack_errors(const float (&scale)[2], tile::Accumulator (&e)[4], tile::FragmentA (&errors)[2]) {
  const float inverse[2] = {block::inverse_power(scale[0]), block::inverse_power(scale[1])};
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    scale_rows(e[2 * t], inverse);
    scale_rows(e[2 * t + 1], inverse);
    errors[t] = tile::to_a<ptx::F16>(e[2 * t], e[2 * t + 1]);
  }
}

/// The larger of `largest` and the largest of each of the lane's two rows.
FLASHQLA_DEVICE void raise_to_rows(const tile::Accumulator (&x)[4], float (&largest)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float most = 0.0f;
#pragma unroll
    for (int n = 0; n < 4; ++n) most = fmaxf(most, fmaxf(fabsf(x[n].c[2 * i]), fabsf(x[n].c[2 * i + 1])));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    largest[i] = fmaxf(largest[i], fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2)));
  }
}

/// `rows`, divided by powers of two `scale` above the lane's rows, as left operands.
FLASHQLA_DEVICE void pack_rows(const tile::Accumulator (&rows)[4], float (&scale)[2], tile::FragmentA (&packed)[2]) {
  float largest[2] = {0.0f, 0.0f};
  raise_to_rows(rows, largest);
  for (int i = 0; i < 2; ++i) scale[i] = block::power_above(largest[i]);
  tile::Accumulator scaled[4] = {rows[0], rows[1], rows[2], rows[3]};
  pack_errors(scale, scaled, packed);
}

/// c (4 accumulators, the own tokens) += first triangle^T over the first half's tokens, times `ratio`; then += own triangle^T.
FLASHQLA_DEVICE void multiply_triangle(const std::byte* unit, int triangle, int half, const tile::FragmentA (&first)[2],
                                       const float (&ratio)[2], const tile::FragmentA (&own)[2], tile::Accumulator (&c)[4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) c[n] = {};
  if (half == 1) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        tile::multiply<ptx::F16>(c[2 * i], c[2 * i + 1], first[j], load_block(unit, triangle, 2 + i, j));
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) scale_rows(c[n], ratio);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = j; i < 2; ++i) {
      tile::multiply<ptx::F16>(c[2 * i], c[2 * i + 1], own[j], load_block(unit, triangle, 2 * half + i, 2 * half + j));
    }
  }
}

/// S^T += left K over two blocks of 16 tokens from `token` on; `left` rounded and what the rounding left.
template <class Element, int kDimK>
FLASHQLA_DEVICE void update_state(const tile::BlockAddresses<kChunkTokens, kDimK>& keys, int token,
                                  const tile::FragmentA (&left)[2], const tile::FragmentA (&rest)[2], StatePart<kDimK>& part) {
  constexpr int kBlocks = kDimK / 32, kCount = 2 * kBlocks, kAhead = 2, kRing = kAhead + 1;
  tile::FragmentB key[kRing];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) key[i] = tile::load_b_transposed(keys, token + i / kBlocks * 16, i % kBlocks * 16);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int next = i + kAhead, t = i / kBlocks, n = i % kBlocks;
    if (next < kCount) {
      key[next % kRing] = tile::load_b_transposed(keys, token + next / kBlocks * 16, next % kBlocks * 16);
    }
    tile::multiply<Element>(part.s[2 * n], part.s[2 * n + 1], left[t], key[i % kRing]);
    tile::multiply<Element>(part.s[2 * n], part.s[2 * n + 1], rest[t], key[i % kRing]);
  }
}

/// O^T (or gradients of v^T) of the own tokens to the caller's rows, transposed in the registers and put together in the warp's
/// exchange.
template <class Element>
FLASHQLA_DEVICE void store_rows(const ChunkForwardParams& p, const AdvanceWork& work, const TokenTensor& out,
                                const LanePlace& place, std::int64_t chunk, std::byte* memory, const tile::Accumulator (&o)[4]) {
  using Tile = tile::SharedTile<kHalfTokens, kTileRows>;
  __syncwarp();  // all lanes have read what the other warp left here
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t pair = ptx::movmatrix_trans(ptx::pack_pair<Element>(o[n].c[2 * half], o[n].c[2 * half + 1]));
      *reinterpret_cast<std::uint32_t*>(memory + Tile::offset(8 * n + place.row, half) + place.column * 2) = pair;
    }
  }
  __syncwarp();  // the pieces, for other lanes
  const int first_token = place.half * kHalfTokens, tokens = work.rows.tokens(chunk) - first_token;
  const int first = work.first_v + place.tile * kTileRows;
  const std::int64_t row_token = work.rows.begin + work.rows.position(chunk) + first_token;
  auto* const to = static_cast<Element*>(out.data) + offset_of(out, work.rows.batch, row_token, work.head) + first;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = 32 * i + tile::lane_id(), token = at / 2, piece = at % 2;
    if (token >= tokens || first + piece * tile::kPieceElements >= p.dim_v) continue;
    const std::byte* from = memory + Tile::offset(token, piece);
    Element* const row = to + token * out.stride_token + piece * tile::kPieceElements;
    if (p.aligned != 0) {
      *reinterpret_cast<uint4*>(row) = *reinterpret_cast<const uint4*>(from);
    } else {
#pragma unroll
      for (int c = 0; c < tile::kPieceElements; ++c) row[c] = reinterpret_cast<const Element*>(from)[c];
    }
  }
  __syncwarp();  // all lanes have read: the next chunk's state may come here
}

}  // namespace flashqla::cuda
