// The part of chunk_backward that goes from chunk to chunk, backwards: the mirror image of advance_states, with the same division
// of work, units, roundings and exchanges (chunk_forward/{shared,advance}.cuh). With dS the gradient of the state after the
// chunk:
//
//   de^T = write_k o (dS^T K^T)      [V x 64]      dE^T = de^T solve + (rise o dO^T) answers        dV = strength o dE
//   dS^T = total dS^T - (read_k o dE^T) K + (read_q o dO^T) Q
//
// What answers and solve hold for a token, later tokens of its chunk contribute to: parts wait for those after them.
#pragma once

#include "cuda/kernels/chunk_backward/dots.cuh"
#include "cuda/kernels/chunk_forward/advance_kernel.cuh"

namespace flashqla::cuda {

/// Rows of V of a part's tokens of dO^T, [V x tokens], in the order of two accumulators.
template <class Element, class Values>
FLASHQLA_DEVICE void load_given(const Values& values, const LanePlace& place, int part, tile::Accumulator (&rows)[2]) {
  const tile::FragmentA d = tile::load_c_transposed(values, place.tile * kTileRows, part * kPartTokens);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 upper = ptx::unpack_pair<Element>(d.a[2 * half]), lower = ptx::unpack_pair<Element>(d.a[2 * half + 1]);
    rows[half] = {{upper.x, upper.y, lower.x, lower.y}};
  }
}

/// (read_q o dO)^T of the own tokens for the update of dS, in two parts, for the team. It needs no state.
template <class Element, int kDimK, class Values>
FLASHQLA_DEVICE void leave_given(const Values& values, const std::byte* unit, const LanePlace& place,
                                 ExchangeBothWays<kDimK>& exchange) {
  tile::Accumulator read[2];
  load_given<Element>(values, place, place.part, read);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    scale_columns(read[half], column_factors(unit, ChunkUnit::kReadQ, 2 * place.part + half));
  }
  const tile::FragmentA left = tile::to_a<Element>(read[0], read[1]);
  store_left(exchange.given_left[place.part], left);
  store_left(exchange.given_rest[place.part], tile::rest_of<Element>(read[0], read[1], left));
}

/// d_e = (rise o dO)^T answers, of the own tokens' columns. It needs no state. `rise` is powers of two: exact.
template <class Element, class Values, int kTeamTiles>
FLASHQLA_DEVICE void begin_answers(const Values& values, const std::byte* unit, const LanePlace& place,
                                   tile::Accumulator (&d_e)[kTeamTiles][2]) {
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) tile::clear(d_e[t]);
#pragma unroll
  for (int part = kTeam - 1; part >= 0; --part) {
    if (part < place.part) break;
    tile::WideB b = tile::widen(load_block_turned(unit, ChunkUnit::kAnswers, part, place.part));
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // rows of the block are the part's tokens
      const float2 rise = column_factors(unit, ChunkUnit::kRise, 2 * part + half);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float2& pair = b.b[2 * n + half];
        pair = {pair.x * rise.x, pair.y * rise.y};
      }
    }
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      tile::Accumulator given[2];
      load_given<Element>(values, place.in_tile(t), part, given);
      tile::multiply(d_e[t][0], d_e[t][1], tile::wide_a(given), b);
    }
  }
}

/// Transposed rows of the own tokens to a tensor of f32.
FLASHQLA_DEVICE void store_f32_rows(const ChunkBackwardParams& p, const AdvanceWork& work, const TokenTensor& out,
                                    const LanePlace& place, std::int64_t chunk, const tile::Accumulator (&x)[2]) {
  const int tokens = work.rows.tokens(chunk);
  const std::int64_t first = work.rows.begin + work.rows.position(chunk);
  for (int n = 0; n < 2; ++n) {
    for (int i = 0; i < 4; ++i) {
      const int token = place.part * kPartTokens + 8 * n + place.column + i % 2;
      const int v = work.first_v + place.tile * kTileRows + place.row + i / 2 * 8;
      if (token >= tokens || v >= p.dim_v) continue;
      static_cast<float*>(out.data)[offset_of(out, work.rows.batch, first + token, work.head) + v] = x[n].c[i];
    }
  }
}

