// What chunk_gradients brings to shared memory beside the stages: keys and queries once, and of value heads gates and powers.
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

/// Starts the copies of keys and queries, as one group of cp.async.
template <class Element, int kDimK>
FLASHQLA_DEVICE void start_gradient_rows(const ChunkBackwardParams& p, const PreparedChunk& chunk,
                                         GradientShared<kDimK>& shared) {
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
}
/// Waits for them, with the first steps of the ring under way behind them.
template <class Element, int kDimK>
FLASHQLA_DEVICE void finish_gradient_rows(const ChunkBackwardParams& p, const PreparedChunk& chunk, const GradientRing& ring,
                                          GradientShared<kDimK>& shared) {
  if (ring.depth == 4) {
    ptx::cp_async_wait<3>();
  } else if (ring.depth == 2) {
    ptx::cp_async_wait<1>();
  } else {
    ptx::cp_async_wait<0>();
  }
  __syncthreads();  // rows, for the threads that convert them
  convert_rows<Element, kDimK>(p, chunk, 0, shared);
  convert_rows<Element, kDimK>(p, chunk, 1, shared);
}

/// Gates of a value head's tokens from what prepare_chunks has left, by 192 threads.
FLASHQLA_DEVICE void load_head_gates(const ChunkBackwardParams& p, std::int64_t unit, int thread, ValueHead& to) {
  const KeptGates& kept = p.kept.gates[unit];
  const int token = thread % kChunkTokens;
  if (thread == 0) to.walked = 0;
  if (thread < kChunkTokens) {
    const block::TwoFloats sum{kept.high[token], kept.low[token]}, all{kept.high[kChunkTokens - 1], kept.low[kChunkTokens - 1]};
    const float high = 0.5f * sum.high, low = 0.5f * sum.low;
    to.high[token] = high;
    to.low[token] = low;
    to.decay[token] = exp2f(high) * exp2f(low);
    to.rest[token] = block::exp2_difference({0.5f * all.high, 0.5f * all.low}, {high, low});
  } else if (thread < 2 * kChunkTokens) {
    to.beta[token] = kept.beta[token];
  } else {
    const float fall = reinterpret_cast<const float*>(p.units + unit * ChunkUnit::kBytes + ChunkUnit::kStrength)[token];
    to.fall[token] = fall;
    to.rise[token] = block::inverse_power(fall);
  }
}

/// Powers of two above the rows of dO: eight threads a row.
template <class Element>
FLASHQLA_DEVICE void find_gradient_powers(const ChunkBackwardParams& p, const PreparedChunk& chunk, std::int32_t head,
                                          ValueHead& to) {
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
  if (lane == 0) to.d_o_powers[row] = row_power<Element>(largest);
}

/// Logarithm number `number` of a value head; -1000 past the last tile of V.
FLASHQLA_DEVICE void load_log(const ChunkBackwardParams& p, std::int64_t unit, int number, ValueHead& to) {
  const int kind = number / kMostTilesOfV, t = number % kMostTilesOfV, part = kind % kTeam, tiles = p.dim_v / 16;
  int log = -1000;
  if (t < tiles) {
    const KeptChunks& kept = kind / kTeam % 2 == 0 ? p.kept : p.d_kept;
    log = kind < KeptLogs::kStates ? kept.row_powers[(unit * kTeam + part) * tiles + t]
                                   : kept.state_powers[(unit * tiles + t) * kTeam + part];
  }
  to.logs[kind][t] = static_cast<std::int16_t>(log);
}

/// Everything of `count` value heads from `first` on. A barrier before it: all have left the last ones'; and after it.
template <class Element, int kDimK>
FLASHQLA_DEVICE void load_heads(const ChunkBackwardParams& p, const PreparedChunk& chunk, std::int32_t first, std::int32_t count,
                                GradientShared<kDimK>& shared) {
  constexpr int kLogs = KeptLogs::kCount * kMostTilesOfV, kGates = 3 * kChunkTokens, kTogether = kGradientThreads / kGates;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t unit = chunk.index * p.heads_v + first;
  for (int at = thread; at < count * kLogs; at += kGradientThreads) {
    load_log(p, unit + at / kLogs, at % kLogs, shared.heads[at / kLogs]);
  }
  for (std::int32_t h = thread / kGates; h < count && thread < kTogether * kGates; h += kTogether) {
    load_head_gates(p, unit + h, thread % kGates, shared.heads[h]);
  }
  for (std::int32_t h = 0; h < count; ++h) find_gradient_powers<Element>(p, chunk, first + h, shared.heads[h]);
}

}  // namespace flashqla::cuda
