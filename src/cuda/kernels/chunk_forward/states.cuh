// States of advance_states: from and to the caller's tensors, and those asked for on the way.
#pragma once

#include "cuda/kernels/chunk_forward/shared.cuh"

namespace flashqla::cuda {

/// A warp's part of S^T: 16 rows, half of K.
template <int kDimK>
struct StatePart {
  static constexpr int kTilesOfK = kDimK / 16;
  tile::Accumulator s[kTilesOfK];
};

/// Calls body(element, k, v) for every element of the part that exists.
template <int kDimK, class Body>
FLASHQLA_DEVICE void for_each_element(const OperationParams& p, const AdvanceWork& work, StatePart<kDimK>& part, Body body) {
  const LanePlace place = lane_place();
  const int first = work.first_v + place.tile * kTileRows + place.row;
#pragma unroll
  for (int n = 0; n < StatePart<kDimK>::kTilesOfK; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = place.half * (kDimK / 2) + 8 * n + place.column + i % 2, v = first + i / 2 * 8;
      if (k < p.dim_k && v < p.dim_v) body(part.s[n].c[i], k, v);
    }
  }
}

FLASHQLA_DEVICE std::int64_t element_of(const StateTensor& x, std::int64_t row, std::int64_t head, int k, int v) {
  const std::int64_t first = row * x.stride_row + head * x.stride_head;
  return first + (x.value_first != 0 ? v * x.stride_outer + k : k * x.stride_outer + v);
}

/// Nothing if there is no such row.
template <int kDimK>
__device__ __noinline__ void store_state(const OperationParams& p, const AdvanceWork& work, const StateTensor& to,
                                         std::int64_t row, StatePart<kDimK> part) {
  if (row < 0 || row >= to.rows) return;
  for_each_element<kDimK>(p, work, part, [&](const float& x, int k, int v) {
    store_scalar(to.data, to.dtype, element_of(to, row, work.head, k, v), x);
  });
}

template <int kDimK>
FLASHQLA_DEVICE void load_state(const OperationParams& p, const AdvanceWork& work, const StateTensor& from, std::int64_t row,
                                StatePart<kDimK>& part) {
  tile::clear(part.s);
  if (row < 0 || row >= from.rows) return;
  for_each_element<kDimK>(p, work, part, [&](float& x, int k, int v) {
    x = load_scalar(from.data, from.dtype, element_of(from, row, work.head, k, v));
  });
}

/// States asked for besides the last: before every chunk, or after every `states_every` chunks.
template <int kDimK>
struct StateStore {
  std::int64_t place;
  std::int64_t until;  // chunks until the next one, with StoredStates::every

  FLASHQLA_DEVICE StateStore(const ChunkForwardParams& p, const AdvanceWork& work) : place(work.rows.first_chunk), until(0) {
    if (p.stored_states != StoredStates::every) return;
    place = p.stored_begin[work.sequence];
    until = p.states_every - p.stored_phase[work.sequence];
  }
  FLASHQLA_DEVICE void store(const ChunkForwardParams& p, const AdvanceWork& work, const StatePart<kDimK>& part) {
    std::int64_t row = place;
    if (p.stored_rows.data != nullptr) row = place < p.stored_rows.size_0 ? load_index(p.stored_rows, place) : -1;
    store_state<kDimK>(p, work, p.stored, row, part);
    ++place;
  }
  FLASHQLA_DEVICE void before(const ChunkForwardParams& p, const AdvanceWork& work, const StatePart<kDimK>& part) {
    if (p.stored_states == StoredStates::before_chunks) store(p, work, part);
  }
  /// `whole`: the chunk ends at a multiple of 64 tokens.
  FLASHQLA_DEVICE void after(const ChunkForwardParams& p, const AdvanceWork& work, bool whole, const StatePart<kDimK>& part) {
    if (p.stored_states != StoredStates::every || !whole || --until > 0) return;
    until = p.states_every;
    store(p, work, part);
  }
};

}  // namespace flashqla::cuda
