// The kernel around gradient_*.cuh: gradients of q, k, g and beta from what states_both_ways has kept. With S
// the state before the chunk and dS the gradient of the one after it:
//
//   dP_ij = scale Gam_ij beta_j (dO_i.e_j)  (i >= j)          dKK_ij = -Gam_ij beta_j (dV_i.e_j)  (i > j)
//   dQ = scale decay o (dO S^T) + dP K
//   dK = -decay o (dV S^T) + dKK K + dP^T Q + dKK^T K + rest o beta o (e dS^T)
//
// summed over the value heads of the group in the registers. Barriers are the block's: each says what is written before it for
// whom.
#pragma once

#include "cuda/kernels/chunk_backward/gradient_gates.cuh"

namespace flashqla::cuda {

template <int kDimK>
struct RowGradients {
  tile::Accumulator query[HeadProducts<kDimK>::kCount], key[HeadProducts<kDimK>::kCount];
};

/// All slabs of a value head. The first one's copies are under way.
template <class Element, int kDimK>
FLASHQLA_DEVICE void multiply_slabs(const ChunkBackwardParams& p, const PreparedChunk& chunk, std::int32_t head,
                                    std::int64_t unit, const GradientPlace& place, GradientShared<kDimK>& shared,
                                    HeadProducts<kDimK>& sums) {
  using Shared = GradientShared<kDimK>;
  float inverse[2];
  __syncthreads();  // logarithms, for multipliers
  for (int slab = 0; slab * Shared::kSlab < p.dim_v; ++slab) {
    make_multipliers(p, slab * Shared::kSlab, slab % Shared::kStages, shared);
    ptx::cp_async_wait<0>();
    __syncthreads();  // this slab, gates and multipliers, from all; and all have left the other stage
    const int next = (slab + 1) * Shared::kSlab;
    if (Shared::kStages == 2 && next < p.dim_v) {
      load_slab_of_v<Element, kDimK>(p, chunk, head, unit, next, shared.stages[(slab + 1) % Shared::kStages]);
      ptx::cp_async_commit();
    }
    for (int upper = 0; upper < 2; ++upper) inverse[upper] = block::inverse_power(shared.d_o_powers[place.token(upper)]);
    multiply_slab<Element, kDimK>(shared, slab % Shared::kStages, slab * Shared::kSlab, p.dim_v - slab * Shared::kSlab, place,
                                  inverse, sums);
    if (Shared::kStages == 1 && next < p.dim_v) {
      __syncthreads();  // all have left the only stage
      load_slab_of_v<Element, kDimK>(p, chunk, head, unit, next, shared.stages[0]);
      ptx::cp_async_commit();
    }
  }
}

/// Products with the states to the gradients, with their factors; row dots with q and k for the gates.
template <int kDimK>
FLASHQLA_DEVICE void take_states(const ChunkBackwardParams& p, const GradientShared<kDimK>& shared, const GradientPlace& place,
                                 HeadProducts<kDimK>& sums, RowGradients<kDimK>& gradients, float (&dots)[3][2]) {
  const int ih = place.row_half(), kh = place.half_of_k();
  const TwoPowers query = two_powers(largest_log(p, shared, Multiplier::kState + kh)),
                  key = two_powers(largest_log(p, shared, Multiplier::kValues + 2 * ih + kh)),
                  write = two_powers(largest_log(p, shared, Multiplier::kErrors + 2 * ih + kh));
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int token = place.token(upper);
    const float decay = shared.decay[token], beta = shared.beta[token], rest = shared.rest[token] * shared.rise[token];
    const float read = p.scale * decay * shared.d_o_powers[token], back = -decay * shared.fall[token];
    float of_query = 0.0f, of_key = 0.0f, of_write = 0.0f;
#pragma unroll
    for (int n = 0; n < HeadProducts<kDimK>::kCount; ++n) {
      const float2 q = row_pair<kDimK>(shared.rows[1], place, token, n), k = row_pair<kDimK>(shared.rows[0], place, token, n);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int at = 2 * upper + c;
        const float x = times(sums.query[n].c[at], query) * read, y = times(sums.key[n].c[at], key) * back,
                    z = times(sums.write[n].c[at], write) * rest, own_k = c == 0 ? k.x : k.y;
        gradients.query[n].c[at] += x;
        gradients.key[n].c[at] += fmaf(beta, z, y);
        of_query = fmaf(c == 0 ? q.x : q.y, x, of_query);
        of_key = fmaf(own_k, y, of_key);
        of_write = fmaf(own_k, z, of_write);
      }
    }
    dots[0][upper] = row_total(of_query) * shared.factors[1][token];
    dots[1][upper] = row_total(of_key) * shared.factors[0][token];
    dots[2][upper] = row_total(of_write) * shared.factors[0][token];
  }
}

