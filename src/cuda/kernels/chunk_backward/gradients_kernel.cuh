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
#include "cuda/kernels/chunk_backward/gradient_walked.cuh"

namespace flashqla::cuda {

/// Gradients of the warp's rows of q and k over its quarter of K, summed over the group's value heads. In local memory: one
/// head's sums need the registers.
template <int kDimK>
struct RowGradients {
  static constexpr int kCount = HeadProducts<kDimK>::kCount;
  float4 sums[2 * kCount];  // of q, of k

  FLASHQLA_DEVICE void add(bool first, const tile::Accumulator (&query)[kCount], const tile::Accumulator (&key)[kCount]) {
    float4* const to = sums + ptx::hidden_zero();
#pragma unroll
    for (int n = 0; n < 2 * kCount; ++n) {
      const float(&x)[4] = n < kCount ? query[n].c : key[n - kCount].c;
      const float4 before = first ? float4{0.0f, 0.0f, 0.0f, 0.0f} : to[n];
      to[n] = {before.x + x[0], before.y + x[1], before.z + x[2], before.w + x[3]};
    }
  }
  FLASHQLA_DEVICE void take(int which, tile::Accumulator (&x)[kCount]) const {
    const float4* const from = sums + which * kCount + ptx::hidden_zero();
#pragma unroll
    for (int n = 0; n < kCount; ++n) x[n] = {{from[n].x, from[n].y, from[n].z, from[n].w}};
  }
};

/// Products with the states become their parts of the head's gradients, in place: sums.query of q, sums.key of k. `reads`,
/// `writes`: row dots with q and k for the gates, but not what the way back has left (kKeepsRests).
template <class Element, int kDimK>
FLASHQLA_DEVICE void take_states(const ChunkBackwardParams& p, const GradientShared<kDimK>& shared, const ValueHead& head,
                                 const GradientPlace& place, const Multipliers& multipliers, HeadProducts<kDimK>& sums,
                                 float (&reads)[2], float (&writes)[2]) {
  const TwoPowers query = two_powers(multipliers.query_log), key = two_powers(multipliers.key_log),
                  write = two_powers(multipliers.write_log);
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int token = place.token(upper);
    const float decay = head.decay[token], rest = head.rest[token], beta = head.beta[token];
    const float of_o = p.scale * decay * head.d_o_powers[token] * query.second, of_v = -decay * head.fall[token] * key.second,
                of_e = rest * head.rise[token] * write.second;
    const float first[3] = {query.first * decay, key.first * decay, write.first * rest};
    float of_query = 0.0f, of_key = 0.0f, of_write = 0.0f;
#pragma unroll
    for (int n = 0; n < HeadProducts<kDimK>::kCount; ++n) {
      const float2 q = row_pair<kDimK>(shared.rows[1], place, token, n), k = row_pair<kDimK>(shared.rows[0], place, token, n);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int at = 2 * upper + c;
        const float x = sums.query[n].c[at] * first[0] * of_o, y = sums.key[n].c[at] * first[1] * of_v,
                    z = sums.write[n].c[at] * first[2] * of_e, own_k = c == 0 ? k.x : k.y;
        sums.query[n].c[at] = x;
        sums.key[n].c[at] = fmaf(beta, z, y);
        of_query = fmaf(c == 0 ? q.x : q.y, x, of_query);
        of_key = fmaf(own_k, y, of_key);
        if constexpr (!kKeepsRests<Element>) of_write = fmaf(own_k, z, of_write);
      }
    }
    const float factor = shared.factors[0][token];
    reads[upper] = row_total(fmaf(of_query, shared.factors[1][token], of_key * factor));
    if constexpr (!kKeepsRests<Element>) writes[upper] = row_total(of_write) * factor;
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
    if (tile::lane_id() == 0) shared.maxima[kind][place.gram()][2 * place.tile + place.column_half()] = largest[kind];
  }
}

