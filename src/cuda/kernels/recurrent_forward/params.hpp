// What the kernel of recurrent_forward receives. Strides are in bytes, so that an address is products and sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/views/views.hpp"
#include "flashqla/problem.hpp"

namespace flashqla::cuda {

/// Columns of V of a block.
inline constexpr int kRecurrentColumns = 32;

/// Division by a number that the host knows, of dividends below 2^31: n / d = floor(2 n m / 2^32 / 2^shift), m = ceil(2^(31 +
/// shift) / d), 2^shift the least power of two that is not below d.
struct Divisor {
  std::uint32_t divisor = 1, multiplier = 0x80000000u, shift = 0;
};

/// Enumerations are 32 bits wide here, as the kernel compares them.
enum class Number : std::int32_t { f32, bf16, f16 };

/// [B,T,H,D] with a contiguous last dimension, or [B,T,H]. Null: absent.
struct StepTensor {
  std::byte* data = nullptr;
  Number type = Number::f32;
  std::int64_t stride_sequence = 0;  // that of a batch entry; with cu_seqlens, of a token
  std::int64_t stride_token = 0, stride_head = 0;
};

/// [H]. Null: absent.
struct HeadNumbers {
  const std::byte* data = nullptr;
  Number type = Number::f32;
  std::int64_t stride = 0;
};

/// [rows,Hv,K,V] or [rows,Hv,V,K]. Absent: no rows.
struct SlabTensor {
  std::byte* data = nullptr;
  Number type = Number::f32;
  std::int32_t bytes = 4;    // of an element
  std::int32_t vectors = 0;  // four neighbouring elements lie so that they can be moved together, and stride_outer has 32 bits
  std::int64_t rows = 0;
  std::int64_t stride_row = 0, stride_head = 0, stride_outer = 0;  // outer: the dimension before the last
};

/// Indices of 32 or 64 bits in one or two dimensions. Null: absent.
struct IndexRows {
  const std::byte* data = nullptr;
  std::int32_t wide = 0;  // 64 bits
  std::int64_t stride_0 = 0, stride_1 = 0;
  std::int64_t size_1 = 0;
};

/// Which row of a state tensor: none, that of the sequence's or token's number, the one that an index says, or the last accepted
/// draft's index.
enum class RowSource : std::int32_t { none, number, index, draft };
enum class GateKind : std::int32_t { none, log_decay, computed };
enum class BetaKind : std::int32_t { one, given, sigmoid, doubled_sigmoid };

struct RecurrentParams {
  Divisor slabs, heads, group;  // slabs of a head, heads_v, heads_v / heads_qk
  std::int32_t sequences, dim_k, dim_v;
  std::int32_t packed;  // there is cu_seqlens
  std::int32_t pads;    // sequences whose rows to read and to write are both below 0 are padding: o is zero, nothing else touched
  std::int32_t vectors;  // four neighbouring elements of q and k can be moved together
  StateLayout layout;
  Number type;              // of q, k, v, o
  std::int32_t bytes;       // of their elements
  float scale, l2norm_eps;  // l2norm_eps: negative without normalisation
  GateKind gate;
  BetaKind beta_kind;
  RowSource read_from, write_to, keep_in;  // of initial_state, final_state and, a row a token, token_states
  std::int64_t tokens;                     // T
  StepTensor q, k, v, o, g, beta;
  HeadNumbers a_log, dt_bias;
  IndexRows cu_seqlens, read, write, accepted, token_rows;
  SlabTensor initial_state, final_state, token_states;
};

/// What a call asks of the kernel: anything, or the common step, in which every sequence is a batch entry of one token, all slabs
/// are whole and q, k and all states can be moved four elements at a time.
enum class Steps { any, one_even };

/// Starts the kernel: `padded_k` is 64, 128 or 256. Returns a cudaError_t.
int start_recurrent(const RecurrentParams& params, std::int32_t padded_k, Steps steps, std::int64_t blocks, void* stream);

}  // namespace flashqla::cuda
