// chunk_backward with f32 on a CUDA device: its part of the workspace, its launches.
#pragma once

#include "common/arguments.hpp"
#include "cuda/kernels/chunk_backward/params.hpp"

namespace flashqla::cuda {

/// States and rows of values are kept in f32. So that they take no more memory than those of bf16 inputs, the q/k heads are
/// worked on in two halves, one after the other, in the same memory: this many at a time.
inline std::int64_t heads_qk_at_once(const Problem& p) { return p.dtype == DType::f32 ? (p.heads_qk + 1) / 2 : p.heads_qk; }

/// What is kept of every chunk and value head that is worked on.
struct FloatKept {
  float *states = nullptr, *d_states = nullptr;  // [chunk][Hv][K][V]
  float *errors = nullptr, *d_values = nullptr;  // [chunk][Hv][64][V]
};

/// Everything after the schedule. `params` has all but what `kept` holds.
void launch_chunk_backward_f32(const Problem& problem, const ChunkBackwardParams& params, const FloatKept& kept, Stream stream);

}  // namespace flashqla::cuda