/// dP or dKK of the warp as left operands, divided by `powers`: by rows with the factors of the columns, and transposed with
/// those of the rows.
template <int kDimK>
FLASHQLA_DEVICE void leave_triangles(GradientShared<kDimK>& shared, const GradientPlace& place, const float (&powers)[2],
                                     const tile::Accumulator (&pairs)[4]) {
  typename GradientShared<kDimK>::End& end = shared.end();
  const int lane = tile::lane_id();
  const float inverse[2] = {block::inverse_power(powers[0]), block::inverse_power(powers[1])};
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const int of_j = 2 * place.column_half() + block;
    if (block >= place.pair_blocks()) break;
    tile::Accumulator by_rows[2], turned[2];
    for_each_pair<kDimK>(shared, place, block, pairs, [&](int at, float x, float of_column, float of_row) {
      by_rows[at / 4].c[at % 4] = x * of_column * inverse[0];
      turned[at / 4].c[at % 4] = x * of_row * inverse[1];
    });
    const int number = triangle_block(place.tile, of_j);
    const tile::FragmentA a = tile::to_a<ptx::F16>(by_rows[0], by_rows[1]), b = tile::to_a<ptx::F16>(turned[0], turned[1]);
    end.triangles[place.gram()][number][lane] = {a.a[0], a.a[1], a.a[2], a.a[3]};
    end.turned[place.gram()][number][lane] = {ptx::movmatrix_trans(b.a[0]), ptx::movmatrix_trans(b.a[2]),
                                              ptx::movmatrix_trans(b.a[1]), ptx::movmatrix_trans(b.a[3])};
  }
}

/// The sums that the warp leaves for others.
template <class Element, int kDimK>
FLASHQLA_DEVICE void leave_sums(GradientShared<kDimK>& shared, const ValueHead& head, const GradientPlace& place,
                                const tile::Accumulator (&flow)[4], const float (&reads)[2], const float (&writes)[2],
                                const float (&diagonal)[2]) {
  GateSums& sums = shared.end().sums;
  if (place.pair_blocks() > 0) sum_pairs(head, place, flow, sums);
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int token = place.token(upper), j = 32 * place.column_half();
    // The lane that has the diagonal's element of its row.
    if (place.gram() && place.pair_blocks() > 0 && token / 32 * 32 == j && token % 8 / 2 * 2 == place.pair) {
      sums.diagonal[token] = diagonal[upper];
    }
    if (place.pair != 0) continue;
    sums.reads[place.group][token] = reads[upper];
    if constexpr (!kKeepsRests<Element>) sums.writes[place.group][token] = writes[upper];
  }
}

/// Adds dP K to the head's gradients of q; dP^T Q, dKK K and dKK^T K to those of k. `powers`: of dP and dKK, by rows and
/// transposed.
template <int kDimK>
FLASHQLA_DEVICE void add_pairs(const GradientShared<kDimK>& shared, const GradientPlace& place, const float (&powers)[2][2],
                               tile::Accumulator (&query)[HeadProducts<kDimK>::kCount],
                               tile::Accumulator (&key)[HeadProducts<kDimK>::kCount]) {
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
  multiply_triangle_rows<kDimK, false>(shared.end().triangles[0], shared.rows[0], place, sum);
  add(query, powers[0][0]);
  multiply_triangle_rows<kDimK, true>(shared.end().turned[0], shared.rows[1], place, sum);
  add(key, powers[0][1]);
  multiply_triangle_rows<kDimK, false>(shared.end().triangles[1], shared.rows[0], place, sum);
  add(key, powers[1][0]);
  multiply_triangle_rows<kDimK, true>(shared.end().turned[1], shared.rows[0], place, sum);
  add(key, powers[1][1]);
}

/// Powers of two above the largest of dP and of dKK, of both kinds of triangles, from every warp's largest.
template <int kDimK>
FLASHQLA_DEVICE void pair_powers(const GradientShared<kDimK>& shared, float (&powers)[2][2]) {
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
    for (int gram = 0; gram < 2; ++gram) {
      const auto* const four = reinterpret_cast<const float4*>(shared.maxima[kind][gram]);
      const float4 x = four[0], y = four[1];
      powers[gram][kind] =
          block::power_above(fmaxf(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), fmaxf(fmaxf(y.x, y.y), fmaxf(y.z, y.w))));
    }
  }
}

/// Sums of the next value head over V, tile by tile.
template <class Element, int kDimK>
FLASHQLA_DEVICE void multiply_head(const ChunkBackwardParams& p, const PreparedChunk& chunk, const GradientRing& ring,
                                   const ValueHead& head, const GradientPlace& place, const Multipliers& multipliers, int& slot,
                                   GradientShared<kDimK>& shared, TileLoader<Element, kDimK>& loader, HeadProducts<kDimK>& sums) {
  const int tiles = p.dim_v / 16;
  const float inverse[2] = {block::inverse_power(head.d_o_powers[place.token(0)]),
                            block::inverse_power(head.d_o_powers[place.token(1)])};
#pragma unroll 1
  for (int first = 0; first < tiles; first += ring.tiles) {
    next_step(p, chunk, ring, shared, loader);
#pragma unroll 1
    for (int t = first; t < first + ring.tiles && t < tiles; ++t) {
      multiply_tile<Element, kDimK>(shared.stage(slot), place, inverse, multipliers, head, t, sums);
      slot = slot + 1 == ring.stages() ? 0 : slot + 1;
    }
  }
}

