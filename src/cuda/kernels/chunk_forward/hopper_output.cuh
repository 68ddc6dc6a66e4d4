// The output group of advance_states_hopper: O^T from what the state group leaves.
#pragma once

#include "cuda/kernels/chunk_forward/advance_hopper.cuh"

namespace flashqla::cuda {

/// The largest of the warp's |E|, or of those that are finite.
template <bool kFiniteOnly>
FLASHQLA_DEVICE float largest_error(const GroupTokens& e) {
  float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    x[i % 4] = fmaxf(x[i % 4], kFiniteOnly && fabsf(e[i]) > 0x1.fffffep127f ? 0.0f : fabsf(e[i]));
  }
  return block::warp_largest_positive(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])));
}

/// E as left operands: f16, divided by a power of two above the largest of the warp's, 2^15 to spare. Returns what undoes that.
FLASHQLA_DEVICE float round_errors(const GroupTokens& e, std::uint32_t (&left)[16]) {
  float largest = largest_error<false>(e);
  if (largest > 0x1.fffffep127f) [[unlikely]]
    largest = largest_error<true>(e);  // tokens before it keep their digits
  const float power = block::power_above(fmaxf(largest, 0x1p-100f)), up = block::inverse_power(power) * 0x1p15f;
#pragma unroll
  for (int i = 0; i < 16; ++i) left[i] = ptx::pack_pair<ptx::F16>(e[2 * i] * up, e[2 * i + 1] * up);
  return power * 0x1p-15f;
}

/// read_q o (S^T Q^T) + rise o answers, rounded. `down`: what undoes the power of E.
template <class Element>
FLASHQLA_DEVICE void round_output(const UnitFactors& factors, const GroupPlace& place, float down, const GroupTokens& o,
                                  const TwoHalves& answers, std::uint32_t (&rounded)[16]) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 read = token_factors(factors, ChunkUnit::kReadQ, n, place),
                 rise = token_factors(factors, ChunkUnit::kRise, n, place);
    const float reads[2] = {read.x, read.y}, rises[2] = {rise.x * down, rise.y * down};
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = fmaf(rises[i % 2], answers[4 * n + i], o[4 * n + i] * reads[i % 2]);
    rounded[2 * n] = ptx::pack_pair<Element>(x[0], x[1]);
    rounded[2 * n + 1] = ptx::pack_pair<Element>(x[2], x[3]);
  }
}

/// Outputs of a chunk that is not whole, from their box to the caller's rows, by the output group. A function of its own: rare.
template <class Element>
__device__ __noinline__ void store_output_rows(const ChunkForwardParams& p, AdvanceWork work, int chunk, const std::byte* box) {
  const int tokens = work.rows.tokens(chunk);
  const std::int64_t token = work.rows.begin + work.rows.position(chunk);
  auto* const rows = static_cast<Element*>(p.o.data) + offset_of(p.o, work.rows.batch, token, work.head) + work.first_v;
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x) % kGroupThreads; at < tokens * 8; at += kGroupThreads) {
    const int row = at / 8, piece = at % 8;
    *reinterpret_cast<uint4*>(rows + row * p.o.stride_token + piece * 8) =
        *reinterpret_cast<const uint4*>(box + row * kBoxRowBytes + (piece ^ row % 8) * 16);
  }
  ptx::named_barrier(HopperBarriers::kOutput, kGroupThreads);  // all have read the box
}

/// S^T Q^T and E^T answers^T; returns what undoes the power of E, or a negative number where the chunk was walked: then `o` is
/// O^T.
template <class Element>
FLASHQLA_DEVICE float multiply_outputs(const HopperShared& shared, const HopperPlaces& at, int stage, const GroupPlace& place,
                                       GroupTokens& o, TwoHalves& answers) {
  std::uint32_t state[32], errors[16];
  HopperBarriers::wait(HopperBarriers::kStateReady);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint4 four = shared.state[i][place.thread];
    state[4 * i] = four.x;
    state[4 * i + 1] = four.y;
    state[4 * i + 2] = four.z;
    state[4 * i + 3] = four.w;
  }
  warp_arrive(at.state_free());
  ptx::wgmma_fence();
  multiply_rows<Element>(at.queries(stage), state, o);
  ptx::wgmma_commit();
  GroupTokens e;
  HopperBarriers::wait(HopperBarriers::kErrorsReady);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 four = reinterpret_cast<const float4&>(shared.errors[i][place.thread]);
    e[4 * i] = four.x;
    e[4 * i + 2] = four.y;
    e[4 * i + 1] = four.z;
    e[4 * i + 3] = four.w;
  }
  const bool walked = shared.walked != 0;
  HopperBarriers::come(HopperBarriers::kErrorsFree);
  const float down = round_errors(e, errors);
  ptx::wgmma_fence();
  multiply_triangle(at.answers(stage), errors, answers);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::keep_in_place(o);
  answers.keep_in_place();
  if (!walked) [[likely]]
    return down;
#pragma unroll
  for (int i = 0; i < 32; ++i) o[i] = e[i];
  return -1.0f;
}

/// A chunk's outputs to their box, when those before them have left.
template <class Element>
FLASHQLA_DEVICE void make_output(const HopperShared& shared, const HopperPlaces& at, int stage, const GroupPlace& place) {
  GroupTokens o;
  TwoHalves answers;
  const float down = multiply_outputs<Element>(shared, at, stage, place, o, answers);
  std::uint32_t rounded[16];
  round_output<Element>(shared.query_stages[stage].factors, place, down, o, answers, rounded);
  if (down < 0.0f) [[unlikely]]
    round_left<Element>(o, rounded);
  if (place.thread == 0) ptx::store_wait_read<0>();
  ptx::named_barrier(HopperBarriers::kOutput, kGroupThreads);  // the outputs before these have left
  const std::uint32_t box = at.output() + place_in_box(place);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    ptx::stmatrix_x4_trans(box + static_cast<std::uint32_t>(step * 16 * kBoxRowBytes), rounded + 4 * step);
  }
  ptx::fence_async_shared();
  ptx::named_barrier(HopperBarriers::kOutput, kGroupThreads);  // the outputs, from all warps
}

/// All of a sequence's chunks.
template <class Element>
FLASHQLA_DEVICE void make_outputs(const ChunkForwardParams& p, const ChunkForwardMaps& maps, const AdvanceWork& work,
                                  HopperShared& shared, const HopperPlaces& at) {
  const GroupPlace place = group_place();
  const ChunkNumbers chunks(work.rows);
  const StageLeaver leaver(at, Ring::output);
  const int begin = static_cast<int>(work.rows.begin) - work.rows.shift, batch = static_cast<int>(work.rows.batch);
  RingPlace<Ring::output> ring;
  if (chunks.count > 0) HopperBarriers::come(HopperBarriers::kErrorsFree);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks.count; ++chunk, ring.move()) {
    ptx::mbarrier_wait(at.full(Ring::output, ring.stage), ring.parity);
    make_output<Element>(shared, at, ring.stage, place);
    if (!chunks.whole(chunk)) [[unlikely]] {
      store_output_rows<Element>(p, work, chunk, shared.output);
    } else if (place.thread == 0) {
      ptx::store_box(&maps.o, work.first_v, work.head, begin + chunk * kChunkTokens, batch, at.output());
      ptx::store_commit();
    }
    if (place.thread == 0) leaver.leave(ring.stage);  // behind a barrier of the group
  }
  if (place.thread == 0) ptx::store_wait_all();  // before the block's shared memory goes
}

}  // namespace flashqla::cuda