/// Calls body(at, x, factor of the key of x's column, factor of x's row) for every element of a block of the warp's dP or dKK.
template <int kDimK, class Body>
FLASHQLA_DEVICE void for_each_pair(const GradientShared<kDimK>& shared, const GradientPlace& place, int block,
                                   const tile::Accumulator (&pairs)[4], const Body& body) {
#pragma unroll
  for (int at = 0; at < 8; ++at) {
    const int j = 32 * place.column_half() + 16 * block + at / 4 * 8 + place.pair + at % 2, i = place.token(at % 4 / 2);
    body(at, pairs[2 * block + at / 4].c[at % 4], shared.factors[0][j], shared.factors[place.gram() ? 0 : 1][i]);
  }
}

/// The largest element of both kinds of triangles that the warp will leave, for all.
template <int kDimK>
FLASHQLA_DEVICE void leave_maxima(GradientShared<kDimK>& shared, const GradientPlace& place,
                                  const tile::Accumulator (&pairs)[4]) {
  float largest[2] = {0.0f, 0.0f};
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    for_each_pair<kDimK>(shared, place, block, pairs, [&](int, float x, float of_column, float of_row) {
      largest[0] = fmaxf(largest[0], fabsf(x * of_column));
      largest[1] = fmaxf(largest[1], fabsf(x * of_row));
    });
  }
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    largest[kind] = block::warp_largest(largest[kind]);
    if (tile::lane_id() == 0) shared.maxima[kind][place.warp] = largest[kind];
  }
}

/// dP or dKK of the warp as left operands, divided by `powers`: by rows with the factors of the columns, and transposed with
/// those of the rows.
template <int kDimK>
FLASHQLA_DEVICE void leave_triangles(GradientShared<kDimK>& shared, const GradientPlace& place, const float (&powers)[2],
                                     const tile::Accumulator (&pairs)[4]) {
  const int lane = tile::lane_id();
  const float inverse[2] = {block::inverse_power(powers[0]), block::inverse_power(powers[1])};
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const int of_j = 2 * place.column_half() + block;
    if (of_j > place.tile) break;
    tile::Accumulator by_rows[2], turned[2];
    for_each_pair<kDimK>(shared, place, block, pairs, [&](int at, float x, float of_column, float of_row) {
      by_rows[at / 4].c[at % 4] = x * of_column * inverse[0];
      turned[at / 4].c[at % 4] = x * of_row * inverse[1];
    });
    const int number = triangle_block(place.tile, of_j);
    const tile::FragmentA a = tile::to_a<ptx::F16>(by_rows[0], by_rows[1]), b = tile::to_a<ptx::F16>(turned[0], turned[1]);
    shared.end.triangles[place.gram()][number][lane] = {a.a[0], a.a[1], a.a[2], a.a[3]};
    shared.end.turned[place.gram()][number][lane] = {ptx::movmatrix_trans(b.a[0]), ptx::movmatrix_trans(b.a[2]),
                                                     ptx::movmatrix_trans(b.a[1]), ptx::movmatrix_trans(b.a[3])};
  }
}

/// What the warp leaves for others: its part of dP or dKK, and its sums.
template <int kDimK>
FLASHQLA_DEVICE void leave_head(GradientShared<kDimK>& shared, const GradientPlace& place, const float (&powers)[2],
                                const tile::Accumulator (&pairs)[4], const tile::Accumulator (&flow)[4],
                                const float (&dots)[3][2], const float (&diagonal)[2]) {
  GateSums& sums = shared.end.sums;
  if (place.has_pairs()) {
    leave_triangles<kDimK>(shared, place, powers, pairs);
    sum_pairs<kDimK>(shared, place, flow, sums);
  }
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int token = place.token(upper), j = 32 * place.column_half();
    // The lane that has the diagonal's element of its row.
    if (place.gram() && place.has_pairs() && token / 32 * 32 == j && token % 8 / 2 * 2 == place.pair) {
      sums.diagonal[token] = diagonal[upper];
    }
    if (place.pair != 0) continue;
    sums.query[place.group][token] = dots[0][upper];
    sums.key[place.group][token] = dots[1][upper];
    sums.write[place.group][token] = dots[2][upper];
  }
}

