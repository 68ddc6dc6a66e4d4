// The kernel around advance_hopper.cuh: the state group, and what each group does at both ends of a sequence.
//
// A chunk of the state group. Products (right) are on their way while its warps do what stands below them:
//
//   round S^T                                        A  S^T K^T
//   S^T for the output group
//   wait for A: E                                    B  E^T solve^T, in two groups
//   S^T times the chunk's decay
//   wait for B, first 32 tokens: updates             C  S^T += updates K, rounded and what that left
//   E^T for the output group
//   wait for B, last 32 tokens: updates              D  likewise
//   values and totals of the next chunk
//   wait for D; leave the stage
#pragma once

#include "cuda/kernels/chunk_forward/advance_hopper.cuh"
#include "cuda/kernels/chunk_forward/hopper_copy.cuh"
#include "cuda/kernels/chunk_forward/hopper_output.cuh"
#include "cuda/kernels/chunk_forward/hopper_walk.cuh"
#include "cuda/kernels/chunk_forward/start.hpp"

namespace flashqla::cuda {

/// What a lane of the state group has from chunk to chunk: S^T, and of the chunk that comes next values and totals.
struct GroupState {
  float s[64];
  std::uint32_t values[16];
  ChunkTotals totals;
};

/// Calls body(element, place in the tensor) for every element of S^T of the lane.
template <class Body>
FLASHQLA_DEVICE void for_each_of_group(const AdvanceWork& work, const GroupPlace& place, const StateTensor& tensor,
                                       std::int64_t row, float* s, const Body& body) {
  const std::int64_t next_k = element_of(tensor, 0, 0, 1, 0), next_v = element_of(tensor, 0, 0, 0, 1);
  const int first_v = work.first_v + place.warp * 16 + place.row;
  const std::int64_t first = element_of(tensor, row, work.head, place.pair, first_v);
#pragma unroll
  for (int i = 0; i < 64; ++i) body(s[i], first + (i / 4 * 8 + i % 2) * next_k + i % 4 / 2 * 8 * next_v);
}

/// A function of its own, on a copy: rare, and long.
__device__ __noinline__ inline void store_group_state(AdvanceWork work, GroupPlace place, StateTensor to, std::int64_t row,
                                                      float* s) {
  if (row < 0 || row >= to.rows) return;
  for_each_of_group(work, place, to, row, s, [&](const float& x, std::int64_t at) { store_scalar(to.data, to.dtype, at, x); });
}

FLASHQLA_DEVICE void load_group_state(const AdvanceWork& work, const GroupPlace& place, const StateTensor& from, std::int64_t row,
                                      float* s) {
  const bool there = row >= 0 && row < from.rows;
  with_elements(from.data, from.dtype, [&](const auto* elements) {  // outside the loop, so that loads are on their way together
    for_each_of_group(work, place, from, there ? row : 0, s,
                      [&](float& x, std::int64_t at) { x = there ? to_float(elements[at]) : 0.0f; });
  });
}

/// S^T K^T in sk, on its way; meanwhile S^T goes to the output group. `read`: factors of the lane's tokens.
template <class Element>
FLASHQLA_DEVICE void project_group(HopperShared& shared, const HopperPlaces& at, int stage, const GroupPlace& place, int chunk,
                                   const float (&s)[64], GroupTokens& sk, float2 (&read)[8]) {
  std::uint32_t left[32];
  round_left<Element>(s, left);
  ptx::wgmma_fence();
  multiply_rows<Element>(at.keys(stage), left, sk);
  ptx::wgmma_commit();
#pragma unroll
  for (int n = 0; n < 8; ++n) read[n] = token_factors(shared.stages[stage].factors, ChunkUnit::kReadK, n, place);
  // Not a named barrier: between products and the wait for them ptxas takes one for a place where the warps may part.
  ptx::mbarrier_wait(at.state_free(), chunk % 2 ^ 1);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    shared.state[i][place.thread] = {left[4 * i], left[4 * i + 1], left[4 * i + 2], left[4 * i + 3]};
  }
  HopperBarriers::come(HopperBarriers::kStateReady);
}

/// E in `e`, which holds S^T K^T, on its way; with what rounding S^T left where the chunk is precise.
template <class Element>
FLASHQLA_DEVICE void make_errors(const UnitFactors& factors, std::uint32_t keys, const GroupPlace& place, const GroupState& state,
                                 const float2 (&read)[8], GroupTokens& e) {
  // Votes tell the compiler that the warp does not divide.
  if (__any_sync(0xffffffffu, state.totals.precise != 0.0f)) [[unlikely]] {
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(e);
    add_rest_times_rows<Element>(keys, state.s, e);
  }
  const bool growth = __any_sync(0xffffffffu, state.totals.growth != 0.0f);
  ptx::wgmma_wait<0>();
  ptx::keep_in_place(e);
  GroupTokens v;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 two = ptx::unpack_pair<Element>(state.values[i]);
    v[2 * i] = two.x;
    v[2 * i + 1] = two.y;
  }
  if (growth) [[unlikely]] {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 strength = token_factors(factors, ChunkUnit::kStrength, n, place);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[4 * n + i] *= i % 2 == 0 ? strength.x : strength.y;
    }
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    e[i] = fmaf(i % 2 == 0 ? -read[i / 4].x : -read[i / 4].y, e[i], v[i]);
    if (std::is_same_v<Element, ptx::F16>) e[i] = ptx::round_tf32(e[i]);  // bf16: cut off (kDigitsOf)
  }
}

