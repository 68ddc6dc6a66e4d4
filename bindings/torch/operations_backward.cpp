#include "operations.hpp"

namespace flashqla::bindings {
namespace {

// Bits of `wanted`, in the order of the results.
enum Result : std::int64_t { kQ = 1, kK = 2, kV = 4, kG = 8, kBeta = 16, kInitialState = 32, kALog = 64, kDtBias = 128 };

}  // namespace

ChunkBackwardOp::ChunkBackwardOp(ArgumentReader& reader, Placement placement)
    : inputs(reader),
      initial_state(reader.optional_tensor()),
      d_o(reader.optional_tensor()),
      d_final_state(reader.optional_tensor()),
      wanted(reader.read<std::int64_t>()),
      saved(reader.optional_tensor()) {
  inputs.interpret(placement.device);
  initial_state = with_contiguous_rows(initial_state);
  d_o = with_contiguous_rows(d_o);
  d_final_state = with_contiguous_rows(d_final_state);
  const auto result_like = [&](const char* name, std::int64_t bit, const OptionalTensor& tensor) {
    const bool is_wanted = (wanted & bit) != 0;
    if (is_wanted && !tensor) throw InvalidArgument(std::string(name) + ": a gradient is wanted but the tensor was not given");
    const auto sizes =
        is_wanted ? std::vector<std::int64_t>(tensor->sizes().begin(), tensor->sizes().end()) : std::vector<std::int64_t>{0};
    return empty(sizes, tensor ? dtype_of(name, *tensor) : inputs.problem.dtype, placement);
  };
  d_q = result_like("q", kQ, inputs.q);
  d_k = result_like("k", kK, inputs.k);
  d_v = result_like("v", kV, inputs.v);
  d_g = result_like("g", kG, inputs.g);
  d_beta = result_like("beta", kBeta, inputs.beta);
  d_initial_state = result_like("initial_state", kInitialState, initial_state);
  d_a_log = result_like("A_log", kALog, inputs.a_log);
  d_dt_bias = result_like("dt_bias", kDtBias, inputs.dt_bias);
}

ChunkBackward ChunkBackwardOp::descriptor() const { return {inputs.problem, inputs.longest_sequence()}; }

ChunkBackwardTensors ChunkBackwardOp::tensors() const {
  const auto result = [&](const char* name, std::int64_t bit, const Tensor& tensor) {
    return (wanted & bit) != 0 ? mutable_view(name, tensor) : TensorView();
  };
  ChunkBackwardTensors tensors;
  tensors.inputs = inputs.views();
  tensors.initial_state = const_view("initial_state", initial_state);
  tensors.d_o = const_view("do", d_o);
  tensors.d_final_state = const_view("dht", d_final_state);
  if (saved && saved->numel() > 0) tensors.saved = const_view("saved", saved);
  tensors.d_q = result("dq", kQ, d_q);
  tensors.d_k = result("dk", kK, d_k);
  tensors.d_v = result("dv", kV, d_v);
  tensors.d_g = result("dg", kG, d_g);
  tensors.d_beta = result("dbeta", kBeta, d_beta);
  tensors.d_initial_state = result("dh0", kInitialState, d_initial_state);
  tensors.d_a_log = result("dA_log", kALog, d_a_log);
  tensors.d_dt_bias = result("ddt_bias", kDtBias, d_dt_bias);
  return tensors;
}

void ChunkBackwardOp::write_results(ResultWriter& results) const {
  for (const Tensor* tensor : {&d_q, &d_k, &d_v, &d_g, &d_beta, &d_initial_state, &d_a_log, &d_dt_bias}) results.write(*tensor);
}

}  // namespace flashqla::bindings