/// dP K, dP^T Q, dKK K and dKK^T K to the gradients. `powers`: of dP and dKK, by rows and transposed.
template <int kDimK>
FLASHQLA_DEVICE void add_pairs(const GradientShared<kDimK>& shared, const GradientPlace& place, const float (&powers)[2][2],
                               RowGradients<kDimK>& gradients) {
  constexpr int kCount = HeadProducts<kDimK>::kCount;
  tile::Accumulator sum[kCount];
  const auto add = [&](tile::Accumulator(&to)[kCount], float power) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      for (int i = 0; i < 4; ++i) to[n].c[i] = fmaf(power, sum[n].c[i], to[n].c[i]);
    }
    tile::clear(sum);
  };
  tile::clear(sum);
  multiply_triangle_rows<kDimK, false>(shared.end.triangles[0], shared.rows[0], place, sum);
  add(gradients.query, powers[0][0]);
  multiply_triangle_rows<kDimK, true>(shared.end.turned[0], shared.rows[1], place, sum);
  add(gradients.key, powers[0][1]);
  multiply_triangle_rows<kDimK, false>(shared.end.triangles[1], shared.rows[0], place, sum);
  add(gradients.key, powers[1][0]);
  multiply_triangle_rows<kDimK, true>(shared.end.turned[1], shared.rows[0], place, sum);
  add(gradients.key, powers[1][1]);
}

/// Powers of two above the largest of dP and of dKK, of both kinds of triangles, from every warp's largest.
template <int kDimK>
FLASHQLA_DEVICE void pair_powers(const GradientShared<kDimK>& shared, float (&powers)[2][2]) {
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    float most[2] = {0.0f, 0.0f};
#pragma unroll
    for (int warp = 0; warp < kGradientWarps; ++warp) {
      const int gram = (warp + warp / 4) % kGroups / 2;  // gradient_place
      most[gram] = fmaxf(most[gram], shared.maxima[kind][warp]);
    }
    for (int gram = 0; gram < 2; ++gram) powers[gram][kind] = block::power_above(most[gram]);
  }
}

template <class Element, int kDimK>
FLASHQLA_DEVICE void add_value_head(const ChunkBackwardParams& p, const PreparedChunk& chunk, std::int32_t head,
                                    const GradientPlace& place, GradientShared<kDimK>& shared, RowGradients<kDimK>& gradients) {
  const std::int64_t unit = chunk.index * p.heads_v + head;
  __syncthreads();  // rows, from all; all have left the last head's stages, gates and sums
  load_slab_of_v<Element, kDimK>(p, chunk, head, unit, 0, shared.stages[0]);
  ptx::cp_async_commit();
  if (place.warp == 0) load_head_gates<kDimK>(p, chunk, head, shared);
  find_gradient_powers<Element, kDimK>(p, chunk, head, shared);
  load_logs<kDimK>(p, unit, shared);
  HeadProducts<kDimK> sums;
  tile::clear(sums.query);
  tile::clear(sums.key);
  tile::clear(sums.write);
  tile::clear(sums.pairs);
  sums.state_dot = 0.0f;
  multiply_slabs<Element, kDimK>(p, chunk, head, unit, place, shared, sums);

  float dots[3][2], diagonal[2] = {0.0f, 0.0f};
  take_states<kDimK>(p, shared, place, sums, gradients, dots);
  const float state_dot = block::warp_total(sums.state_dot);
  tile::Accumulator flow[4];
  multiply_rows<kDimK>(shared, place, flow);
  const int kind =
      place.gram() ? Multiplier::kGram + 2 * place.row_half() + place.column_half() : Multiplier::kScores + place.column_half();
  take_pairs<kDimK>(shared, place, p.scale, largest_log(p, shared, kind), diagonal, sums.pairs, flow);
  leave_maxima<kDimK>(shared, place, sums.pairs);
  if (tile::lane_id() == 0) shared.state_dots[place.warp] = state_dot;
  __syncthreads();  // the largest elements; and all have left the stages
  float powers[2][2];
  pair_powers<kDimK>(shared, powers);
  leave_head<kDimK>(shared, place, place.gram() ? powers[1] : powers[0], sums.pairs, flow, dots, diagonal);
  __syncthreads();  // triangles, for all; sums, for warp 0
  if (place.warp == 0) finish_gates<kDimK>(p, chunk, head, unit, shared);
  add_pairs<kDimK>(shared, place, powers, gradients);
}

