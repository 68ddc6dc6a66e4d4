// States of advance_states: from and to the caller's tensors, and those asked for on the way.
#pragma once

#include "cuda/kernels/chunk_forward/shared.cuh"

namespace flashqla::cuda {

/// A warp's part of S^T in a tile: 16 rows, a quarter of K.
template <int kDimK>
struct StatePart {
  static constexpr int kCount = kDimK / kTeam / 8;
  tile::Accumulator s[kCount];
};

/// Calls body(element, k, v) for every element of the part that exists.
template <int kDimK, class Body>
FLASHQLA_DEVICE void for_each_element(const OperationParams& p, const AdvanceWork& work, const LanePlace& place,
                                      StatePart<kDimK>& part, Body body) {
  const int first = work.first_v + place.tile * kTileRows + place.row;
#pragma unroll
  for (int n = 0; n < StatePart<kDimK>::kCount; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = place.part * (kDimK / kTeam) + 8 * n + place.column + i % 2, v = first + i / 2 * 8;
      if (k < p.dim_k && v < p.dim_v) body(part.s[n].c[i], k, v);
    }
  }
}

/// Nothing if there is no such row.
template <int kDimK>
__device__ __noinline__ void store_state(const OperationParams& p, const AdvanceWork& work, LanePlace place,
                                         const StateTensor& to, std::int64_t row, StatePart<kDimK> part) {
  if (row < 0 || row >= to.rows) return;
  for_each_element<kDimK>(p, work, place, part, [&](const float& x, int k, int v) {
    store_scalar(to.data, to.dtype, element_of(to, row, work.head, k, v), x);
  });
}

template <int kDimK>
FLASHQLA_DEVICE void load_state(const OperationParams& p, const AdvanceWork& work, const LanePlace& place,
                                const StateTensor& from, std::int64_t row, StatePart<kDimK>& part) {
  tile::clear(part.s);
  if (row < 0 || row >= from.rows) return;
  for_each_element<kDimK>(p, work, place, part, [&](float& x, int k, int v) {
    x = load_scalar(from.data, from.dtype, element_of(from, row, work.head, k, v));
  });
}

}  // namespace flashqla::cuda
