// What the kernel of recurrent_forward receives.
#pragma once

#include <cstdint>

#include "cuda/views/views.hpp"
#include "flashqla/problem.hpp"

namespace flashqla::cuda {

struct RecurrentParams : OperationParams {
  std::int32_t sequences;
  StateLayout layout;
  std::int64_t tokens;  // T
  IndexTensor cu_seqlens, read, write, accepted, token_rows;
  StateTensor initial_state, final_state, token_states;
};

/// Starts the kernel: `padded_k` is 64, 128 or 256. Returns a cudaError_t.
int start_recurrent(const RecurrentParams& params, std::int32_t padded_k, std::int64_t blocks, void* stream);

/// Columns of V of a block.
inline constexpr int kRecurrentColumns = 32;

}  // namespace flashqla::cuda
