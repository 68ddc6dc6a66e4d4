// states_both_ways for f32: half of the blocks are those of advance_states_f32, which keep the state before every chunk and the
// errors e, the others its mirror image, from the last chunk to the first: the gradient of the state, which they keep after every
// chunk, and dV. Steps of a chunk, as there:
//
//   steps       a stage has                  computes                                         writes
//   K / 64      64 columns of k              de = write_k o (K dS)                            dO to `left`
//   1           scores                       de += scores^T dO                                de to `right`
//   1           solve                        dV = solve^T de                                  dV; read_q o dO to `left`
//   2 x K / 64  64 columns of q; then of k   dS = total dS + Q^T (read_q o dO) - K^T (read_k o dV)  read_k o dV to `right`; dS
#pragma once

#include "cuda/kernels/chunk_backward/params.hpp"
#include "cuda/kernels/chunk_forward/advance_f32.cuh"

namespace flashqla::cuda {

template <int kSlab>
struct RetreatPlan {
  static FLASHQLA_DEVICE int steps(int panels) { return 3 * ((panels + 1) / 2) + 2; }
  static FLASHQLA_DEVICE std::int64_t chunk(std::int64_t turn, std::int64_t chunks) { return chunks - 1 - turn; }

  static FLASHQLA_DEVICE void load(const ChunkForwardParams& p, const AdvanceWork& work, std::int64_t chunk, int panels, int step,
                                   float* stage) {
    const int scores = (panels + 1) / 2, update = step - scores - 2;
    if (step < scores) {
      copy_two_panels<kSlab>(stage, token_rows(p, p.k, work, chunk), 2 * step);
    } else if (update < 0) {
      const int triangle = step == scores ? FloatUnit::kScores : FloatUnit::kSolve;
      tile::copy_triangle<FloatAdvance<kSlab>::kThreads>(stage, float_unit(p, work, chunk) + triangle);
    } else {
      copy_two_panels<kSlab>(stage, token_rows(p, update % 2 == 0 ? p.q : p.k, work, chunk), update / 2 * 2);
    }
  }
};

/// Back: d_values, the gradients of v, from those of o.
struct WalkBack {
  using Params = ChunkBackwardParams;
  static constexpr bool kBack = true, kTakesQueries = true;
  static FLASHQLA_DEVICE const TokenTensor& values(const Params& p) { return p.d_o; }
  static FLASHQLA_DEVICE const TokenTensor* kept(const Params& p) { return &p.d_kept_values; }
  static FLASHQLA_DEVICE const TokenTensor* given(const Params& p) { return p.d_v.data != nullptr ? &p.d_v : nullptr; }

