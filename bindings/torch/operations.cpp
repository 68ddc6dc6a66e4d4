#include "operations.hpp"

#include <algorithm>

namespace flashqla::bindings {
namespace {

Gate gate_of(const std::string& name) {
  if (name == "none") return Gate::none;
  if (name == "log_decay") return Gate::log_decay;
  if (name == "computed") return Gate::computed;
  if (name == "cumulative") return Gate::cumulative;
  throw InvalidArgument("gate: expected none, log_decay, computed or cumulative, got " + name);
}

Beta beta_of(const std::string& name) {
  if (name == "one") return Beta::one;
  if (name == "given") return Beta::given;
  if (name == "sigmoid") return Beta::sigmoid;
  if (name == "doubled_sigmoid") return Beta::doubled_sigmoid;
  throw InvalidArgument("beta_mode: expected one, given, sigmoid or doubled_sigmoid, got " + name);
}

/// Python's None reaches an op as an undefined tensor.
void expect_tensor(const char* name, const Tensor& tensor) {
  if (!tensor.defined()) throw InvalidType(std::string(name) + ": expected Tensor, got NoneType");
}

/// q, k and v have one dtype. If two agree, the third is the wrong one.
DType expect_one_dtype(const Tensor& q, const Tensor& k, const Tensor& v) {
  const DType of_q = dtype_of("q", q), of_k = dtype_of("k", k), of_v = dtype_of("v", v);
  const auto refuse = [](const std::string& name, DType expected, const char* as, DType got) {
    throw InvalidType(name + ": expected " + name_of(expected) + " as " + as + ", got " + name_of(got));
  };
  if (of_q == of_k && of_q == of_v) return of_q;
  if (of_q == of_k) refuse("v", of_q, "q and k", of_v);
  if (of_q == of_v) refuse("k", of_q, "q and v", of_k);
  if (of_k == of_v) refuse("q", of_k, "k and v", of_q);
  throw InvalidType(std::string("q, k, v: expected one dtype, got ") + name_of(of_q) + ", " + name_of(of_k) + " and " +
                    name_of(of_v));
}

void expect_rank_4(const char* name, const Tensor& tensor) {
  if (tensor.dim() == 4) return;
  throw InvalidArgument(std::string(name) + ": expected 4 dimensions [batch, tokens, heads, head size], got " +
                        std::to_string(tensor.dim()));
}

Tensor none_of(DType dtype, Placement placement) { return empty({0}, dtype, placement); }

/// A result that has no element because it is not wanted becomes an absent view.
TensorView wanted_view(const char* name, const Tensor& tensor, bool wanted) {
  return wanted ? mutable_view(name, tensor) : TensorView();
}

}  // namespace

Inputs::Inputs(ArgumentReader& reader)
    : q(reader.tensor()),
      k(reader.tensor()),
      v(reader.tensor()),
      g(reader.optional_tensor()),
      beta(reader.optional_tensor()),
      a_log(reader.optional_tensor()),
      dt_bias(reader.optional_tensor()),
      cu_seqlens(reader.optional_tensor()) {
  problem.scale = reader.read<std::optional<double>>();
  gate_ = reader.text();
  beta_mode_ = reader.text();
  problem.qk_l2norm = reader.read<bool>();
  problem.state_layout = reader.read<bool>() ? StateLayout::value_key : StateLayout::key_value;
}

void Inputs::interpret(Device device) {
  problem.device = device;
  problem.gate = gate_of(gate_);
  problem.beta = beta_of(beta_mode_);
  expect_tensor("q", q);
  expect_tensor("k", k);
  expect_tensor("v", v);
  expect_rank_4("q", q);
  expect_rank_4("v", v);
  problem.batch = q.size(0);
  problem.tokens = q.size(1);
  problem.heads_qk = q.size(2);
  problem.dim_k = q.size(3);
  problem.heads_v = v.size(2);
  problem.dim_v = v.size(3);
  problem.dtype = expect_one_dtype(q, k, v);
  problem.packed = cu_seqlens.has_value();
  if (problem.packed) problem.num_sequences = std::max<std::int64_t>(cu_seqlens->numel() - 1, 0);
  q = with_contiguous_rows(q);
  k = with_contiguous_rows(k);
  v = with_contiguous_rows(v);
}

InputTensors Inputs::views() const {
  return {const_view("q", q),
          const_view("k", k),
          const_view("v", v),
          const_view("g", g),
          const_view("beta", beta),
          const_view("A_log", a_log),
          const_view("dt_bias", dt_bias),
          const_view("cu_seqlens", cu_seqlens)};
}

std::vector<std::int64_t> Inputs::lengths() const {
  if (!problem.packed) return std::vector<std::int64_t>(static_cast<std::size_t>(problem.batch), problem.tokens);
  const ConstTensorView offsets = const_view("cu_seqlens", cu_seqlens);
  if (offsets.data == nullptr || offsets.rank != 1 || (offsets.dtype != DType::i64 && offsets.dtype != DType::i32)) return {};
  const auto offset = [&](std::int64_t n) {
    const std::int64_t index = n * offsets.strides[0];
    const std::int64_t value = offsets.dtype == DType::i64 ? static_cast<const std::int64_t*>(offsets.data)[index]
                                                           : static_cast<const std::int32_t*>(offsets.data)[index];
    return std::clamp<std::int64_t>(value, 0, problem.tokens);
  };
  std::vector<std::int64_t> lengths;
  for (std::int64_t n = 0; n + 1 < offsets.sizes[0]; ++n) lengths.push_back(std::max<std::int64_t>(offset(n + 1) - offset(n), 0));
  return lengths;
}

bool Inputs::offsets_readable() const { return problem.packed && problem.device.type == DeviceType::cpu; }

std::int64_t Inputs::num_chunks() const {
  if (problem.packed && !offsets_readable()) return problem.tokens / kTokensPerChunk + problem.sequences();
  std::int64_t chunks = 0;
  for (std::int64_t length : lengths()) chunks += (length + kTokensPerChunk - 1) / kTokensPerChunk;
  return chunks;
}

std::int64_t Inputs::longest_sequence() const {
  if (!offsets_readable()) return problem.tokens;
  std::int64_t longest = 0;
  for (std::int64_t length : lengths()) longest = std::max(longest, length);
  return longest;
}

Tensor Inputs::empty_like_v(Placement placement) const {
  return empty({problem.batch, problem.tokens, problem.heads_v, problem.dim_v}, problem.dtype, placement);
}

Tensor Inputs::empty_states(bool wanted, Placement placement) const {
  if (!wanted) return none_of(state_dtype(), placement);
  return empty(shape_of_states({problem.sequences()}), state_dtype(), placement);
}

std::vector<std::int64_t> Inputs::shape_of_states(std::vector<std::int64_t> leading) const {
  const bool v_first = problem.state_layout == StateLayout::value_key;
  leading.push_back(problem.heads_v);
  leading.push_back(v_first ? problem.dim_v : problem.dim_k);
  leading.push_back(v_first ? problem.dim_k : problem.dim_v);
  return leading;
}

template <class DescriptorType, class TensorsType>
ForwardOp<DescriptorType, TensorsType>::ForwardOp(ArgumentReader& reader, Placement placement)
    : inputs(reader), initial_state(reader.optional_tensor()), want_final_state(reader.read<bool>()) {
  inputs.interpret(placement.device);
  initial_state = with_contiguous_rows(initial_state);
  o = inputs.empty_like_v(placement);
  final_state = inputs.empty_states(want_final_state, placement);
}

template <class DescriptorType, class TensorsType>
TensorsType ForwardOp<DescriptorType, TensorsType>::tensors() const {
  TensorsType tensors;
  tensors.inputs = inputs.views();
  tensors.states.initial_state = const_view("initial_state", initial_state);
  tensors.states.final_state = wanted_view("final_state", final_state, want_final_state);
  tensors.o = mutable_view("o", o);
  return tensors;
}

template <class DescriptorType, class TensorsType>
void ForwardOp<DescriptorType, TensorsType>::write_results(ResultWriter& results) const {
  results.write(o);
  results.write(final_state);
}

template struct ForwardOp<ChunkForward, ChunkForwardTensors>;
template struct ForwardOp<RecurrentForward, RecurrentForwardTensors>;

ChunkForwardTrainingOp::ChunkForwardTrainingOp(ArgumentReader& reader, Placement placement)
    : forward(reader, placement), save(reader.read<bool>()) {
  const std::int64_t elements = save ? saved_elements(forward.descriptor()) : 0;
  saved = empty({elements}, DType::f32, placement);
}

ChunkForwardTensors ChunkForwardTrainingOp::tensors() const {
  ChunkForwardTensors tensors = forward.tensors();
  tensors.saved = wanted_view("saved", saved, saved.numel() > 0);
  return tensors;
}

void ChunkForwardTrainingOp::write_results(ResultWriter& results) const {
  forward.write_results(results);
  results.write(saved);
}

ChunkForwardLowLevelOp::ChunkForwardLowLevelOp(ArgumentReader& reader, Placement placement)
    : inputs(reader),
      initial_state(reader.optional_tensor()),
      want_final_state(reader.read<bool>()),
      want_h(reader.read<bool>()) {
  inputs.interpret(placement.device);
  const Problem& problem = inputs.problem;
  initial_state = with_contiguous_rows(initial_state);
  const DType gate_dtype = inputs.state_dtype();
  g_cumulative = empty({problem.batch, problem.tokens, problem.heads_v}, gate_dtype, placement);
  a = empty({problem.batch, problem.tokens, problem.heads_v, kTokensPerChunk}, problem.dtype, placement);
  o = inputs.empty_like_v(placement);
  if (want_h) {
    h = empty(inputs.shape_of_states({inputs.num_chunks()}), problem.dtype, placement);
  } else {
    h = none_of(problem.dtype, placement);
  }
  final_state = inputs.empty_states(want_final_state, placement);
}

ChunkForward ChunkForwardLowLevelOp::descriptor() const {
  return {inputs.problem, want_h ? StoredStates::before_chunks : StoredStates::none, 0};
}

ChunkForwardTensors ChunkForwardLowLevelOp::tensors() const {
  ChunkForwardTensors tensors;
  tensors.inputs = inputs.views();
  tensors.states.initial_state = const_view("initial_state", initial_state);
  tensors.states.final_state = wanted_view("final_state", final_state, want_final_state);
  tensors.o = mutable_view("o", o);
  tensors.stored = wanted_view("h", h, want_h);
  tensors.g_cumulative = mutable_view("g", g_cumulative);
  tensors.a = mutable_view("A", a);
  return tensors;
}

void ChunkForwardLowLevelOp::write_results(ResultWriter& results) const {
  results.write(g_cumulative);
  results.write(a);
  results.write(o);
  results.write(h);
  results.write(final_state);
}

ChunkForwardPoolOp::ChunkForwardPoolOp(ArgumentReader& reader, Placement placement)
    : inputs(reader),
      state(reader.tensor()),
      read(reader.optional_tensor()),
      write(reader.optional_tensor()),
      states_every(reader.read<std::optional<std::int64_t>>()),
      checkpoints(reader.optional_tensor()),
      checkpoint_rows(reader.optional_tensor()),
      prefix_lengths(reader.optional_tensor()) {
  inputs.interpret(placement.device);
  o = inputs.empty_like_v(placement);
}

ChunkForward ChunkForwardPoolOp::descriptor() const {
  return {inputs.problem, states_every ? StoredStates::every : StoredStates::none, states_every.value_or(0)};
}

ChunkForwardTensors ChunkForwardPoolOp::tensors() const {
  ChunkForwardTensors tensors;
  tensors.inputs = inputs.views();
  tensors.states.initial_state = const_view("state", state);
  tensors.states.final_state = mutable_view("state", state);
  tensors.states.read = const_view("read_rows", read);
  tensors.states.write = const_view("write_rows", write ? write : read);
  tensors.o = mutable_view("o", o);
  if (states_every) tensors.stored = mutable_view("checkpoints", checkpoints ? *checkpoints : state);
  tensors.stored_rows = const_view("checkpoint_rows", checkpoint_rows);
  tensors.prefix_lengths = const_view("prefix_lengths", prefix_lengths);
  return tensors;
}

RecurrentForwardPoolOp::RecurrentForwardPoolOp(ArgumentReader& reader, Placement placement)
    : inputs(reader),
      state(reader.tensor()),
      read(reader.optional_tensor()),
      write(reader.optional_tensor()),
      accepted(reader.optional_tensor()),
      token_states(reader.optional_tensor()),
      token_rows(reader.optional_tensor()) {
  inputs.interpret(placement.device);
  o = inputs.empty_like_v(placement);
}

RecurrentForwardTensors RecurrentForwardPoolOp::tensors() const {
  RecurrentForwardTensors tensors;
  tensors.inputs = inputs.views();
  tensors.states.initial_state = const_view("state", state);
  // Rows to start from that belong to tokens say nothing about where a last state goes, so without `write` none is written.
  const bool writes = write.has_value() || !accepted.has_value();
  tensors.states.final_state = wanted_view("state", state, writes);
  tensors.states.read = const_view("read_rows", read);
  tensors.states.write = writes ? const_view("write_rows", write ? write : read) : ConstTensorView();
  tensors.states.accepted = const_view("accepted", accepted);
  tensors.o = mutable_view("o", o);
  if (token_states) tensors.token_states = mutable_view("token_states", token_states);
  if (!token_states && token_rows) tensors.token_states = mutable_view("state", state);
  tensors.token_rows = const_view("token_rows", token_rows);
  return tensors;
}

}  // namespace flashqla::bindings