/// E for the output group.
FLASHQLA_DEVICE void leave_errors(HopperShared& shared, const GroupPlace& place, const std::uint32_t (&e)[32]) {
  HopperBarriers::wait(HopperBarriers::kErrorsFree);
#pragma unroll
  for (int i = 0; i < 8; ++i) shared.errors[i][place.thread] = {e[4 * i], e[4 * i + 1], e[4 * i + 2], e[4 * i + 3]};
  if (place.thread == 0) shared.walked = 0;
  HopperBarriers::come(HopperBarriers::kErrorsReady);
}

/// Walks a chunk: `s` becomes the state after it, and O^T is left for the output group. A function of its own, on a copy of the
/// state: rare, and long.
template <class Element>
__device__ __noinline__ void walk_group_chunk(const ChunkForwardParams& p, AdvanceWork work, int chunk, HopperShared& shared,
                                              int stage, float (&s)[64]) {
  const GroupPlace place = group_place();
  HopperBarriers::wait(HopperBarriers::kErrorsFree);
  // Queries, too, which the output group does not leave before it has what is made here.
  const int query_stage = chunk % HopperShared::kQueryStages;
  ptx::mbarrier_wait(HopperPlaces(shared).full(Ring::output, query_stage), chunk / HopperShared::kQueryStages % 2);
  walk_group_rows<Element>(p, work, chunk, shared.stages[stage], shared.query_stages[query_stage].queries[0], place,
                           &shared.errors[0][32 * place.warp], s);
  if (place.thread == 0) shared.walked = 1;
  HopperBarriers::come(HopperBarriers::kErrorsReady);
  ptx::named_barrier(HopperBarriers::kVote, kGroupThreads);  // all have read the stage
}

/// S^T += (write_k o e^T) K of 32 tokens, in two parts. `factors`: of the lane's tokens, `keys`: rows from the first token on.
template <class Element>
FLASHQLA_DEVICE void update_with(const float* e, const float2* factors, std::uint32_t keys, float (&s)[64]) {
  float updates[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) updates[i] = e[i] * (i % 2 == 0 ? factors[i / 4].x : factors[i / 4].y);
  std::uint32_t left[8], rest[8];
  round_left<Element>(updates, left);
  ptx::wgmma_fence();
  multiply_updates<Element>(keys, left, s);
  round_rest<Element>(updates, left, rest);
  ptx::wgmma_fence();
  multiply_updates<Element>(keys, rest, s);
  ptx::wgmma_commit();
}

/// What the state group has on its way through a sequence.
template <class Element>
struct GroupWalk {
  HopperShared& shared;
  const HopperPlaces at;
  const GroupPlace place;
  const StageLeaver leaver;
  const int chunks;
  int chunk = 0;                // that comes next
  RingPlace<Ring::state> ring;  // its stage
  GroupState state;

  FLASHQLA_DEVICE GroupWalk(const AdvanceWork& work, HopperShared& memory)
      : shared(memory), at(memory), place(group_place()), leaver(at, Ring::state), chunks(ChunkNumbers(work.rows).count) {}

  /// Values and totals of the next chunk, if there is one.
  FLASHQLA_DEVICE void take_stage() {
    if (chunk == chunks) return;
    ptx::mbarrier_wait(at.solve_ready(chunk % 2), chunk / 2 % 2);  // rows have been copied, and ends of the last cleared
    load_values(at.values(ring.stage) + place_in_box(place), state.values);
    state.totals = chunk_totals(shared.stages[ring.stage].factors);
  }

