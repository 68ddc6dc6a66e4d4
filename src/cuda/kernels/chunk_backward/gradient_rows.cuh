// What chunk_gradients brings to shared memory: keys and queries once, and per value head gates, powers and slabs.
#pragma once

#include <type_traits>

#include "cuda/kernels/chunk_backward/gradient_shared.cuh"

namespace flashqla::cuda {

/// Eight elements as floats.
template <class Element>
FLASHQLA_DEVICE void unpack_piece(const uint4& piece, float (&x)[8]) {
  const std::uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = ptx::unpack_pair<Element>(pairs[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

/// The largest and the sum over the eight neighbouring lanes that share a row, in all of them.
FLASHQLA_DEVICE float row_largest(float x) {
#pragma unroll
  for (int step = 4; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
FLASHQLA_DEVICE float row_sum(float x) {
#pragma unroll
  for (int step = 4; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

/// What a row is divided by, so that f16 holds it: f16 rows are left as they are.
template <class Element>
FLASHQLA_DEVICE float row_power(float largest) {
  if constexpr (std::is_same_v<Element, ptx::F16>) return 1.0f;
  return largest > 0.0f ? block::power_above(largest) : 1.0f;
}

/// Rows of keys or queries in shared memory to f16, in place, with their factors: eight threads a row.
template <class Element, int kDimK>
FLASHQLA_DEVICE void convert_rows(const ChunkBackwardParams& p, const PreparedChunk& chunk, int which,
                                  GradientShared<kDimK>& shared) {
  using Rows = typename GradientShared<kDimK>::Rows;
  constexpr int kPieces = Rows::kRowPieces / 8;
  const int row = static_cast<int>(threadIdx.x) / 8, first = static_cast<int>(threadIdx.x) % 8;
  float x[kPieces][8], largest = 0.0f, square = 0.0f;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    unpack_piece<Element>(*reinterpret_cast<const uint4*>(shared.rows[which] + Rows::offset(row, first + 8 * i)), x[i]);
#pragma unroll
    for (float value : x[i]) {
      largest = fmaxf(largest, fabsf(value));
      square = fmaf(value, value, square);
    }
  }
  const float power = row_power<Element>(row_largest(largest)), inverse = block::inverse_power(power);
  square = row_sum(square);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    uint4 piece;
    std::uint32_t* const pairs[4] = {&piece.x, &piece.y, &piece.z, &piece.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) *pairs[j] = ptx::pack_pair<ptx::F16>(x[i][2 * j] * inverse, x[i][2 * j + 1] * inverse);
    *reinterpret_cast<uint4*>(shared.rows[which] + Rows::offset(row, first + 8 * i)) = piece;
  }
  if (first != 0) return;
  const float norm = p.l2norm_eps >= 0.0f && row < chunk.tokens ? rsqrtf(square + p.l2norm_eps) : 1.0f;
  shared.norms[which][row] = norm;
  shared.factors[which][row] = norm * power;
}

template <class Element, int kDimK>
FLASHQLA_DEVICE void load_gradient_rows(const ChunkBackwardParams& p, const PreparedChunk& chunk, GradientShared<kDimK>& shared) {
  using Rows = typename GradientShared<kDimK>::Rows;
  for (int which = 0; which < 2; ++which) {
    const TokenTensor& x = which == 0 ? p.k : p.q;
    const tile::GlobalRows rows{static_cast<const Element*>(x.data) + offset_of(x, chunk.batch, chunk.token, chunk.head_qk),
                                x.stride_token, chunk.tokens, p.dim_k};
    if (p.aligned != 0) {
      tile::copy_rows_async<kGradientThreads>(Rows{ptx::shared_address(shared.rows[which])}, rows);
    } else {
      tile::copy_rows<kGradientThreads, kChunkTokens, kDimK>(shared.rows[which], rows);
    }
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();  // rows, for the threads that convert them
  convert_rows<Element, kDimK>(p, chunk, 0, shared);
  convert_rows<Element, kDimK>(p, chunk, 1, shared);
}

/// Gates of a value head by one warp, two tokens a lane.
template <int kDimK>
FLASHQLA_DEVICE void load_head_gates(const ChunkBackwardParams& p, const PreparedChunk& chunk, std::int32_t head,
                                     GradientShared<kDimK>& shared) {
  const int lane = tile::lane_id();
  const block::TokenGates first = block::token_gates(p, chunk.batch, chunk.token, head, lane, chunk.tokens),
                          second = block::token_gates(p, chunk.batch, chunk.token, head, lane + 32, chunk.tokens);
  const block::DecaySums d = block::decay_sums(first, second);
  const block::TwoFloats all = block::split(d.all);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = lane + 32 * half;
    const block::TwoFloats sum = block::split(d.sums[half]);
    shared.high[token] = sum.high;
    shared.low[token] = sum.low;
    shared.beta[token] = half == 0 ? first.beta : second.beta;
    shared.decay[token] = exp2f(sum.high) * exp2f(sum.low);
    shared.rest[token] = block::exp2_difference(all, sum);
    shared.rise[token] = exp2f(static_cast<float>(d.rises[half]));
    shared.fall[token] = exp2f(static_cast<float>(-d.rises[half]));
  }
}

/// Powers of two above the rows of dO: eight threads a row.
template <class Element, int kDimK>
FLASHQLA_DEVICE void find_gradient_powers(const ChunkBackwardParams& p, const PreparedChunk& chunk, std::int32_t head,
                                          GradientShared<kDimK>& shared) {
  const int row = static_cast<int>(threadIdx.x) / 8, lane = static_cast<int>(threadIdx.x) % 8;
  float largest = 0.0f;
  if (!std::is_same_v<Element, ptx::F16> && row < chunk.tokens) {
    const auto* from = static_cast<const Element*>(p.d_o.data) + offset_of(p.d_o, chunk.batch, chunk.token + row, head);
    for (int piece = lane; piece < p.dim_v / tile::kPieceElements; piece += 8) {
      const Element* const at = from + piece * tile::kPieceElements;
      float x[8];
      if (p.aligned != 0) {
        unpack_piece<Element>(*reinterpret_cast<const uint4*>(at), x);
      } else {
        for (int i = 0; i < 8; ++i) x[i] = load_scalar(at, p.d_o.dtype, i);
      }
      for (float value : x) largest = fmaxf(largest, fabsf(value));
    }
  }
  largest = row_largest(largest);
  if (lane == 0) shared.d_o_powers[row] = row_power<Element>(largest);
}

/// Logarithm of a multiplier of column v of V, not divided by the largest.
template <int kDimK>
FLASHQLA_DEVICE int multiplier_log(const GradientShared<kDimK>& shared, int kind, int v) {
  const auto e = [&](int half) -> int { return shared.row_logs[half][v]; };
  const auto d_v = [&](int half) -> int { return shared.row_logs[2 + half][v]; };
  const auto s = [&](int half) -> int { return shared.state_logs[half][v / 16]; };
  const auto d_s = [&](int half) -> int { return shared.state_logs[2 + half][v / 16]; };
  if (kind < Multiplier::kValues) return s(kind);
  if (kind < Multiplier::kErrors) return d_v((kind - Multiplier::kValues) / 2) + s(kind % 2);
  if (kind < Multiplier::kScores) return e((kind - Multiplier::kErrors) / 2) + d_s(kind % 2);
  if (kind < Multiplier::kGram) return e(kind - Multiplier::kScores);
  return d_v((kind - Multiplier::kGram) / 2) + e(kind % 2);
}

/// Logarithms of a value head, and the largest of every kind of multiplier: one thread a column of V, which needs no other's.
template <int kDimK>
FLASHQLA_DEVICE void load_logs(const ChunkBackwardParams& p, std::int64_t unit, GradientShared<kDimK>& shared) {
  const int v = static_cast<int>(threadIdx.x), warp = v / 32;
  if (warp * 32 >= p.dim_v) return;
  if (v < p.dim_v) {
    const std::int64_t row = unit * 2 * p.dim_v + v, state = (unit * (p.dim_v / 16) + v / 16) * 2;
    for (int half = 0; half < 2; ++half) {
      shared.row_logs[half][v] = p.kept.row_powers[row + half * p.dim_v];
      shared.row_logs[2 + half][v] = p.d_kept.row_powers[row + half * p.dim_v];
      if (v % 16 != 0) continue;
      shared.state_logs[half][v / 16] = p.kept.state_powers[state + half];
      shared.state_logs[2 + half][v / 16] = p.d_kept.state_powers[state + half];
    }
  }
  __syncwarp();  // logarithms of states, from the first of their columns
#pragma unroll
  for (int kind = 0; kind < Multiplier::kCount; ++kind) {
    int most = v < p.dim_v ? multiplier_log(shared, kind, v) : -1000;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
    if (tile::lane_id() == 0) shared.largest_logs[kind][warp] = most;
  }
}
/// The largest logarithm of a kind, after load_logs and a barrier.
template <int kDimK>
FLASHQLA_DEVICE int largest_log(const ChunkBackwardParams& p, const GradientShared<kDimK>& shared, int kind) {
  int most = shared.largest_logs[kind][0];
  for (int w = 1; w * 32 < p.dim_v; ++w) most = max(most, shared.largest_logs[kind][w]);
  return most;
}
/// Multipliers of a slab, one a thread.
template <int kDimK>
FLASHQLA_DEVICE void make_multipliers(const ChunkBackwardParams& p, int first_v, int stage, GradientShared<kDimK>& shared) {
  static_assert(kGradientWarps == Multiplier::kCount && GradientShared<kDimK>::kSlab <= 32);
  const int kind = static_cast<int>(threadIdx.x) / 32, column = static_cast<int>(threadIdx.x) % 32, v = first_v + column;
  if (column >= GradientShared<kDimK>::kSlab || v >= p.dim_v) return;
  shared.multipliers[stage][kind][column] = half_power(multiplier_log(shared, kind, v) - largest_log(p, shared, kind));
}

/// Starts the copies of blocks [outer][tiles] of a slab, `there` of the tiles: the others become zero.
template <int kOuter, int kTiles>
FLASHQLA_DEVICE void copy_blocks(uint4 (&to)[kOuter][kTiles][32], const std::byte* from, std::int64_t outer_blocks,
                                 int outer_there, int there) {
  const std::uint32_t base = ptx::shared_address(to);
  for (int at = static_cast<int>(threadIdx.x); at < kOuter * kTiles * 32; at += kGradientThreads) {
    const int lane = at % 32, t = at / 32 % kTiles, outer = at / 32 / kTiles;
    const bool exists = t < there && outer < outer_there;
    const std::byte* source = exists ? from + ((outer * outer_blocks + t) * 32 + lane) * 16 : from;
    ptx::cp_async_16(base + at * 16, source, exists ? 16 : 0);
  }
}

/// Starts the copies of columns [first_v, first_v + kSlab) of a value head.
template <class Element, int kDimK>
FLASHQLA_DEVICE void load_slab_of_v(const ChunkBackwardParams& p, const PreparedChunk& chunk, std::int32_t head,
                                    std::int64_t unit, int first_v, typename GradientShared<kDimK>::Stage& stage) {
  using Shared = GradientShared<kDimK>;
  using Slab = typename Shared::Slab;
  const Slab tile{ptx::shared_address(stage.d_o)};
  const auto* rows = static_cast<const Element*>(p.d_o.data) + offset_of(p.d_o, chunk.batch, chunk.token, head) + first_v;
  const int columns = p.dim_v - first_v;
  for (int at = static_cast<int>(threadIdx.x); at < kChunkTokens * Slab::kRowPieces; at += kGradientThreads) {
    const int row = at / Slab::kRowPieces, piece = at % Slab::kRowPieces;
    const bool there = row < chunk.tokens && piece * tile::kPieceElements < columns;
    const Element* from = rows + row * p.d_o.stride_token + piece * tile::kPieceElements;
    if (p.aligned != 0) {
      ptx::cp_async_16(tile.piece(row, piece), there ? from : rows, there ? 16 : 0);
    } else {
      auto* const to = reinterpret_cast<std::uint16_t*>(stage.d_o + Slab::offset(row, piece));
      const auto* const elements = reinterpret_cast<const std::uint16_t*>(from);
      for (int i = 0; i < tile::kPieceElements; ++i) to[i] = there ? elements[i] : std::uint16_t{0};
    }
  }
  const int tiles_v = p.dim_v / 16, tiles_k = p.dim_k / 16, first = first_v / 16;
  const std::int64_t rows_at = (unit * kTokenTiles * tiles_v + first) * 512, state_at = (unit * tiles_v + first) * tiles_k * 512;
  copy_blocks(stage.d_v, p.d_kept.rows + rows_at, tiles_v, kTokenTiles, tiles_v - first);
  copy_blocks(stage.errors, p.kept.rows + rows_at, tiles_v, kTokenTiles, tiles_v - first);
  copy_blocks(stage.states, p.kept.states + state_at, tiles_k, tiles_v - first, tiles_k);
  copy_blocks(stage.d_states, p.d_kept.states + state_at, tiles_k, tiles_v - first, tiles_k);
}

}  // namespace flashqla::cuda