/// dE of the own tokens for the gradient products, and dV to the caller's rows: by store(dV) if they are of the inputs' type.
/// With growth dE is 2^h dV (HeadGates): what the decays between tokens make of dV ranges less.
template <class Element, RowsFrom kFrom, class Store>
FLASHQLA_DEVICE void store_value_gradients(const ChunkBackwardParams& p, const AdvanceWork& work, std::int64_t chunk,
                                           const LanePlace& place, const std::byte* unit, tile::Accumulator (&d_e)[2],
                                           const Store& store) {
  keep_rows<Element, false, kFrom>(p.d_kept, p, work, chunk, place, d_e);
  if (p.d_v.data == nullptr) return;
#pragma unroll
  for (int n = 0; n < 2; ++n) scale_columns(d_e[n], column_factors(unit, ChunkUnit::kStrength, 2 * place.part + n));
  if (p.d_v.dtype == DType::f32) {
    store_f32_rows(p, work, p.d_v, place, chunk, d_e);
  } else {
    store(d_e);
  }
}

/// What a chunk that was walked token by token stores.
struct Retreat {
  using Params = ChunkBackwardParams;
  static constexpr bool kBack = true;
  template <class Element>
  static FLASHQLA_DEVICE void finish(const Params& p, const AdvanceWork& work, std::int64_t chunk, const LanePlace& place,
                                     const std::byte* unit, std::byte* memory, tile::Accumulator (&d_e)[2],
                                     const tile::Accumulator (&)[2]) {
    store_value_gradients<Element, RowsFrom::walk>(p, work, chunk, place, unit, d_e, [&](const tile::Accumulator(&d_v)[2]) {
      put_together<Element>(memory, place, d_v);
      store_piece<Element>(p, work, p.d_v, place, chunk, memory);
    });
  }
  static FLASHQLA_DEVICE void projected(const Params& p, const AdvanceWork& work, std::int64_t chunk, const LanePlace& place,
                                        const tile::Accumulator (&products)[2]) {
    dot_rows(p, work, chunk, place, load_errors(p, work, chunk, place), products);
  }
};

template <class Element, int kDimK, int kTeamTiles, class Shared, class LoadNext>
FLASHQLA_DEVICE void retreat_chunk(const ChunkBackwardParams& p, const AdvanceWork& work, std::int32_t chunk,
                                   const typename Shared::Stage& stage, Shared& shared, const LanePlace& place,
                                   const RowWriter<Element, -1>& writer, const LoadNext& load_next,
                                   StatePart<kDimK> (&state)[kTeamTiles]) {
  auto* const exchange = shared.exchange + place.tile;
  const typename Shared::Values values{ptx::shared_address(stage.values)};
  KeptErrors errors[kTeamTiles];
  if constexpr (kKeepsRests<Element>) {
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) errors[t] = load_errors(p, work, chunk, place.in_tile(t));
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) dot_states(p, work, chunk, place.in_tile(t), state[t]);
  }
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
    keep_state<false>(p.d_kept, p, work, chunk, place.in_tile(t), state[t]);
    leave_given<Element>(values, stage.unit, place.in_tile(t), exchange[t]);
  }
  tile::Accumulator de[kTeamTiles][2], d_e[kTeamTiles][2], none[kTeamTiles][2], seen[kTeamTiles][2];
  begin_answers<Element>(values, stage.unit, place, d_e);
  project_tokens<Element, kDimK, false>(stage, exchange, place, state, de, none);
  const Least least = least_of(stage.unit, ChunkUnit::kLeastBack);
  if constexpr (kKeepsRests<Element>) {
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) dot_rows(p, work, chunk, place.in_tile(t), errors[t], de[t]);
  }
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      scale_columns(de[t][n], column_factors(stage.unit, ChunkUnit::kWriteK, 2 * place.part + n));
#pragma unroll
      for (int i = 0; i < 4; ++i) seen[t][n].c[i] = fabsf(de[t][n].c[i]) + fabsf(d_e[t][n].c[i]);
    }
  }
  const unsigned lost =
      solve_part<Element, -1, false, kDigitsOf<Element, true>>(exchange, stage.unit, least, place, state, de, seen, d_e, none);
  load_next();  // by the warps that have had the least to do
  Update own[kTeamTiles];
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
    own[t] = leave_updates<Element, kDimK>(exchange[t], place, stage.unit, ChunkUnit::kReadK, -1.0f, d_e[t]);
  }
  const auto keys = quarter_addresses<kDimK>(stage.keys, place), queries = quarter_addresses<kDimK>(stage.queries, place);
  const auto finish = [&](auto left_out) {
    begin_update<Element>(stage, keys, place, left_out, own, state);
    ptx::named_barrier(place.barrier(2), kTeamThreads);  // updates, for the team
    finish_update<Element>(keys, place, exchange, left_out, state);
    const auto given = [&](int t, int part) -> Update {
      return {stored_left(exchange[t].given_left[part]), stored_left(exchange[t].given_rest[part])};
    };
    add_updates<0, Element>(queries, place, left_out, given, state);
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      if (left_out.has(t)) continue;
      const LanePlace own_place = place.in_tile(t);
      const auto store = [&](const tile::Accumulator(&d_v)[2]) {
        writer.store(p, work, p.d_v, own_place, t, chunk, exchange[t].output[place.part], d_v);
      };
      store_value_gradients<Element, RowsFrom::products>(p, work, chunk, own_place, stage.unit, d_e[t], store);
    }
  };
  if (lost == 0) return finish(TileSet<true>{0});
  finish(TileSet<false>{lost});
  leave_lost(lost, exchange, place, state);
  walk_lost<Element, Shared::kSlab, Retreat>(p, work, chunk, stage, lost, exchange, place, state);
}

