// advance_states for f32: a block has a sequence, a value head and a slab of V, its state in shared memory and goes from chunk to
// chunk. Everything else comes through two stages of two panels each, so that K may be anything. A chunk takes these steps, each
// after a barrier that says: its stage is full, all have left the other one (which is filled meanwhile), and what the last step
// wrote to shared memory is there.
//
//   steps       a stage has           computes                                       writes
//   K / 32      32 columns of k, q    K S, Q S;  E = v - read_k o (K S)              E to `left`
//   1           solve                 e = solve E                                    e to `right`
//   1           scores                O = read_q o (Q S) + scores e                  o; write_k o e to `left`
//   K / 64      64 columns of k       S = total S + K^T (write_k o e)                the state
//
// For chunk_backward (kKeeps) queries and scores are left out, and e is kept. Thread (r, c) = (thread / (slab / 4), thread %
// (slab / 4)) has tokens r + 16 i, or rows 4 r to 4 r + 3 of 64 of the state, by columns 4 c to 4 c + 3. Every sum has one order,
// whatever the slab. Columns that have been walked (tokens_f32.cuh) go through the steps with E of 0 and are not stored.
#pragma once

#include "cuda/kernels/chunk_forward/tokens_f32.cuh"

namespace flashqla::cuda {

/// Two panels of keys or queries to a stage: of columns from panel `panel` on, or of keys and queries.
template <int kSlab>
FLASHQLA_DEVICE void copy_two_panels(float* stage, const tile::GlobalFloats& rows, int panel) {
  tile::copy_panel<FloatAdvance<kSlab>::kThreads>(stage, rows, panel * tile::kPanelColumns);
  tile::copy_panel<FloatAdvance<kSlab>::kThreads>(stage + tile::kPanelFloats, rows, (panel + 1) * tile::kPanelColumns);
}
template <int kSlab>
FLASHQLA_DEVICE void copy_two_panels(float* stage, const tile::GlobalFloats& rows, const tile::GlobalFloats& others, int panel) {
  tile::copy_panel<FloatAdvance<kSlab>::kThreads>(stage, rows, panel * tile::kPanelColumns);
  tile::copy_panel<FloatAdvance<kSlab>::kThreads>(stage + tile::kPanelFloats, others, panel * tile::kPanelColumns);
}

/// What a chunk's steps bring to their stages.
template <int kSlab, bool kKeeps>
struct AdvancePlan {
  static constexpr int kTriangles = kKeeps ? 1 : 2;
  static FLASHQLA_DEVICE int steps(int panels) { return panels + kTriangles + (panels + 1) / 2; }
  static FLASHQLA_DEVICE std::int64_t chunk(std::int64_t turn, std::int64_t) { return turn; }

  static FLASHQLA_DEVICE void load(const ChunkForwardParams& p, const AdvanceWork& work, std::int64_t chunk, int panels, int step,
                                   float* stage) {
    const int update = panels + kTriangles;
    const tile::GlobalFloats keys = token_rows(p, p.k, work, chunk);
    if (step >= update) {
      copy_two_panels<kSlab>(stage, keys, 2 * (step - update));
    } else if (step >= panels) {
      const int triangle = step == panels ? FloatUnit::kSolve : FloatUnit::kScores;
      tile::copy_triangle<FloatAdvance<kSlab>::kThreads>(stage, float_unit(p, work, chunk) + triangle);
    } else if (kKeeps) {
      tile::copy_panel<FloatAdvance<kSlab>::kThreads>(stage, keys, step * tile::kPanelColumns);
    } else {
      copy_two_panels<kSlab>(stage, keys, token_rows(p, p.q, work, chunk), step);
    }
  }
};

/// The steps of a block, with the copies of the next one on their way.
template <int kSlab, class Plan>
struct FloatSteps {
  using Shared = FloatAdvance<kSlab>;
  std::int64_t chunk = 0;  // of the step that is loaded next, in the order of the plan
  int step = 0, turn = 0;