/// `h`: number of the value head in its group.
template <class Element, int kDimK>
FLASHQLA_DEVICE void add_value_head(const ChunkBackwardParams& p, const PreparedChunk& chunk, const GradientRing& ring,
                                    std::int32_t h, const GradientPlace& place, int& slot, GradientShared<kDimK>& shared,
                                    TileLoader<Element, kDimK>& loader, RowGradients<kDimK>& gradients) {
  const ValueHead& head = shared.heads[h % GradientShared<kDimK>::kHeads];
  HeadProducts<kDimK> sums;
  tile::clear(sums.query);
  tile::clear(sums.key);
  tile::clear(sums.write);
  tile::clear(sums.pairs);
  sums.state_dot = 0.0f;
  const Multipliers multipliers = find_multipliers(head, place);
  multiply_head<Element, kDimK>(p, chunk, ring, head, place, multipliers, slot, shared, loader, sums);

  float reads[2], writes[2], diagonal[2] = {0.0f, 0.0f};
  take_states<Element, kDimK>(p, shared, head, place, multipliers, sums, reads, writes);
  float state_dot = 0.0f;
  if constexpr (!kKeepsRests<Element>) state_dot = block::warp_total(sums.state_dot);
  tile::Accumulator flow[4];
  multiply_rows<kDimK>(shared, place, flow);
  take_pairs<kDimK>(shared, head, place, p.scale, multipliers.pairs_log, diagonal, sums.pairs, flow);
  leave_maxima<kDimK>(shared, place, sums.pairs);
  if (!kKeepsRests<Element> && tile::lane_id() == 0) shared.state_dots[place.warp] = state_dot;
  __syncthreads();  // the largest elements; and all have left the stages
  float powers[2][2];
  pair_powers<kDimK>(shared, powers);
  if (place.pair_blocks() > 0) {
    if (is_walked<Element>(head)) {
      leave_walked_pairs<kDimK>(shared, place, sums.pairs);
    } else {
      leave_triangles<kDimK>(shared, place, place.gram() ? powers[1] : powers[0], sums.pairs);
    }
  }
  leave_sums<Element, kDimK>(shared, head, place, flow, reads, writes, diagonal);
  __syncthreads();  // triangles, for all; sums, for one warp
  if (!is_walked<Element>(head)) add_pairs<kDimK>(shared, place, powers, sums.query, sums.key);
  gradients.add(h == 0, sums.query, sums.key);
  if (is_walked<Element>(head)) add_walked_pairs<kDimK>(shared, gradients.sums);
  if (place.warp == h % kGradientWarps) finish_gates<Element>(p, chunk, chunk.head_qk * p.group + h, head, shared);
}

template <class Element>
FLASHQLA_DEVICE void store_pair(const TokenTensor& x, std::int64_t at, float first, float second) {
  auto* const pair = static_cast<Element*>(x.data) + at;
  if (x.dtype != DType::f32 && reinterpret_cast<std::uintptr_t>(pair) % 4 == 0) {
    *reinterpret_cast<std::uint32_t*>(pair) = ptx::pack_pair<Element>(first, second);
    return;
  }
  store_scalar(x.data, x.dtype, at, first);
  store_scalar(x.data, x.dtype, at + 1, second);
}