template <class Element, int kDimK, class Shared>
FLASHQLA_DEVICE void retreat_sequence(const ChunkBackwardParams& p, const AdvanceWork& work, Shared& shared) {
  using Stage = typename Shared::Stage;
  constexpr int kTeamTiles = Shared::kTeamTiles;
  const LanePlace place = lane_place<kTeamTiles>();
  const std::int64_t read = p.d_final_state.data != nullptr ? work.sequence : -1;
  StatePart<kDimK> state[kTeamTiles];
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) load_state<kDimK>(p, work, place.in_tile(t), p.d_final_state, read, state[t]);
  RowWriter<Element, -1> writer(p, work, p.d_v, place, work.rows.chunks() - 1, Shared::kSlab);
  walk_chunks<Element, -1>(p, work, place, p.d_o, shared, [&](std::int32_t chunk, const Stage& stage, const auto& load_next) {
    retreat_chunk<Element, kDimK>(p, work, chunk, stage, shared, place, writer, load_next, state);
    writer.move();
  });
  if (p.d_initial_state.data == nullptr) return;
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
    store_state<kDimK>(p, work, place.in_tile(t), p.d_initial_state, work.sequence, state[t]);
  }
}

/// Blocks with even numbers advance states, those with odd ones retreat: neither needs the other's. With kKeepsRests a block does
/// both, one after the other.
template <class Element, int kDimK, int kTiles>
__global__ void __launch_bounds__(AdvanceShared<kDimK, kTiles>::kThreads)
    states_both_ways(const __grid_constant__ ChunkBackwardParams p) {
  using Shared = AdvanceShared<kDimK, kTiles, true>;
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  constexpr bool kInTurn = kKeepsRests<Element>;
  const AdvanceWork work = advance_work<Shared::kSlab>(p, kInTurn ? blockIdx.x : blockIdx.x / 2);
  if (kInTurn || blockIdx.x % 2 == 0) {
    const std::int64_t read = p.initial_state.data != nullptr ? work.sequence : -1;
    advance_sequence<Element, kDimK, true>(p, work, read, -1, shared);
  } else {
    retreat_sequence<Element, kDimK>(p, work, shared);
  }
  if constexpr (kInTurn) {
    __syncthreads();  // all have left the stages; and the powers of what was kept, for the warp
    retreat_sequence<Element, kDimK>(p, work, shared);
  }
}

}  // namespace flashqla::cuda
