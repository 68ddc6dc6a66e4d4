// One struct per op: reads its arguments in the order of its schema, owns the tensors (copies included) and the results, and
// offers the descriptor and views that the library takes. What the arguments mean is said in schema.cpp and in include/flashqla.
#pragma once

#include "boxing.hpp"
#include "convert.hpp"

namespace flashqla::bindings {

/// q, k, v, g, beta, A_log, dt_bias, cu_seqlens and the options that all ops share.
class Inputs {
 public:
  explicit Inputs(ArgumentReader& reader);
  /// Fills in `problem`; throws. Called when every argument of the op has been read.
  void interpret(Device device);

  Tensor q, k, v;
  OptionalTensor g, beta, a_log, dt_bias, cu_seqlens;
  Problem problem;

  InputTensors views() const;
  Tensor empty_like_v(Placement placement) const;
  /// One state a sequence, or a tensor without elements if not wanted.
  Tensor empty_states(bool wanted, Placement placement) const;
  /// [leading..., Hv, K, V] in the layout of the call.
  std::vector<std::int64_t> shape_of_states(std::vector<std::int64_t> leading) const;
  /// Chunks of all sequences and tokens of the longest. On a CUDA device, where offsets are not read, no less than that.
  std::int64_t num_chunks() const;
  std::int64_t longest_sequence() const;
  /// Of states that no caller chose a type for: f32, or f64 in the f64 reference.
  DType state_dtype() const { return problem.dtype == DType::f64 ? DType::f64 : DType::f32; }

 private:
  bool offsets_readable() const;
  /// Tokens of each sequence. The offsets have not been checked yet: whatever they say, every length lies in [0, T].
  std::vector<std::int64_t> lengths() const;

  std::string gate_, beta_mode_;
};

/// o and the last states, as new tensors: the same arguments for the chunked operation and for the recurrent one.
template <class DescriptorType, class TensorsType>
struct ForwardOp {
  using Descriptor = DescriptorType;
  ForwardOp(ArgumentReader& reader, Placement placement);
  Descriptor descriptor() const { return {inputs.problem}; }
  TensorsType tensors() const;
  void write_results(ResultWriter& results) const;

  Inputs inputs;
  OptionalTensor initial_state;
  bool want_final_state;
  Tensor o, final_state;  // final_state has no element when it is not wanted
};
using ChunkForwardOp = ForwardOp<ChunkForward, ChunkForwardTensors>;
using RecurrentForwardOp = ForwardOp<RecurrentForward, RecurrentForwardTensors>;

/// chunk_forward that leaves for the backward what its implementation can.
struct ChunkForwardTrainingOp {
  using Descriptor = ChunkForward;
  ChunkForwardTrainingOp(ArgumentReader& reader, Placement placement);
  Descriptor descriptor() const { return forward.descriptor(); }
  ChunkForwardTensors tensors() const;
  void write_results(ResultWriter& results) const;

  ChunkForwardOp forward;
  bool save;
  Tensor saved;
};

struct ChunkForwardLowLevelOp {
  using Descriptor = ChunkForward;
  ChunkForwardLowLevelOp(ArgumentReader& reader, Placement placement);
  Descriptor descriptor() const;
  ChunkForwardTensors tensors() const;
  void write_results(ResultWriter& results) const;

  Inputs inputs;
  OptionalTensor initial_state;
  bool want_final_state, want_h;
  Tensor g_cumulative, a, o, h, final_state;  // h and final_state have no element when not wanted
};

struct ChunkForwardPoolOp {
  using Descriptor = ChunkForward;
  ChunkForwardPoolOp(ArgumentReader& reader, Placement placement);
  Descriptor descriptor() const;
  ChunkForwardTensors tensors() const;
  void write_results(ResultWriter& results) const { results.write(o); }

  Inputs inputs;
  Tensor state;
  OptionalTensor read, write;
  std::optional<std::int64_t> states_every;  // absent: no checkpoints
  OptionalTensor checkpoints, checkpoint_rows, prefix_lengths;
  Tensor o;
};

struct ChunkBackwardOp {
  using Descriptor = ChunkBackward;
  ChunkBackwardOp(ArgumentReader& reader, Placement placement);
  Descriptor descriptor() const;
  ChunkBackwardTensors tensors() const;
  void write_results(ResultWriter& results) const;

  Inputs inputs;
  OptionalTensor initial_state, d_o, d_final_state;
  std::int64_t wanted;  // bit i: the i-th result below
  OptionalTensor saved;
  Tensor d_q, d_k, d_v, d_g, d_beta, d_initial_state, d_a_log, d_dt_bias;  // no element when not wanted
};

struct RecurrentForwardPoolOp {
  using Descriptor = RecurrentForward;
  RecurrentForwardPoolOp(ArgumentReader& reader, Placement placement);
  Descriptor descriptor() const { return {inputs.problem}; }
  RecurrentForwardTensors tensors() const;
  void write_results(ResultWriter& results) const { results.write(o); }

  Inputs inputs;
  Tensor state;
  OptionalTensor read, write, accepted;
  OptionalTensor token_states, token_rows;
  Tensor o;
};

}  // namespace flashqla::bindings
