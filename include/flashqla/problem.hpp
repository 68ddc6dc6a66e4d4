// Descriptors: what is to be computed, as data. This is the one place that defines the meaning of each option; docs/math.md has
// the formulas.
//
// Per value head, with state S [K,V]:   S <- exp(g_t) S;  e = beta_t (v_t - k_t S);  S <- S + k_t^T e;  o_t = scale q_t S
#pragma once

#include <cstdint>
#include <optional>

#include "flashqla/types.hpp"

namespace flashqla {

/// Tokens of one chunk in everything a caller can see (cumulative gates, A, stored states). Kernels may use shorter ones inside.
inline constexpr std::int64_t kTokensPerChunk = 64;
inline constexpr std::int64_t kMaxHeadDim = 256;

/// Where the log decay comes from.
enum class Gate : std::uint8_t {
  none,        ///< no decay: g is absent
  log_decay,   ///< g is the natural-log decay of each token; -inf forgets everything, positive values (growth) are legal
  computed,    ///< the decay is -exp(a_log) * softplus(g + dt_bias); dt_bias may be absent
  cumulative,  ///< chunk_backward only: g [fp32] is the cumulative log decay inside each 64-token chunk, as chunk_forward's
               ///< g_cumulative
};

/// Where the update strength comes from.
enum class Beta : std::uint8_t {
  one,              ///< beta is absent and taken as 1
  given,            ///< beta as it is
  sigmoid,          ///< sigmoid(beta)
  doubled_sigmoid,  ///< 2 sigmoid(beta): allows negative eigenvalues of the state transition
};

/// Order of the last two dimensions of every state tensor of a call.
enum class StateLayout : std::uint8_t { key_value, value_key };

/// States written by chunk_forward besides the final one.
enum class StoredStates : std::uint8_t {
  none,
  before_chunks,  ///< the state entering every 64-token chunk: ceil(len / 64) rows a sequence, in sequence order
  every,          ///< the state after every `states_every` tokens: floor(len / states_every) rows a sequence, in sequence order
};

/// Sizes and options that the three operations share.
struct Problem {
  Device device{};
  std::int64_t batch = 1;     ///< B; must be 1 when packed
  std::int64_t tokens = 0;    ///< T, rows of q, k, v, o per batch entry
  std::int64_t heads_qk = 1;  ///< Hq
  std::int64_t heads_v = 1;   ///< Hv, a multiple of Hq; value head h reads q/k head h / (Hv / Hq)
  std::int64_t dim_k = 128;   ///< K, 1..256
  std::int64_t dim_v = 128;   ///< V, 1..256
  DType dtype = DType::f32;   ///< of q, k, v and o: f32, bf16, f16; f64 for the reference
  bool packed = false;  ///< sequences are given by cu_seqlens (then B = 1); else each batch entry is one sequence of T tokens
  std::int64_t num_sequences = -1;  ///< N; -1 means B. With `packed` it is cu_seqlens' size minus one
  Gate gate = Gate::log_decay;
  Beta beta = Beta::given;
  bool qk_l2norm = false;  ///< q and k are replaced by x * rsqrt(sum x^2 + l2norm_eps)
  double l2norm_eps = 1e-6;
  std::optional<double> scale;  ///< default K^-1/2; 0 is a legal value
  StateLayout state_layout = StateLayout::key_value;

  std::int64_t sequences() const { return num_sequences < 0 ? batch : num_sequences; }
};

/// o and states of whole sequences, in chunks.
struct ChunkForward {
  Problem problem;
  StoredStates stored_states = StoredStates::none;
  std::int64_t states_every = 0;  ///< n, a positive multiple of 64, with StoredStates::every
};

/// Gradients of chunk_forward.
struct ChunkBackward {
  Problem problem;
  /// Upper bound of the length of a sequence, which sizes the workspace; -1 means `tokens`. A longer sequence is an error.
  std::int64_t max_sequence_tokens = -1;
};

/// A few tokens a sequence, one after another: decoding and the verification of drafts.
struct RecurrentForward {
  Problem problem;
};

}  // namespace flashqla
