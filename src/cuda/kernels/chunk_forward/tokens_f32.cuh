// Chunks of f32 that are walked token by token, as recurrent_forward does: where a decay below e^-80, which is no normal f32,
// meets a state (or its gradient) so large that the product is one. Rare. Columns of V are walked or not by 16, whatever the
// slab, and by 64 threads, four a column: lane `part` of them has every fourth row of K of the state, so that no thread needs
// what another writes.
#pragma once

#include "cuda/block/f32.cuh"
#include "cuda/kernels/chunk_forward/shared_f32.cuh"

namespace flashqla::cuda {

/// A thread's part of a column of the state.
template <int kSlab>
struct WalkedColumn {
  int column = static_cast<int>(threadIdx.x) / 4, part = static_cast<int>(threadIdx.x) % 4;
  float* state;
  int dim_k;

  FLASHQLA_DEVICE WalkedColumn(const FloatAdvance<kSlab>& shared, int k) : state(shared.state + column), dim_k(k) {}
  /// Calls body(k, element).
  template <class Body>
  FLASHQLA_DEVICE void for_each(const Body& body) const {
#pragma unroll 4
    for (int k = part; k < dim_k; k += 4) body(k, state[k * FloatAdvance<kSlab>::kStride]);
  }
  /// What L2 normalisation multiplies a row of keys or queries by.
  FLASHQLA_DEVICE float factor(const OperationParams& p, const float* row) const {
    if (p.l2norm_eps < 0.0f) return 1.0f;
    float square = 0.0f;
    for (int k = part; k < dim_k; k += 4) square = fmaf(row[k], row[k], square);
    return 1.0f / sqrtf(block::sum_of_four(square) + p.l2norm_eps);
  }
};

/// A token for a walk.
struct WalkedToken {
  float beta, factor_k, factor_q;
  block::TwoFactors decay;
  const float *k, *q;
};

/// An element of a chunk's rows that exist, 0 elsewhere. `column`: of all V.
FLASHQLA_DEVICE float walked_value(const TokenTensor& x, const AdvanceWork& work, std::int64_t row, int column, int dim_v) {
  return column < dim_v ? static_cast<const float*>(x.data)[offset_of(x, work.rows.batch, row, work.head) + column] : 0.0f;
}
/// One thread of a column stores.
FLASHQLA_DEVICE void store_walked(const TokenTensor& x, const AdvanceWork& work, std::int64_t batch, std::int64_t row, int column,
                                  float value) {
  store_scalar(x.data, x.dtype, offset_of(x, batch, row, work.head) + column, value);
}

/// Forth: o, or with kKeeps e.
template <bool kKeeps>
struct WalkForth {
  using Params = ChunkForwardParams;
  static constexpr bool kBack = false, kTakesQueries = !kKeeps;
  static FLASHQLA_DEVICE const TokenTensor& values(const Params& p) { return p.v; }
  static FLASHQLA_DEVICE const TokenTensor* kept(const Params& p) { return kKeeps ? &p.kept_errors : nullptr; }
  static FLASHQLA_DEVICE const TokenTensor* given(const Params& p) { return kKeeps ? nullptr : &p.o; }

