// The part of chunk_backward that goes from chunk to chunk, backwards: the mirror image of advance_states, with the same division
// of work, units, roundings and exchanges (chunk_forward/{shared,advance}.cuh). With dS the gradient of the state after the
// chunk:
//
//   de^T = write_k o (dS^T K^T) + (rise o dO^T) scores         [V x 64]      dE^T = de^T solve        dV = strength o dE
//   dS^T = total dS^T - (read_k o dE^T) K + (read_q o dO^T) Q
//
// What scores and solve hold for a token, later tokens of its chunk contribute to: parts wait for those after them.
#pragma once

#include "cuda/kernels/chunk_backward/dots.cuh"
#include "cuda/kernels/chunk_forward/advance_kernel.cuh"

namespace flashqla::cuda {

/// The block of a triangle as B[i][j].
FLASHQLA_DEVICE tile::FragmentB load_block_turned(const std::byte* unit, int triangle, int block_i, int block_j) {
  const tile::FragmentB b = load_block(unit, triangle, block_i, block_j);
  return {
      {ptx::movmatrix_trans(b.b[0]), ptx::movmatrix_trans(b.b[2]), ptx::movmatrix_trans(b.b[1]), ptx::movmatrix_trans(b.b[3])}};
}

/// Where a lane's 16 bytes of a left operand made of a part's dO lie: where that dO was.
template <class Values>
FLASHQLA_DEVICE uint4& given_place(std::byte* values, const LanePlace& place, int part) {
  const int lane = tile::lane_id(), row = part * kPartTokens + lane % kPartTokens;
  return *reinterpret_cast<uint4*>(values + Values::offset(row, 2 * place.tile + lane / kPartTokens));
}

/// What the own tokens' dO gives, for the team: (rise o dO)^T for the products with scores, its rows divided by their scales; and
/// (read_q o dO)^T for the update of dS, in two parts. It needs no state.
template <class Element, int kDimK, class Values>
FLASHQLA_DEVICE void leave_given(std::byte* values, const std::byte* unit, const LanePlace& place,
                                 ExchangeBothWays<kDimK>& exchange) {
  const tile::FragmentA d =
      tile::load_c_transposed(Values{ptx::shared_address(values)}, place.tile * kTileRows, place.part * kPartTokens);
  tile::Accumulator risen[2], read[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 upper = ptx::unpack_pair<Element>(d.a[2 * half]), lower = ptx::unpack_pair<Element>(d.a[2 * half + 1]);
    risen[half] = read[half] = {{upper.x, upper.y, lower.x, lower.y}};
    scale_columns(risen[half], column_factors(unit, ChunkUnit::kRise, 2 * place.part + half));
    scale_columns(read[half], column_factors(unit, ChunkUnit::kReadQ, 2 * place.part + half));
  }
  float scale[2];
  scales_of_rows(risen, scale);
  const tile::FragmentA given = pack_rows(scale, risen);
  __syncwarp();  // all lanes have dO, whose place this takes
  given_place<Values>(values, place, place.part) = {given.a[0], given.a[1], given.a[2], given.a[3]};
  leave_scales(exchange.given_scales[place.part], scale);
  const tile::FragmentA left = tile::to_a<Element>(read[0], read[1]);
  store_left(exchange.given_left[place.part], left);
  store_left(exchange.given_rest[place.part], tile::rest_of<Element>(read[0], read[1], left));
}

/// de, which holds dS^T K^T, becomes write_k o that + (rise o dO^T) scores, of the own tokens' columns.
template <class Values, int kTeamTiles, class Team>
FLASHQLA_DEVICE void take_scores(std::byte* values, const std::byte* unit, const Team* exchange, const LanePlace& place,
                                 tile::Accumulator (&de)[kTeamTiles][2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 factors = column_factors(unit, ChunkUnit::kWriteK, 2 * place.part + half);
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) scale_columns(de[t][half], factors);
  }
#pragma unroll
  for (int part = kTeam - 1; part >= 0; --part) {
    if (part < place.part) break;
    const tile::FragmentB b = load_block_turned(unit, ChunkUnit::kScores, part, place.part);
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      float scale[2];
      take_scales(exchange[t].given_scales[part], scale);
      const uint4 given = given_place<Values>(values, place.in_tile(t), part);
      add_product({{given.x, given.y, given.z, given.w}}, b, scale, de[t]);
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

/// dE of the own tokens for the gradient products, and dV to the caller's rows. With growth dE is 2^h dV (HeadGates): what the
/// decays between tokens make of dV ranges less.
template <class Element>
FLASHQLA_DEVICE void store_value_gradients(const ChunkBackwardParams& p, const AdvanceWork& work, std::int64_t chunk,
                                           const LanePlace& place, const std::byte* unit, std::byte* memory,
                                           tile::Accumulator (&d_e)[2]) {
  float scale[2];
  scales_of_rows(d_e, scale);
  keep_rows<false>(p.d_kept, p, work, chunk, place, pack_rows(scale, d_e), scale, d_e);
  if (p.d_v.data == nullptr) return;
#pragma unroll
  for (int n = 0; n < 2; ++n) scale_columns(d_e[n], column_factors(unit, ChunkUnit::kStrength, 2 * place.part + n));
  if (p.d_v.dtype == DType::f32) {
    store_f32_rows(p, work, p.d_v, place, chunk, d_e);
  } else {
    store_rows<Element>(p, work, p.d_v, place, chunk, memory, d_e);
  }
}

/// What a chunk that was walked token by token stores.
struct Retreat {
  using Params = ChunkBackwardParams;
  static constexpr bool kBack = true;
  /// From the caller's rows: what the stage had has given way (leave_given).
  template <class Element, int kSlab>
  static FLASHQLA_DEVICE float value(const Params& p, const AdvanceWork& work, std::int64_t chunk, const std::byte*, int token,
                                     int column) {
    const int v = work.first_v + column;
    if (token >= work.rows.tokens(chunk) || v >= p.dim_v) return 0.0f;
    const std::int64_t row = work.rows.begin + work.rows.position(chunk) + token;
    return load_scalar(p.d_o.data, p.d_o.dtype, offset_of(p.d_o, work.rows.batch, row, work.head) + v);
  }
  template <class Element>
  static FLASHQLA_DEVICE void finish(const Params& p, const AdvanceWork& work, std::int64_t chunk, const LanePlace& place,
                                     const std::byte* unit, std::byte* memory, tile::Accumulator (&d_e)[2],
                                     const tile::Accumulator (&)[2]) {
    store_value_gradients<Element>(p, work, chunk, place, unit, memory, d_e);
  }
  static FLASHQLA_DEVICE void projected(const Params& p, const AdvanceWork& work, std::int64_t chunk, const LanePlace& place,
                                        const tile::Accumulator (&products)[2]) {
    dot_rows(p, work, chunk, place, load_errors(p, work, chunk, place), products);
  }
};

template <class Element, int kDimK, int kTeamTiles, class Shared>
FLASHQLA_DEVICE void retreat_chunk(const ChunkBackwardParams& p, const AdvanceWork& work, std::int64_t chunk,
                                   typename Shared::Stage& stage, Shared& shared, const LanePlace& place,
                                   StatePart<kDimK> (&state)[kTeamTiles]) {
  using Values = typename Shared::Values;
  auto* const exchange = shared.exchange + place.tile;
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
    leave_given<Element, kDimK, Values>(stage.values, stage.unit, place.in_tile(t), exchange[t]);
  }
  tile::Accumulator de[kTeamTiles][2], d_e[kTeamTiles][2], none[kTeamTiles][2];
  project_tokens<Element, kDimK, false>(stage, exchange, place, state, de, none);
  if constexpr (kKeepsRests<Element>) {
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) dot_rows(p, work, chunk, place.in_tile(t), errors[t], de[t]);
  }
  take_scores<Values>(stage.values, stage.unit, exchange, place, de);
  float scale[kTeamTiles][2];
  const auto solve = [&](int part) { return load_block_turned(stage.unit, ChunkUnit::kSolve, part, place.part); };
  const unsigned lost = solve_part<Element, -1>(exchange, stage.unit, place, state, de, solve, d_e, scale);
#pragma unroll
  for (int t = 0; t < kTeamTiles; ++t) {
    leave_updates<Element, kDimK>(exchange[t], place, stage.unit, ChunkUnit::kReadK, -1.0f, d_e[t]);
  }
  ptx::named_barrier(place.barrier(2), kTeamThreads);  // updates, for the team
  const auto finish = [&](auto left_out) {
    update_with_keys<Element>(stage, place, exchange, left_out, state);
    update_state<Element>(
        QuarterAddresses<kDimK>(typename Shared::Rows{ptx::shared_address(stage.queries)}, place), left_out,
        [&](int t, int part) { return stored_left(exchange[t].given_left[part]); },
        [&](int t, int part) { return stored_left(exchange[t].given_rest[part]); }, state);
#pragma unroll
    for (int t = 0; t < kTeamTiles; ++t) {
      if (left_out.has(t)) continue;
      store_value_gradients<Element>(p, work, chunk, place.in_tile(t), stage.unit, exchange[t].output[place.part], d_e[t]);
    }
  };
  if (lost == 0) return finish(TileSet<true>{0});
  leave_lost(lost, exchange, place, state);
  finish(TileSet<false>{lost});
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
  walk_chunks<Element, -1>(p, work, p.d_o, shared, [&](std::int64_t chunk, Stage& stage) {
    retreat_chunk<Element, kDimK>(p, work, chunk, stage, shared, place, state);
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