  template <int kSlab>
  static FLASHQLA_DEVICE float take(const Params& p, const WalkedToken& token, float d_o, const WalkedColumn<kSlab>& column) {
    const float read = p.scale * token.factor_q * d_o;
    float dot = 0.0f;
    column.for_each([&](int k, float& s) {
      s = fmaf(token.q[k], read, s);
      dot = fmaf(token.k[k], s, dot);
    });
    const float d_v = token.beta * token.factor_k * block::sum_of_four(dot), taken = -token.factor_k * d_v;
    column.for_each([&](int k, float& s) { s = fmaf(token.k[k], taken, s) * token.decay.near * token.decay.far; });
    return d_v;
  }
};

template <int kSlab>
FLASHQLA_DEVICE void retreat_chunk(const ChunkBackwardParams& p, const AdvanceWork& work, std::int64_t chunk,
                                   const FloatAdvance<kSlab>& shared, FloatSteps<kSlab, RetreatPlan<kSlab>>& steps) {
  using Shared = FloatAdvance<kSlab>;
  constexpr int kStep = 16 * tile::kPanelStride;
  const std::int64_t row = work.rows.begin + work.rows.position(chunk), index = work.rows.first_chunk + chunk;
  const int tokens = work.rows.tokens(chunk), own = Shared::row() * tile::kPanelStride;
  const float* const unit = float_unit(p, work, chunk);
  const bool walked = walk_if_far<kSlab, WalkBack>(p, work, chunk, shared, unit);
  const int stored = walked ? 0 : tokens;
  TokenTile d_o, d_e, d_v;
  load_tokens<kSlab>(p, work, p.d_o, work.rows.batch, row, stored, d_o);
  tile::clear(d_e);
#pragma unroll 1
  for (int panel = 0; panel < shared.panels; panel += 2) {
    const float* const keys = steps.next(p, work, shared) + own;
    tile::multiply_rows<tile::kPanelColumns, kStep>(d_e, keys, shared.state_panel(panel), Shared::kStride);
    if (panel + 1 == shared.panels) continue;
    tile::multiply_rows<tile::kPanelColumns, kStep>(d_e, keys + tile::kPanelFloats, shared.state_panel(panel + 1),
                                                    Shared::kStride);
  }
  scale_tokens<kSlab>(unit + FloatUnit::kWriteK, d_e);
  clear_if(walked, d_e);
  leave_tokens<kSlab>(shared.left, d_o);
  const float* stage = steps.next(p, work, shared);
  tile::multiply_lower_transposed(d_e, stage + Shared::row(), shared.left + Shared::column(), Shared::kStride);
  leave_tokens<kSlab>(shared.right, d_e);
  stage = steps.next(p, work, shared);
  tile::clear(d_v);
  tile::multiply_lower_transposed(d_v, stage + Shared::row(), shared.right + Shared::column(), Shared::kStride);
  store_tokens<kSlab>(p, work, p.d_kept_values, index, 0, walked ? 0 : kChunkTokens, d_v);
  if (p.d_v.data != nullptr) store_tokens<kSlab>(p, work, p.d_v, work.rows.batch, row, stored, d_v);
  scale_tokens<kSlab>(unit + FloatUnit::kReadQ, d_o);
  leave_tokens<kSlab>(shared.left, d_o);
  scale_tokens<kSlab>(unit + FloatUnit::kReadK, d_v);
#pragma unroll
  for (float(&x)[4] : d_v) {
    for (float& element : x) element = -element;
  }
  const StateRowPlace<kSlab> place;
#pragma unroll 1
  for (int panel = 0; panel < shared.panels; panel += 2) {
    float sum[4][4];
    tile::clear(sum);
    stage = steps.next(p, work, shared);
    if (panel == 0) leave_tokens<kSlab>(shared.right, d_v);  // all have read the errors' gradients
    if (panel + place.half < shared.panels) add_updates<kSlab>(place.in(stage), shared.left, sum);
    stage = steps.next(p, work, shared);
    if (panel + place.half >= shared.panels) continue;
    add_updates<kSlab>(place.in(stage), shared.right, sum);
    update_rows<kSlab>(shared, (panel + place.half) * tile::kPanelColumns + place.first, walked ? 1.0f : unit[FloatUnit::kTotal],
                       sum);
  }
}

template <int kSlab>
FLASHQLA_DEVICE void retreat_sequence(const ChunkBackwardParams& p, const AdvanceWork& work, FloatAdvance<kSlab> shared) {
  load_state<kSlab>(p, work, shared, p.d_final_state, p.d_final_state.data != nullptr ? work.sequence : -1);
  FloatSteps<kSlab, RetreatPlan<kSlab>> steps;
  steps.load(p, work, shared);
#pragma unroll 1
  for (std::int64_t chunk = work.rows.chunks() - 1; chunk >= 0; --chunk) {
    store_state<kSlab>(p, work, shared, p.d_kept_states, work.rows.first_chunk + chunk);
    retreat_chunk<kSlab>(p, work, chunk, shared, steps);
  }
  ptx::cp_async_wait<0>();
  if (p.d_initial_state.data != nullptr) store_state<kSlab>(p, work, shared, p.d_initial_state, work.sequence);
}

/// Blocks with even numbers advance states, those with odd ones retreat: neither needs the other's.
template <int kSlab>
__global__ void __launch_bounds__(4 * kSlab) states_both_ways_f32(const __grid_constant__ ChunkBackwardParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  const AdvanceWork work = advance_work<kSlab>(p, blockIdx.x / 2);
  const FloatAdvance<kSlab> shared(memory, p.dim_k);
  if (blockIdx.x % 2 == 0) {
    advance_sequence<kSlab, true>(p, work, {p.initial_state.data != nullptr ? work.sequence : -1, -1, false}, shared);
  } else {
    retreat_sequence<kSlab>(p, work, shared);
  }
}

}  // namespace flashqla::cuda