  FLASHQLA_DEVICE void load(const ChunkForwardParams& p, const AdvanceWork& work, const Shared& shared) {
    const std::int64_t chunks = work.rows.chunks();
    if (chunk < chunks) {
      Plan::load(p, work, Plan::chunk(chunk, chunks), shared.panels, step, shared.stages + turn % 2 * Shared::kStage);
      if (++step == Plan::steps(shared.panels)) {
        step = 0;
        ++chunk;
      }
    }
    ptx::cp_async_commit();
    ++turn;
  }
  /// The stage of the next step; before the first one the caller has called load.
  FLASHQLA_DEVICE const float* next(const ChunkForwardParams& p, const AdvanceWork& work, const Shared& shared) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // as said at the top
    load(p, work, shared);
    return shared.stages + turn % 2 * Shared::kStage;
  }
};

/// Rows of the thread times factors of a chunk's tokens.
template <int kSlab>
FLASHQLA_DEVICE void scale_tokens(const float* factors, TokenTile& x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float factor = factors[FloatAdvance<kSlab>::row() + 16 * i];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[i][j] *= factor;
  }
}

/// A thread's place in two panels of a stage: 4 columns of them are its 4 rows of 64 of the state.
template <int kSlab>
struct StateRowPlace {
  int half = FloatAdvance<kSlab>::row() / 8, first = FloatAdvance<kSlab>::row() % 8 * 4;
  FLASHQLA_DEVICE const float* in(const float* stage) const { return stage + half * tile::kPanelFloats + first; }
};

/// sum += rows^T updates, over the tokens of a chunk.
template <int kSlab>
FLASHQLA_DEVICE void add_updates(const float* rows, const float* updates, float (&sum)[4][4]) {
  using Shared = FloatAdvance<kSlab>;
  tile::multiply_columns<kChunkTokens>(sum, rows, tile::kPanelStride, updates + Shared::column(), Shared::kStride);
}

FLASHQLA_DEVICE void clear_if(bool condition, TokenTile& x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) x[i][j] = condition ? 0.0f : x[i][j];
  }
}

/// S = total S + sum in the thread's rows from `row` on.
template <int kSlab>
FLASHQLA_DEVICE void update_rows(const FloatAdvance<kSlab>& shared, int row, float total, const float (&sum)[4][4]) {
  using Shared = FloatAdvance<kSlab>;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float* const to = shared.state + (row + i) * Shared::kStride + Shared::column();
    const float4 s = tile::load_float4(to);
    const float updated[4] = {fmaf(total, s.x, sum[i][0]), fmaf(total, s.y, sum[i][1]), fmaf(total, s.z, sum[i][2]),
                              fmaf(total, s.w, sum[i][3])};
    tile::store_float4(to, updated);
  }
}