  /// A chunk; false if it has to be walked: then nothing of it has been done but that the output group has the state before it.
  FLASHQLA_DEVICE bool advance() {
    const int stage = ring.stage;
    const UnitFactors& factors = shared.stages[stage].factors;
    GroupTokens sk;
    float2 read[8];
    project_group<Element>(shared, at, stage, place, chunk, state.s, sk, read);
    make_errors<Element>(factors, at.keys(stage), place, state, read, sk);
    const Least least{state.totals.least_forth, state.totals.least_of_state};
    if (__any_sync(0xffffffffu, watched<Element>(least))) [[unlikely]] {
      const bool lost = group_is_lost<Element>(factors, least, place, sk, state.s);
      if (ptx::named_barrier_any(HopperBarriers::kVote, kGroupThreads, lost)) return false;
    }
    std::uint32_t left[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) left[i] = __float_as_uint(sk[i / 4 * 4 + i % 2 * 2 + i % 4 / 2]);
    ptx::keep_in_place(left);
    GroupTokens e;
    float late[16];
    ptx::wgmma_fence();
    multiply_wide(at.wide_solve(chunk % 2), left, e);
    ptx::wgmma_commit();
    multiply_wide_late(at.wide_solve(chunk % 2), left, late);
    ptx::wgmma_commit();
    float2 write[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) write[n] = token_factors(factors, ChunkUnit::kWriteK, n, place);
#pragma unroll
    for (float& x : state.s) x *= state.totals.total;
    ptx::keep_in_place(state.s);
    ptx::wgmma_wait<1>();
    ptx::keep_in_place(e);
    update_with<Element>(e, write, at.keys(stage), state.s);
    leave_errors(shared, place, left);
    ptx::wgmma_wait<1>();
    ptx::keep_in_place(late);
#pragma unroll
    for (int i = 0; i < 16; ++i) late[i] += e[16 + i];
    update_with<Element>(late, write + 4, at.keys(stage) + 32 * kBoxRowBytes, state.s);
    ptx::keep_in_place(left);  // until here: registers that are being stored are not free for the products' operands
    const int done = chunk;
    ++chunk;
    ring.move();
    take_stage();
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(state.s);
    leave(done, stage);
    return true;
  }
  /// When a chunk has been walked.
  FLASHQLA_DEVICE void pass() {
    leave(chunk, ring.stage);
    ++chunk;
    ring.move();
    take_stage();
  }

 private:
  /// The products are the group's, and its warps have read the rest of the stage before them.
  FLASHQLA_DEVICE void leave(int done, int stage) const {
    if (place.thread != 0) return;
    leaver.leave(stage);
    ptx::mbarrier_arrive(at.solve_free(done % 2));
  }
};

/// All of a sequence's chunks, by the state group. The inner loop calls nothing and is left for all that is rare, so that
/// registers and instructions serve what is not.
template <class Element>
FLASHQLA_DEVICE void advance_group(const ChunkForwardParams& p, const AdvanceWork& work, const StateRows& rows,
                                   HopperShared& shared) {
  GroupWalk<Element> walk(work, shared);
  load_group_state(work, walk.place, p.initial_state, rows.read, walk.state.s);
  StateStore stored(p, work);
  const auto with_copy = [&](const auto& body) {
    float copy[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) copy[i] = walk.state.s[i];
    body(copy);
#pragma unroll
    for (int i = 0; i < 64; ++i) walk.state.s[i] = copy[i];
  };
  const auto save = [&](const StateTensor& to, std::int64_t row) {
    with_copy([&](float(&s)[64]) { store_group_state(work, walk.place, to, row, s); });
  };
  const bool stores = p.stored_states != StoredStates::none;
  walk.take_stage();
#pragma unroll 1
  while (walk.chunk < walk.chunks) {
    if (stores) stored.before(p, save);
    const int first = walk.chunk, end = stores ? first + 1 : walk.chunks;
    bool all = true;
#pragma unroll 1
    while (all && walk.chunk < end) all = walk.advance();
    if (!all) {
      with_copy([&](float(&s)[64]) { walk_group_chunk<Element>(p, work, walk.chunk, shared, walk.ring.stage, s); });
      walk.pass();
    }
    if (stores) stored.after(p, work, first, save);
  }
  save(p.final_state, rows.write);
}

template <class Element>
__global__ void FLASHQLA_CLUSTER(HopperShared::kBlocks) __launch_bounds__(HopperGroups::kThreads, 1)
    advance_states_hopper(const __grid_constant__ ChunkForwardParams p, const __grid_constant__ ChunkForwardMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<HopperShared*>(memory);
  const AdvanceWork work = advance_work<kGroupRows>(p, blockIdx.x);
  const StateRows rows = state_rows(p, work);
  if (rows.padding) return zero_output<kGroupRows>(p, work);  // both blocks
  make_barriers(shared);
  const HopperPlaces at(shared);
  const int group = tile::warp_number() / 4;
  if (group == HopperGroups::kCopy) {
    ptx::keep_registers<HopperGroups::kCopyRegisters>();
    const int warp = tile::warp_number() % 4;
    if (warp == 0) {
      copy_chunks<Ring::state>(p, maps, work, at);
    } else if (warp == 1) {
      copy_chunks<Ring::output>(p, maps, work, at);
    } else {
      widen_solves(work, shared, at);
    }
  } else if (group == HopperGroups::kOutput) {
    ptx::keep_registers<HopperGroups::kOutputRegisters>();
    make_outputs<Element>(p, maps, work, shared, at);
  } else {
    ptx::take_registers<HopperGroups::kStateRegisters>();
    advance_group<Element>(p, work, rows, shared);
  }
  ptx::cluster_barrier();  // no block ends while the other arrives at its barriers
#else
  __trap();  // has_hopper_code() has refused
#endif
}

template <class Element>
int start_advance_hopper(const ChunkForwardParams& params, const ChunkForwardMaps& maps, std::int64_t blocks, void* stream) {
  static_assert(sizeof(HopperShared) == kHopperSharedBytes, "the host reckons with the same bytes");
  const KernelLaunch launch{blocks, HopperGroups::kThreads, sizeof(HopperShared), stream};
  return start_kernel(advance_states_hopper<Element>, launch, params, maps);
}

}  // namespace flashqla::cuda
