// What the kernel of recurrent_forward receives.
#pragma once

#include <cstdint>

#include "cuda/views/views.hpp"
#include "flashqla/problem.hpp"

namespace flashqla::cuda {

struct RecurrentParams {
  std::int32_t sequences, heads_v, group;  // group = heads_v / heads_qk
  std::int32_t dim_k, dim_v;
  StateLayout layout;
  std::int64_t tokens;  // T
  float scale;
  float l2norm_eps;  // negative: no normalisation
  Gate gate;
  Beta beta_kind;
  TokenTensor q, k, v, o, g, beta;
  HeadTensor a_log, dt_bias;
  IndexTensor cu_seqlens, read, write, accepted, token_rows;
  StateTensor initial_state, final_state, token_states;
};

/// Starts the kernel: `padded_k` is 64, 128 or 256. Returns a cudaError_t.
int start_recurrent(const RecurrentParams& params, std::int32_t padded_k, std::int64_t blocks, void* stream);

/// Columns of V of a block.
inline constexpr int kRecurrentColumns = 32;

}  // namespace flashqla::cuda