/// Gradients of q and k as given, past L2 normalisation, to the caller's rows.
template <class Element, int kDimK>
FLASHQLA_DEVICE void store_row_gradients(const ChunkBackwardParams& p, const PreparedChunk& chunk, const GradientPlace& place,
                                         GradientShared<kDimK>& shared, const RowGradients<kDimK>& gradients) {
  constexpr int kCount = HeadProducts<kDimK>::kCount;
  auto& row_dots = shared.end().row_dots;
  __syncthreads();  // all have left the triangles
  tile::Accumulator x[kCount];
  for (int which = 0; which < 2; ++which) {
    gradients.take(1 - which, x);
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      float dot = 0.0f;
      for (int n = 0; n < kCount; ++n) {
        const float2 row = row_pair<kDimK>(shared.rows[which], place, place.token(upper), n);
        dot = fmaf(row.x, x[n].c[2 * upper], fmaf(row.y, x[n].c[2 * upper + 1], dot));
      }
      dot = row_total(dot);
      if (place.pair == 0) row_dots[which][place.group][place.token(upper)] = dot;
    }
  }
  __syncthreads();  // row dots over quarters of K, for all
  for (int which = 0; which < 2; ++which) {
    const TokenTensor& to = which == 0 ? p.d_k : p.d_q;
    if (to.data == nullptr) continue;
    gradients.take(1 - which, x);
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int token = place.token(upper);
      if (token >= chunk.tokens) continue;
      const float(&parts)[kGroups][kChunkTokens] = row_dots[which];
      const float dot = (parts[0][token] + parts[1][token]) + (parts[2][token] + parts[3][token]);
      const float norm = shared.norms[which][token], factor = shared.factors[which][token];
      const float along = p.l2norm_eps >= 0.0f ? dot * factor * factor : 0.0f;
      const std::int64_t at = offset_of(to, chunk.batch, chunk.token + token, chunk.head_qk);
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const int column = place.group * GradientShared<kDimK>::kColumns + 8 * n + place.pair;
        if (column >= p.dim_k) continue;
        const float2 row = row_pair<kDimK>(shared.rows[which], place, token, n);
        store_pair<Element>(to, at + column, norm * fmaf(-along, row.x, x[n].c[2 * upper]),
                            norm * fmaf(-along, row.y, x[n].c[2 * upper + 1]));
      }
    }
  }
}

/// Settles those heads of which a bit is set, number `first` and following ones, whose first tiles are under way: these begin
/// anew.
template <class Element, int kDimK>
FLASHQLA_DEVICE void settle_heads(const ChunkBackwardParams& p, const PreparedChunk& chunk, const GradientRing& ring,
                                  std::int32_t first, unsigned walked, int slot, GradientShared<kDimK>& shared,
                                  TileLoader<Element, kDimK>& loader) {
  ptx::cp_async_wait<0>();
  __syncthreads();  // all have looked at the logs, and no copy is under way
  for (int h = 0; walked >> h != 0; ++h) {
    const std::int64_t unit = chunk.index * p.heads_v + chunk.head_qk * p.group + first + h;
    if ((walked >> h & 1) != 0) settle_walked(p, unit, shared, shared.heads[h]);
  }
  if constexpr (!GradientShared<kDimK>::kOverlaid) {  // else no tiles are under way between heads
    loader.restart(p, chunk, first, slot);
    for (int step = 1; step < ring.depth; ++step) loader.load_step(p, chunk, shared, ring);
  }
}

template <class Element, int kDimK>
__global__ void __launch_bounds__(kGradientThreads, 1)
    chunk_gradients(const __grid_constant__ ChunkBackwardParams p, const __grid_constant__ GradientRing ring) {
  constexpr int kHeads = GradientShared<kDimK>::kHeads;
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<GradientShared<kDimK>*>(memory);
  PreparedChunk chunk;
  if (!find_chunk(p, chunk)) return zero_gradients(p, chunk.index - chunk_count(p.sequences), chunk.head_qk);

  const GradientPlace place = gradient_place();
  TileLoader<Element, kDimK> loader(p, chunk);
  start_gradient_rows<Element, kDimK>(p, chunk, shared);
  for (int step = 1; step < ring.depth; ++step) loader.load_step(p, chunk, shared, ring);
  RowGradients<kDimK> gradients;
  int slot = 0;  // of the next tile
  for (std::int32_t first = 0; first < p.group; first += kHeads) {
    const std::int32_t count = p.group - first < kHeads ? p.group - first : kHeads;
    __syncthreads();  // all have left the last heads' gates and sums
    load_heads<Element, kDimK>(p, chunk, chunk.head_qk * p.group + first, count, shared);
    if (first == 0) finish_gradient_rows<Element, kDimK>(p, chunk, ring, shared);
    __syncthreads();  // gates, powers and rows, for all
    if constexpr (!kKeepsRests<Element>) {
      const unsigned walked = walked_heads(shared, count);
      if (walked != 0) settle_heads(p, chunk, ring, first, walked, slot, shared, loader);
    }
#pragma unroll 1
    for (std::int32_t h = first; h < first + count; ++h) {
      add_value_head<Element, kDimK>(p, chunk, ring, h, place, slot, shared, loader, gradients);
    }
  }
  store_row_gradients<Element, kDimK>(p, chunk, place, shared, gradients);
}

}  // namespace flashqla::cuda
