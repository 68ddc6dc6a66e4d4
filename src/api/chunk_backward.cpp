// plan, run and explain of chunk_backward.
#include <initializer_list>

#include "api/fetched.hpp"
#include "api/inputs.hpp"
#include "api/operation.hpp"
#include "api/states.hpp"

namespace flashqla {

using namespace api;

namespace {

/// Element types of the gradient of a tensor: f32, the tensor's own, and f64 in a float64 problem.
DTypeSet gradient_dtypes(const Problem& p, DType own) {
  const DTypeSet set{DType::f32, own};
  return p.dtype == DType::f64 ? set.with(DType::f64) : set;
}

DType own_dtype(const ConstTensorView& view) { return view.present() ? view.dtype : DType::f32; }

void check_gradients(Checker& checker, const Problem& p, const ChunkBackwardTensors& t) {
  const Dimension batch{"B", p.batch}, tokens{"T", p.tokens}, heads_qk{"Hq", p.heads_qk}, heads{"Hv", p.heads_v}, k{"K", p.dim_k},
      v{"V", p.dim_v};
  const DTypeSet large = gradient_dtypes(p, p.dtype);
  checker.optional(t.d_q, {"d_q", {batch, tokens, heads_qk, k}, large, Role::output, LastDimension::contiguous});
  checker.optional(t.d_k, {"d_k", {batch, tokens, heads_qk, k}, large, Role::output, LastDimension::contiguous});
  checker.optional(t.d_v, {"d_v", {batch, tokens, heads, v}, large, Role::output, LastDimension::contiguous});
  if (p.gate == Gate::none) require_absent(t.d_g, "d_g", "only with a Gate other than none");
  if (p.beta == Beta::one) require_absent(t.d_beta, "d_beta", "only with a Beta other than one");
  if (!t.inputs.a_log.present()) require_absent(t.d_a_log, "d_a_log", "only with a_log");
  if (!t.inputs.dt_bias.present()) require_absent(t.d_dt_bias, "d_dt_bias", "only with dt_bias");
  checker.optional(t.d_g, {"d_g", {batch, tokens, heads}, gradient_dtypes(p, own_dtype(t.inputs.g)), Role::output});
  checker.optional(t.d_beta, {"d_beta", {batch, tokens, heads}, gradient_dtypes(p, own_dtype(t.inputs.beta)), Role::output});
  checker.optional(t.d_a_log, {"d_a_log", {heads}, gradient_dtypes(p, own_dtype(t.inputs.a_log)), Role::output});
  checker.optional(t.d_dt_bias, {"d_dt_bias", {heads}, gradient_dtypes(p, own_dtype(t.inputs.dt_bias)), Role::output});
}

void check_states(Checker& checker, const Problem& p, const ChunkBackwardTensors& t) {
  const Dimension rows{"N", p.sequences()};
  if (t.initial_state.present()) require_state(checker, t.initial_state, "initial_state", p, rows, small_dtypes(p), Role::input);
  if (t.d_final_state.present()) require_state(checker, t.d_final_state, "d_final_state", p, rows, small_dtypes(p), Role::input);
  if (t.d_initial_state.present()) {
    require_state(checker, t.d_initial_state, "d_initial_state", p, rows, gradient_dtypes(p, own_dtype(t.initial_state)),
                  Role::output);
  }
}

void check_lengths(const Sequences& sequences, std::int64_t longest) {
  for (std::int64_t n = 0; n < sequences.count; ++n) {
    if (sequences.length(n) > longest) {
      invalid("cu_seqlens", "sequences of at most max_sequence_tokens = " + std::to_string(longest) + " tokens",
              std::to_string(sequences.length(n)) + " for sequence " + std::to_string(n));
    }
  }
}

ChunkBackwardArguments checked(const ChunkBackward& d, const ChunkBackwardTensors& t, Memory memory) {
  const Problem& p = d.problem;
  Checker checker(memory);
  ChunkBackwardArguments arguments;
  arguments.inputs = check_inputs(checker, p, t.inputs);
  check_states(checker, p, t);
  checker.optional(t.d_o, {"d_o",
                           {{"B", p.batch}, {"T", p.tokens}, {"Hv", p.heads_v}, {"V", p.dim_v}},
                           gradient_dtypes(p, p.dtype),
                           Role::input,
                           LastDimension::contiguous});
  check_saved(checker, p, t.saved, Role::input);
  check_gradients(checker, p, t);
  checker.check_overlaps();
  arguments.max_sequence_tokens = d.max_sequence_tokens;
  arguments.initial_state = state_view(t.initial_state, p.state_layout);
  arguments.d_final_state = state_view(t.d_final_state, p.state_layout);
  arguments.d_o = token_view(t.d_o);
  arguments.d_q = token_view(t.d_q);
  arguments.d_k = token_view(t.d_k);
  arguments.d_v = token_view(t.d_v);
  arguments.d_g = token_view(t.d_g);
  arguments.d_beta = token_view(t.d_beta);
  arguments.d_initial_state = state_view(t.d_initial_state, p.state_layout);
  arguments.d_a_log = head_view(t.d_a_log);
  arguments.d_dt_bias = head_view(t.d_dt_bias);
  arguments.saved = static_cast<const float*>(t.saved.data);

  if (!checker.complete() || p.device.type != DeviceType::cpu) return arguments;
  check_offsets(arguments.inputs.sequences);
  check_lengths(arguments.inputs.sequences, d.max_sequence_tokens);
  return arguments;
}

}  // namespace

Plan<ChunkBackward> plan(const ChunkBackward& descriptor, int threads) { return make_plan(resolved(descriptor), threads, 0); }

void check(const Plan<ChunkBackward>& plan, const ChunkBackwardTensors& tensors) {
  checked(plan.descriptor, tensors, Memory::optional);
}

void run(const Plan<ChunkBackward>& plan, const ChunkBackwardTensors& tensors, Workspace workspace, const Parallel& parallel) {
  check_call(plan, workspace, parallel);
  execute(plan, checked(plan.descriptor, tensors, Memory::required), workspace, parallel);
}

void run(const Plan<ChunkBackward>& plan, const ChunkBackwardTensors& tensors, Workspace workspace, Stream stream) {
  check_call(plan, workspace, DeviceType::cuda);
  require_absent(tensors.saved, "saved", "only on the CPU");
  const ChunkBackwardArguments arguments = checked(plan.descriptor, tensors, Memory::required);
  if (Fetched::wanted(*plan.chosen)) {
    Fetched fetched(*plan.chosen, plan.descriptor.problem.device, stream);
    Sequences sequences = arguments.inputs.sequences;
    fetched.take(sequences.cu_seqlens);
    check_offsets(sequences);
    check_lengths(sequences, plan.descriptor.max_sequence_tokens);
  }
  launch(plan, arguments, workspace, stream);
}

void chunk_backward(const ChunkBackward& descriptor, const ChunkBackwardTensors& tensors) { plan_and_run(descriptor, tensors); }

std::vector<ImplementationReport> explain(const ChunkBackward& descriptor) {
  return detail::report(detail::implementations(), resolved(descriptor));
}

}  // namespace flashqla