template <int kSlab, bool kKeeps>
FLASHQLA_DEVICE void advance_chunk(const ChunkForwardParams& p, const AdvanceWork& work, std::int64_t chunk,
                                   const FloatAdvance<kSlab>& shared, FloatSteps<kSlab, AdvancePlan<kSlab, kKeeps>>& steps) {
  using Shared = FloatAdvance<kSlab>;
  constexpr int kStep = 16 * tile::kPanelStride, kRows = kKeeps ? 4 : 8;  // tokens of keys, then of queries
  const std::int64_t row = work.rows.begin + work.rows.position(chunk), index = work.rows.first_chunk + chunk;
  const int tokens = work.rows.tokens(chunk), own = Shared::row() * tile::kPanelStride;
  const float* const unit = float_unit(p, work, chunk);
  const bool walked = walk_if_far<kSlab, WalkForth<kKeeps>>(p, work, chunk, shared, unit);
  TokenTile e;
  load_tokens<kSlab>(p, work, p.v, work.rows.batch, row, tokens, e);
  float projected[kRows][4];
  tile::clear(projected);
#pragma unroll 1
  for (int panel = 0; panel < shared.panels; ++panel) {
    tile::multiply_rows<tile::kPanelColumns, kStep>(projected, steps.next(p, work, shared) + own, shared.state_panel(panel),
                                                    Shared::kStride);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float factor = unit[FloatUnit::kReadK + Shared::row() + 16 * i];
#pragma unroll
    for (int j = 0; j < 4; ++j) e[i][j] = fmaf(-factor, projected[i][j], e[i][j]);
  }
  clear_if(walked, e);
  leave_tokens<kSlab>(shared.left, e);
  const float* stage = steps.next(p, work, shared);
  tile::clear(e);
  tile::multiply_lower(e, stage + own, shared.left + Shared::column(), Shared::kStride);
  if constexpr (kKeeps) {
    store_tokens<kSlab>(p, work, p.kept_errors, index, 0, walked ? 0 : kChunkTokens, e);
    scale_tokens<kSlab>(unit + FloatUnit::kWriteK, e);
    leave_tokens<kSlab>(shared.right, e);
  } else {
    leave_tokens<kSlab>(shared.right, e);
    stage = steps.next(p, work, shared);
    scale_tokens<kSlab>(unit + FloatUnit::kWriteK, e);
    leave_tokens<kSlab>(shared.left, e);
    TokenTile o;
    tile::clear(o);
    tile::multiply_lower(o, stage + own, shared.right + Shared::column(), Shared::kStride);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float factor = unit[FloatUnit::kReadQ + Shared::row() + 16 * i];
#pragma unroll
      for (int j = 0; j < 4; ++j) o[i][j] = fmaf(factor, projected[4 + i][j], o[i][j]);
    }
    store_tokens<kSlab>(p, work, p.o, work.rows.batch, row, walked ? 0 : tokens, o);
  }
  const StateRowPlace<kSlab> place;
#pragma unroll 1
  for (int panel = 0; panel < shared.panels; panel += 2) {
    stage = steps.next(p, work, shared);
    if (panel + place.half >= shared.panels) continue;
    float sum[4][4];
    tile::clear(sum);
    add_updates<kSlab>(place.in(stage), kKeeps ? shared.right : shared.left, sum);
    update_rows<kSlab>(shared, (panel + place.half) * tile::kPanelColumns + place.first, walked ? 1.0f : unit[FloatUnit::kTotal],
                       sum);
  }
}

template <int kSlab, bool kKeeps>
FLASHQLA_DEVICE void advance_sequence(const ChunkForwardParams& p, const AdvanceWork& work, const StateRows& rows,
                                      FloatAdvance<kSlab> shared) {
  load_state<kSlab>(p, work, shared, p.initial_state, rows.read);
  StateStore stored(p, work);
  const auto save = [&](const StateTensor& to, std::int64_t row) { store_state<kSlab>(p, work, shared, to, row); };
  FloatSteps<kSlab, AdvancePlan<kSlab, kKeeps>> steps;
  steps.load(p, work, shared);
#pragma unroll 1
  for (std::int64_t chunk = 0; chunk < work.rows.chunks(); ++chunk) {
    if constexpr (kKeeps) {
      save(p.kept_states, work.rows.first_chunk + chunk);
    } else {
      stored.before(p, save);
    }
    advance_chunk<kSlab, kKeeps>(p, work, chunk, shared, steps);
    if constexpr (!kKeeps) stored.after(p, work, chunk, save);
  }
  ptx::cp_async_wait<0>();
  if constexpr (!kKeeps) store_state<kSlab>(p, work, shared, p.final_state, rows.write);
}

template <int kSlab>
__global__ void __launch_bounds__(4 * kSlab) advance_states_f32(const __grid_constant__ ChunkForwardParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  const AdvanceWork work = advance_work<kSlab>(p, blockIdx.x);
  const StateRows rows = state_rows(p, work);
  if (rows.padding) return zero_output<kSlab>(p, work);
  advance_sequence<kSlab, false>(p, work, rows, FloatAdvance<kSlab>(memory, p.dim_k));
}

}  // namespace flashqla::cuda
