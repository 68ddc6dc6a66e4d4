// What chunk_gradients does otherwise for value heads with a chunk that was walked token by token on one of the ways (bf16
// inputs): there tokens may be 2^100 of others, so that no power of two serves more than one of them. Rare, and slow already:
// only the branches around it are in the way of other heads.
#pragma once

#include "cuda/kernels/chunk_backward/gradient_products.cuh"

namespace flashqla::cuda {

/// Which of `count` value heads were walked, a bit each, for all lanes. From logs as they were kept.
template <int kDimK>
FLASHQLA_DEVICE unsigned walked_heads(const GradientShared<kDimK>& shared, std::int32_t count) {
  const int lane = tile::lane_id(), kind = lane / kMostTilesOfV == 0 ? KeptLogs::kErrors : KeptLogs::kDV;
  unsigned walked = 0;  // all tokens of a chunk are walked: those of one tile say it for all
  for (std::int32_t h = 0; h < count; ++h) {
    walked |= row_log(shared.heads[h].logs[kind][lane % kMostTilesOfV]).walked ? 1u << h : 0u;
  }
  return __reduce_or_sync(0xffffffffu, walked);
}

template <class Element>
FLASHQLA_DEVICE bool is_walked(const ValueHead& head) {
  return !kKeepsRests<Element> && head.walked != 0;
}

/// Four pairs of e or dV of a lane as they were kept.
FLASHQLA_DEVICE void unpack_kept(const uint4& kept, const RowLog& log, float2 (&x)[4]) {
  const std::uint32_t pairs[4] = {kept.x, kept.y, kept.z, kept.w};
  const TwoPowers power = two_powers(log.log);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = log.wide ? ptx::unpack_pair<ptx::Bf16>(pairs[i]) : ptx::unpack_pair<ptx::F16>(pairs[i]);
    x[i] = {times(pair.x, power), times(pair.y, power)};
  }
}

/// Gives e and dV of a head, where they are kept, a power of two for every token: as f16, without powers of tiles. The powers go
/// to the head's rise and fall. All threads: a warp has 16 tokens and every fourth tile of V.
template <int kDimK>
__device__ __noinline__ void settle_walked(const ChunkBackwardParams& p, std::int64_t unit, GradientShared<kDimK>& shared,
                                           ValueHead& head) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = tile::lane_id(), part = warp % kTokenTiles,
            first = warp / kTokenTiles, tiles = p.dim_v / 16;
  auto& maxima = shared.end().maxima;
  const auto for_each = [&](const auto& body) {  // body(kind, place, x)
#pragma unroll 1
    for (int kind = 0; kind < 2; ++kind) {
      const KeptChunks& kept = kind == 0 ? p.kept : p.d_kept;
#pragma unroll 1
      for (int t = first; t < tiles; t += kTokenTiles) {
        auto* const at = reinterpret_cast<uint4*>(kept.rows + ((unit * kTokenTiles + part) * tiles + t) * 512) + lane;
        float2 x[4];
        unpack_kept(*at, row_log(head.logs[(kind == 0 ? KeptLogs::kErrors : KeptLogs::kDV) + part][t]), x);
        body(kind, at, x);
      }
    }
  };
  const int row = part * 16 + lane / 4;
  float largest[2][2] = {};
  for_each([&](int kind, uint4*, const float2(&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& to = largest[kind][i % 2];
      to = fmaxf(to, fmaxf(fabsf(x[i].x), fabsf(x[i].y)));
    }
  });
#pragma unroll
  for (int at = 0; at < 4; ++at) {
    float x = largest[at / 2][at % 2];
#pragma unroll
    for (int step = 1; step < 4; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    if (lane % 4 == 0) maxima[at / 2][first][row + 8 * (at % 2)] = x;
  }
  __syncthreads();  // the largest of every fourth tile, for all
  float powers[2][2];
#pragma unroll
  for (int at = 0; at < 4; ++at) {
    float x = 0.0f;
    for (int i = 0; i < kTokenTiles; ++i) x = fmaxf(x, maxima[at / 2][i][row + 8 * (at % 2)]);
    powers[at / 2][at % 2] = x > 0.0f ? block::power_above(x) : 1.0f;
  }
  for_each([&](int kind, uint4* to, const float2(&x)[4]) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float inverse = block::inverse_power(powers[kind][i % 2]);
      pairs[i] = ptx::pack_pair<ptx::F16>(x[i].x * inverse, x[i].y * inverse);
    }
    *to = {pairs[0], pairs[1], pairs[2], pairs[3]};
  });
  if (first == 0 && lane % 4 == 0) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      head.rise[row + 8 * upper] *= powers[0][upper];
      head.fall[row + 8 * upper] *= powers[1][upper];
    }
  }
  __syncthreads();  // all have read the logs
  for (int at = static_cast<int>(threadIdx.x); at < 2 * kTokenTiles * tiles; at += kGradientThreads) {
    head.logs[at / tiles][at % tiles] = 0;
  }
  if (threadIdx.x == 0) head.walked = 1;
  __syncthreads();  // rows, powers and logs, for all; the end's memory has been read
}

/// The warp's part of dP or dKK.
template <int kDimK>
FLASHQLA_DEVICE void leave_walked_pairs(GradientShared<kDimK>& shared, const GradientPlace& place,
                                        const tile::Accumulator (&pairs)[4]) {
  float* const to = shared.end().walked[place.gram()];
#pragma unroll
  for (int at = 0; at < 16; ++at) {
    const int i = place.token(at % 4 / 2), j = 32 * place.column_half() + at / 4 * 8 + place.pair + at % 2;
    if (j <= i) to[triangle_block(i, j)] = pairs[at / 4].c[at % 4];
  }
}

/// Adds dP K to `sums`' first half, the gradients of q; dP^T Q, dKK K and dKK^T K to its second, those of k.
template <int kDimK>
__device__ __noinline__ void add_walked_pairs(const GradientShared<kDimK>& shared, float4* sums) {
  constexpr int kCount = HeadProducts<kDimK>::kCount;
  const GradientPlace place = gradient_place();
  const auto& pairs = shared.end().walked;
#pragma unroll 1
  for (int n = 0; n < kCount; ++n) {
    float2 query[2] = {}, key[2] = {};
    const auto add = [](float factor, const float2& row, float2& to) {
      to = {fmaf(factor, row.x, to.x), fmaf(factor, row.y, to.y)};
    };
#pragma unroll 1
    for (int other = 0; other < kChunkTokens; ++other) {
      const float factor_k = shared.factors[0][other], factor_q = shared.factors[1][other];
      const float2 k = row_pair<kDimK>(shared.rows[0], place, other, n), q = row_pair<kDimK>(shared.rows[1], place, other, n);
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int own = place.token(upper), late = max(own, other), early = min(own, other);
        const float of_outputs = pairs[0][triangle_block(late, early)], of_values = pairs[1][triangle_block(late, early)];
        if (other <= own) add(of_outputs * factor_k, k, query[upper]);
        if (other >= own) add(of_outputs * factor_q, q, key[upper]);
        add(of_values * factor_k, k, key[upper]);
      }
    }
    const auto add_all = [](const float2(&x)[2], float4& to) {
      to = {to.x + x[0].x, to.y + x[0].y, to.z + x[1].x, to.w + x[1].y};
    };
    add_all(query, sums[n]);
    add_all(key, sums[kCount + n]);
  }
}

}  // namespace flashqla::cuda