FLASHQLA_DEVICE void store_pair(const TokenTensor& x, std::int64_t at, float first, float second) {
  store_scalar(x.data, x.dtype, at, first);
  store_scalar(x.data, x.dtype, at + 1, second);
}

/// Gradients of q and k as given, past L2 normalisation, to the caller's rows.
template <int kDimK>
FLASHQLA_DEVICE void store_row_gradients(const ChunkBackwardParams& p, const PreparedChunk& chunk, const GradientPlace& place,
                                         GradientShared<kDimK>& shared, RowGradients<kDimK>& gradients) {
  constexpr int kCount = HeadProducts<kDimK>::kCount;
  for (int which = 0; which < 2; ++which) {
    const tile::Accumulator(&x)[kCount] = which == 0 ? gradients.key : gradients.query;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      float dot = 0.0f;
      for (int n = 0; n < kCount; ++n) {
        const float2 row = row_pair<kDimK>(shared.rows[which], place, place.token(upper), n);
        dot = fmaf(row.x, x[n].c[2 * upper], fmaf(row.y, x[n].c[2 * upper + 1], dot));
      }
      dot = row_total(dot);
      if (place.pair == 0) shared.row_dots[which][place.group][place.token(upper)] = dot;
    }
  }
  __syncthreads();  // row dots over quarters of K, for all
  for (int which = 0; which < 2; ++which) {
    const tile::Accumulator(&x)[kCount] = which == 0 ? gradients.key : gradients.query;
    const TokenTensor& to = which == 0 ? p.d_k : p.d_q;
    if (to.data == nullptr) continue;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int token = place.token(upper);
      if (token >= chunk.tokens) continue;
      const float(&parts)[kGroups][kChunkTokens] = shared.row_dots[which];
      const float dot = (parts[0][token] + parts[1][token]) + (parts[2][token] + parts[3][token]);
      const float norm = shared.norms[which][token], factor = shared.factors[which][token];
      const float along = p.l2norm_eps >= 0.0f ? dot * factor * factor : 0.0f;
      const std::int64_t at = offset_of(to, chunk.batch, chunk.token + token, chunk.head_qk);
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const int column = place.group * GradientShared<kDimK>::kColumns + 8 * n + place.pair;
        if (column >= p.dim_k) continue;
        const float2 row = row_pair<kDimK>(shared.rows[which], place, token, n);
        store_pair(to, at + column, norm * fmaf(-along, row.x, x[n].c[2 * upper]),
                   norm * fmaf(-along, row.y, x[n].c[2 * upper + 1]));
      }
    }
  }
}

template <class Element, int kDimK>
__global__ void __launch_bounds__(kGradientThreads, 1) chunk_gradients(const __grid_constant__ ChunkBackwardParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<GradientShared<kDimK>*>(memory);
  PreparedChunk chunk;
  if (!find_chunk(p, chunk)) return zero_gradients(p, chunk.index - chunk_count(p.sequences), chunk.head_qk);

  const GradientPlace place = gradient_place();
  load_gradient_rows<Element, kDimK>(p, chunk, shared);
  RowGradients<kDimK> gradients;
  tile::clear(gradients.query);
  tile::clear(gradients.key);
  for (std::int32_t h = 0; h < p.group; ++h) {
    add_value_head<Element, kDimK>(p, chunk, chunk.head_qk * p.group + h, place, shared, gradients);
  }
  store_row_gradients<kDimK>(p, chunk, place, shared, gradients);
}

}  // namespace flashqla::cuda
