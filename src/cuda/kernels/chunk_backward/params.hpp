// What the kernels of chunk_backward receive. Those of chunk_forward that make units and states take the first part of it.
#pragma once

#include "cuda/kernels/chunk_forward/params.hpp"

namespace flashqla::cuda {

/// [H], written. Null: absent.
struct HeadResult {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t stride = 0;
};

/// What the way back leaves of 16 rows of V with f16 (dots.cuh): a token's k dS.e, and <S, dS> of every quarter of K.
inline constexpr int kDots = 64 + 4;

struct ChunkBackwardParams : ChunkForwardParams {
  TokenTensor d_o, d_q, d_k, d_v, d_g, d_beta;
  StateTensor d_final_state, d_initial_state;
  HeadResult d_a_log, d_dt_bias;
  KeptChunks d_kept;          // gradients of the state after every chunk, and of v
  StateTensor d_kept_states;  // f32: the gradient of the state after every chunk, a row each
  TokenTensor d_kept_values;  // f32: that of v, a chunk a batch entry
  float* dots;                // [chunk][Hv][V / 16][kDots] with f16, else null
  double* head_sums;          // [chunk][Hv][2]: a chunk's part of the gradients of a_log and dt_bias
};

}  // namespace flashqla::cuda
