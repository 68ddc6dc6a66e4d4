// Chunks that a warp of advance_states_hopper walks token by token in f32 (why and when: tokens.cuh). The warp has whole rows of
// S^T, so that nothing leaves its registers.
#pragma once

#include "cuda/kernels/chunk_forward/hopper_stages.cuh"
#include "cuda/kernels/chunk_forward/tokens.cuh"

namespace flashqla::cuda {

/// A pair of neighbouring elements of a row of a box, or of two.
template <class Element>
FLASHQLA_DEVICE float2 pair_of_box(const std::byte* boxes, int row, int column) {
  const int piece = column % kBoxColumns / 8;
  return ptx::unpack_pair<Element>(*reinterpret_cast<const std::uint32_t*>(
      boxes + column / kBoxColumns * kBoxBytes + row * kBoxRowBytes + (piece ^ row % 8) * 16 + column % 8 * 2));
}

/// Whether the warp's rows have to be walked: from its E (`e`) and state before the chunk.
template <class Element>
FLASHQLA_DEVICE bool group_is_lost(const UnitFactors& factors, const Least& least, const GroupPlace& place, const float (&e)[32],
                                   const float (&s)[64]) {
  float4 reach = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float factor = factors.at<float>(ChunkUnit::kWriteK + (i / 4 * 8 + place.pair + i % 2) * 4), x = fabsf(e[i]);
    reach.x = fmaxf(reach.x, x);
    reach.y = fmaxf(reach.y, fabsf(factor) * x);
  }
#pragma unroll
  for (float x : s) reach.z = fmaxf(reach.z, fabsf(x));
  reach.x = block::warp_largest_positive(reach.x);
  reach.y = block::warp_largest_positive(reach.y);
  reach.z = block::warp_largest_positive(reach.z);
  const float4 all[kTeam] = {reach, reach, reach, reach};
  return is_lost<Element>(least, all);
}

/// The two rows of S^T of a lane times a row of k or q, over the four lanes that have them.
template <class Element>
FLASHQLA_DEVICE float2 dot_two_rows(const std::byte* boxes, int token, int pair, const float (&s)[64], float& square) {
  float2 sum = {0.0f, 0.0f};
  square = 0.0f;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    const float2 x = pair_of_box<Element>(boxes, token, 8 * n + pair);
    sum.x = fmaf(x.x, s[4 * n], fmaf(x.y, s[4 * n + 1], sum.x));
    sum.y = fmaf(x.x, s[4 * n + 2], fmaf(x.y, s[4 * n + 3], sum.y));
    square = fmaf(x.x, x.x, fmaf(x.y, x.y, square));
  }
  square = total_of_four(square);
  return {total_of_four(sum.x), total_of_four(sum.y)};
}

/// Walks: s becomes the state after the chunk; O^T goes to `output` as the accumulators of the warp.
template <class Element>
FLASHQLA_DEVICE void walk_group_rows(const ChunkForwardParams& p, const AdvanceWork& work, int chunk,
                                     const HopperShared::Stage& stage, const std::byte* queries, const GroupPlace& place,
                                     uint4* output, float (&s)[64]) {
  const int tokens = work.rows.tokens(chunk), column = place.warp * 16 + place.row;
  const std::int64_t first = work.rows.begin + work.rows.position(chunk);
  const std::byte* const values = stage.values;
  float half_decay[2], beta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const block::TokenGates gates = block::token_gates(p, work.rows.batch, first, work.head, place.lane + 32 * half, tokens);
    half_decay[half] = expf(0.5f * static_cast<float>(gates.log_decay));  // twice: the whole may be no normal number
    beta[half] = gates.beta;
  }
  const auto element = [&](int token, int v) {
    const float2 two = pair_of_box<Element>(values, token, v / 2 * 2);
    return v % 2 == 0 ? two.x : two.y;
  };
#pragma unroll 1
  for (int t = 0; t < tokens; ++t) {
    const float decay = __shfl_sync(0xffffffffu, t < 32 ? half_decay[0] : half_decay[1], t % 32),
                strength = __shfl_sync(0xffffffffu, t < 32 ? beta[0] : beta[1], t % 32);
#pragma unroll
    for (float& x : s) x = x * decay * decay;
    float square;
    const float2 kept = dot_two_rows<Element>(&stage.keys[0][0], t, place.pair, s, square);
    const float factor = p.l2norm_eps < 0.0f ? 1.0f : rsqrtf(square + p.l2norm_eps);
    const float upper = strength * (element(t, column) - factor * kept.x) * factor,
                lower = strength * (element(t, column + 8) - factor * kept.y) * factor;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const float2 k = pair_of_box<Element>(&stage.keys[0][0], t, 8 * n + place.pair);
      s[4 * n] = fmaf(k.x, upper, s[4 * n]);
      s[4 * n + 1] = fmaf(k.y, upper, s[4 * n + 1]);
      s[4 * n + 2] = fmaf(k.x, lower, s[4 * n + 2]);
      s[4 * n + 3] = fmaf(k.y, lower, s[4 * n + 3]);
    }
    const float2 read = dot_two_rows<Element>(queries, t, place.pair, s, square);
    const float scale = p.scale * (p.l2norm_eps < 0.0f ? 1.0f : rsqrtf(square + p.l2norm_eps));
    if (place.lane % 4 != 0) continue;
    auto* const to = reinterpret_cast<float*>(output + t / 8 * kGroupThreads + place.row * 4 + t % 8 / 2) + t % 2 * 2;
    to[0] = scale * read.x;
    to[1] = scale * read.y;
  }
}

}  // namespace flashqla::cuda