  /// From the token's value to what is stored, over the column's part of the state.
  template <int kSlab>
  static FLASHQLA_DEVICE float take(const Params& p, const WalkedToken& token, float value, const WalkedColumn<kSlab>& column) {
    float dot = 0.0f;
    column.for_each([&](int k, float& s) {
      s = s * token.decay.near * token.decay.far;
      dot = fmaf(token.k[k], s, dot);
    });
    const float e = fmaf(-token.factor_k, block::sum_of_four(dot), value), written = token.beta * token.factor_k * e;
    float read = 0.0f;
    column.for_each([&](int k, float& s) {
      s = fmaf(token.k[k], written, s);
      if (!kKeeps) read = fmaf(token.q[k], s, read);
    });
    return kKeeps ? e : p.scale * token.factor_q * block::sum_of_four(read);
  }
};

template <int kSlab, class Direction>
FLASHQLA_DEVICE void walk_column(const typename Direction::Params& p, const AdvanceWork& work, std::int64_t chunk,
                                 const WalkedColumn<kSlab>& column) {
  const std::int64_t first = work.rows.begin + work.rows.position(chunk), index = work.rows.first_chunk + chunk;
  const int tokens = work.rows.tokens(chunk), lane = static_cast<int>(threadIdx.x) % 32, v = work.first_v + column.column;
  const bool stores = column.part == 0 && v < p.dim_v;
  block::TwoFactors decays[2];
  float betas[2];
  for (int half = 0; half < 2; ++half) {
    const block::TokenGates gates = block::token_gates(p, work.rows.batch, first, work.head, lane + 32 * half, tokens);
    decays[half] = block::token_factors(gates.log_decay);
    betas[half] = gates.beta;
  }
  const tile::GlobalFloats keys = token_rows(p, p.k, work, chunk), queries = token_rows(p, p.q, work, chunk);
#pragma unroll 1
  for (int turn = 0; turn < tokens; ++turn) {
    const int t = Direction::kBack ? tokens - 1 - turn : turn;
    const auto of_lane = [&](float early, float late) { return __shfl_sync(0xffffffffu, t < 32 ? early : late, t % 32); };
    WalkedToken token{of_lane(betas[0], betas[1]),
                      1.0f,
                      1.0f,
                      {of_lane(decays[0].near, decays[1].near), of_lane(decays[0].far, decays[1].far)},
                      keys.first + t * keys.stride,
                      queries.first + t * queries.stride};
    token.factor_k = column.factor(p, token.k);
    if (Direction::kTakesQueries) token.factor_q = column.factor(p, token.q);
    const float x = Direction::take(p, token, walked_value(Direction::values(p), work, first + t, v, p.dim_v), column);
    if (!stores) continue;
    const TokenTensor *const kept = Direction::kept(p), *const given = Direction::given(p);
    if (kept != nullptr) store_walked(*kept, work, index, t, v, x);
    if (given != nullptr) store_walked(*given, work, work.rows.batch, first + t, v, x);
  }
  const TokenTensor* const kept = Direction::kept(p);
  for (int t = tokens; stores && kept != nullptr && t < kChunkTokens; ++t) store_walked(*kept, work, index, t, v, 0.0f);
}

/// Walks the chunk's columns in which anything is larger than `most`, 16 together. Says whether the thread's own of the chunk's
/// steps are among them: these leave them alone. The first step begins with a barrier, for the state.
template <int kSlab, class Direction>
__device__ __noinline__ bool walk_large(const typename Direction::Params& p, const AdvanceWork& work, std::int64_t chunk,
                                        FloatAdvance<kSlab> shared, float most) {
  const WalkedColumn<kSlab> column(shared, p.dim_k);
  const std::int64_t first = work.rows.begin + work.rows.position(chunk);
  const int thread = static_cast<int>(threadIdx.x), tokens = work.rows.tokens(chunk);
  __syncthreads();  // the state, from all threads; all have left the tiles of tokens
  float largest = 0.0f;
  column.for_each([&](int, float& s) { largest = fmaxf(largest, fabsf(s)); });
  for (int t = column.part; t < tokens; t += 4) {
    largest = fmaxf(largest, fabsf(walked_value(Direction::values(p), work, first + t, work.first_v + column.column, p.dim_v)));
  }
  largest = block::warp_largest_positive(largest);
  if (thread % 32 == 0) shared.left[thread / 32] = largest;
  __syncthreads();  // the largest of every warp
  const auto walked = [&](int tile) { return fmaxf(shared.left[2 * tile], shared.left[2 * tile + 1]) > most; };
  const bool own = walked(FloatAdvance<kSlab>::column() / 16);
  if (walked(thread / 64)) walk_column<kSlab, Direction>(p, work, chunk, column);
  return own;
}

/// The same for any chunk of which the unit says so.
template <int kSlab, class Direction>
FLASHQLA_DEVICE bool walk_if_far(const typename Direction::Params& p, const AdvanceWork& work, std::int64_t chunk,
                                 const FloatAdvance<kSlab>& shared, const float* unit) {
  const float most = unit[FloatUnit::kLargest];
  return most < block::kAnySize && walk_large<kSlab, Direction>(p, work, chunk, shared, most);
}

}  // namespace flashqla::cuda
