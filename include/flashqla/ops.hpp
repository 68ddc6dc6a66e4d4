// The three operations: descriptor -> plan -> run. plan() checks the descriptor, chooses an implementation and says how much
// workspace run() needs; run() checks the tensors, then computes, without allocating. A Plan may be kept and run from several
// threads at once (each with its own workspace).
//
// Shapes use the descriptor's names (B T Hq Hv K V, N sequences). A state tensor is [rows, Hv, K, V] (StateLayout::key_value) or
// [rows, Hv, V, K]. Strides are free, except that the last dimension of q, k, v, o, their gradients, every state and `a` must be
// contiguous. Index tensors (cu_seqlens, rows, lengths) are i32 or i64. g, beta, a_log, dt_bias are f32, bf16 or f16, each on its
// own (f64 too with the f64 reference).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "flashqla/error.hpp"
#include "flashqla/parallel.hpp"
#include "flashqla/problem.hpp"
#include "flashqla/types.hpp"

namespace flashqla {

/// What all operations read.
struct InputTensors {
  ConstTensorView q;        ///< [B,T,Hq,K]
  ConstTensorView k;        ///< [B,T,Hq,K]
  ConstTensorView v;        ///< [B,T,Hv,V]
  ConstTensorView g;        ///< [B,T,Hv]; absent with Gate::none
  ConstTensorView beta;     ///< [B,T,Hv]; absent with Beta::one
  ConstTensorView a_log;    ///< [Hv]; only with Gate::computed
  ConstTensorView dt_bias;  ///< [Hv]; optional, only with Gate::computed
  /// [N+1], starts at 0, never decreases, ends at or before T; only when packed. Rows past the last offset belong to no sequence:
  /// o and every gradient are zero there.
  ConstTensorView cu_seqlens;
};

/// Where states come from and go to. Without indices, `initial_state` and `final_state` have N rows, the latter in f32 (f64 with
/// f64 problems). With indices the two are pools (f32, bf16 or f16; any number of rows), and may be the same memory: the state is
/// then updated in place. `stored` and `token_states` may be that pool, too (same pointer, dtype and strides). No row of a pool
/// may be written twice, or written for one sequence and read for another; the row that a sequence starts from may be written for
/// that sequence.
struct StateTensors {
  ConstTensorView initial_state;  ///< [N or slots, Hv, K, V]; absent: every sequence starts from zero
  TensorView final_state;         ///< [N or slots, Hv, K, V]; absent: final states are not wanted
  /// [N], or [N,P] with `accepted`: row of `initial_state` where sequence n starts; -1 starts from zero.
  ConstTensorView read;
  /// [N]: row of `final_state` that receives sequence n's last state; -1 does not write it. If both are -1 the sequence is
  /// padding: its rows of o are zero and nothing else is touched.
  ConstTensorView write;
  /// [N], recurrent_forward only: sequence n starts at row read[n, accepted[n] - 1] (1 <= accepted <= P).
  ConstTensorView accepted;
};

struct ChunkForwardTensors {
  InputTensors inputs;
  StateTensors states;
  TensorView o;       ///< [B,T,Hv,V]
  TensorView stored;  ///< [rows,Hv,K,V] in f32, bf16 or f16, with StoredStates other than none
  /// [number of stored states], optional with StoredStates::every: row of `stored` for each, -1 skips it.
  ConstTensorView stored_rows;
  /// [N], optional with StoredStates::every: tokens that precede each sequence; states are then stored where (prefix + position)
  /// is a multiple of n, floor((prefix + len) / n) - floor(prefix / n) a sequence.
  ConstTensorView prefix_lengths;
  /// [B,T,Hv] f32 (f64 with f64 problems), optional: cumulative log decay inside each 64-token chunk (a decay below -128, where
  /// its exponential is zero in f32, counts as -128).
  TensorView g_cumulative;
  /// [B,T,Hv,64] in q's dtype, optional: (I + stril(beta_i k_i.k_j))^-1 of each chunk, ungated; column = position in the chunk.
  TensorView a;
  /// [saved_elements()] f32, optional: what chunk_backward of the same inputs can use instead of computing it again. Opaque; all
  /// of it is written.
  TensorView saved;
};

struct ChunkBackwardTensors {
  InputTensors inputs;
  ConstTensorView initial_state;  ///< [N,Hv,K,V]; absent: zero
  ConstTensorView d_o;            ///< [B,T,Hv,V]; absent: zero
  ConstTensorView d_final_state;  ///< [N,Hv,K,V]; absent: zero
  /// [saved_elements()] f32, optional: what chunk_forward left there for the same inputs and initial state. Used if the
  /// implementation knows how to, and never needed: without it the errors of every token are computed again.
  ConstTensorView saved;
  // Each output may be absent when it is not wanted.
  TensorView d_q, d_k;  ///< [B,T,Hq,K]; in q's dtype (f32 allowed too)
  TensorView d_v;       ///< [B,T,Hv,V]; likewise
  TensorView d_g;  ///< [B,T,Hv], f32 or the dtype of g: with respect to g as given (with Gate::cumulative: to the raw log decay)
  TensorView d_beta;           ///< [B,T,Hv], f32 or the dtype of beta: with respect to beta as given
  TensorView d_initial_state;  ///< [N,Hv,K,V], f32 or the dtype of initial_state
  TensorView d_a_log;          ///< [Hv], f32 or the dtype of a_log
  TensorView d_dt_bias;        ///< [Hv], f32 or the dtype of dt_bias
};

struct RecurrentForwardTensors {
  InputTensors inputs;
  StateTensors states;
  TensorView o;             ///< [B,T,Hv,V]
  TensorView token_states;  ///< [rows,Hv,K,V], optional: the state after every token
  /// [B,T], optional: row of token_states for each token, -1 does not store it. Default: row b * T + t.
  ConstTensorView token_rows;
};

/// Scratch memory of run(): at least the plan's workspace_bytes, 64-byte aligned.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// What an implementation says to a problem: `reason` is empty when it would take it.
struct ImplementationReport {
  std::string name;
  std::string reason;
};

namespace detail {
struct Implementation;
}

/// The outcome of planning. Copyable, immutable, valid for any tensors that fit the descriptor.
template <class Descriptor>
struct Plan {
  Descriptor descriptor;
  std::string implementation;       ///< name of the chosen implementation, such as "cpu-avx512"
  std::size_t workspace_bytes = 0;  ///< for run() with at most `threads` threads
  int threads = 1;
  const detail::Implementation* chosen = nullptr;
};

/// `threads`: how many the later run() may use, 1 to 1024; more threads in its Parallel are not used.
/// Throws InvalidArgument, InvalidType or Unsupported.
Plan<ChunkForward> plan(const ChunkForward& descriptor, int threads = 1);
Plan<ChunkBackward> plan(const ChunkBackward& descriptor, int threads = 1);
Plan<RecurrentForward> plan(const RecurrentForward& descriptor, int threads = 1);

/// Checks the tensors against the plan (throws InvalidArgument or InvalidType before anything is written), then computes.
void run(const Plan<ChunkForward>& plan, const ChunkForwardTensors& tensors, Workspace workspace, const Parallel& parallel);
void run(const Plan<ChunkBackward>& plan, const ChunkBackwardTensors& tensors, Workspace workspace, const Parallel& parallel);
void run(const Plan<RecurrentForward>& plan, const RecurrentForwardTensors& tensors, Workspace workspace,
         const Parallel& parallel);

/// The same on a CUDA device, for a plan whose problem names one: every tensor and the workspace are memory of that device, the
/// work is put on the stream, and nothing waits for it. Contents of tensors (offsets, rows) are not looked at before: kernels
/// stay inside the tensors whatever they say.
void run(const Plan<ChunkForward>& plan, const ChunkForwardTensors& tensors, Workspace workspace, Stream stream);
void run(const Plan<ChunkBackward>& plan, const ChunkBackwardTensors& tensors, Workspace workspace, Stream stream);
void run(const Plan<RecurrentForward>& plan, const RecurrentForwardTensors& tensors, Workspace workspace, Stream stream);

/// Everything that run() checks, workspace and threads excepted. Tensors may come without memory (null data): those are checked
/// in dtype, shape and strides, and unless all have memory no contents (offsets, rows) are looked at. Allocates.
void check(const Plan<ChunkForward>& plan, const ChunkForwardTensors& tensors);
void check(const Plan<ChunkBackward>& plan, const ChunkBackwardTensors& tensors);
void check(const Plan<RecurrentForward>& plan, const RecurrentForwardTensors& tensors);

/// Plan and run in one call with a workspace of its own, on own_pool(). For tests and small programs.
void chunk_forward(const ChunkForward& descriptor, const ChunkForwardTensors& tensors);
void chunk_backward(const ChunkBackward& descriptor, const ChunkBackwardTensors& tensors);
void recurrent_forward(const RecurrentForward& descriptor, const RecurrentForwardTensors& tensors);

/// Every implementation in the order in which they are tried, with its answer.
std::vector<ImplementationReport> explain(const ChunkForward& descriptor);
std::vector<ImplementationReport> explain(const ChunkBackward& descriptor);
std::vector<ImplementationReport> explain(const RecurrentForward& descriptor);

/// Elements of `saved` if the implementation that would run leaves something there, else 0: about (K / 64 + 1) V a token and
/// value head, with K rounded up to 16 and V to 32.
std::int64_t saved_elements(const ChunkForward& descriptor);

/// Rows that `stored` needs (one for each stored state).
std::int64_t num_stored_states(const ChunkForward& descriptor, const ConstTensorView& cu_seqlens,
                               const ConstTensorView& prefix_lengths);

}  // namespace flashqla
