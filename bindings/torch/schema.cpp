// The ops and their arguments. A schema is a promise: after a release it may only grow at its end.
//
// Every op starts with the same inputs:
//   gate       "none" (g absent), "log_decay", "computed" (from g, A_log and dt_bias) or, in the backward, "cumulative"
//   beta_mode  "one" (beta absent), "given", "sigmoid" or "doubled_sigmoid"
//   cu_seqlens on the device of q, or absent: one sequence per batch entry
// A result that was not asked for is a tensor without elements: optional results do not survive torch.compile.
// explain_X has the arguments of X, checks them without reading any memory (meta tensors will do) and writes nothing; it returns
// pairs of (implementation, why it refuses: empty if it would take the call), in the order in which they are tried.
// explain_saved_elements says how many elements chunk_forward_training's `saved` would have. Both answer for the CPU;
// explain_X.cuda for the CUDA device of a number, always about meta tensors.
#include <string>

#include "boxing.hpp"
#include "flashqla/version.hpp"

namespace {

const std::string kInputs =
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, Tensor? cu_seqlens, "
    "float? scale, str gate, str beta_mode, bool l2norm, bool state_v_first";
const std::string kChunkForward = "(" + kInputs + ", Tensor? initial_state, bool output_final_state)";
const std::string kChunkForwardLowLevel = "(" + kInputs + ", Tensor? initial_state, bool output_final_state, bool output_h)";
const std::string kChunkForwardTraining = "(" + kInputs + ", Tensor? initial_state, bool output_final_state, bool save)";
const std::string kChunkBackward =
    "(" + kInputs + ", Tensor? initial_state, Tensor? d_o, Tensor? d_final_state, int wanted, Tensor? saved)";

// Pools are written in place, where the schema says so; an explanation writes nothing.
std::string chunk_pool(const std::string& state, const std::string& checkpoints) {
  return "(" + kInputs + ", " + state + " state, Tensor? read_rows, Tensor? write_rows, int? states_every, " + checkpoints +
         " checkpoints, Tensor? checkpoint_rows, Tensor? prefix_lengths)";
}

std::string recurrent_pool(const std::string& state, const std::string& token_states) {
  return "(" + kInputs + ", " + state + " state, Tensor? read_rows, Tensor? write_rows, Tensor? accepted, " + token_states +
         " token_states, Tensor? token_rows)";
}

}  // namespace

STABLE_TORCH_LIBRARY(flashqla, library) {
  const auto define = [&](const std::string& schema) { library.def(schema.c_str()); };
  const std::string two = " -> (Tensor o, Tensor final_state)";
  const std::string reasons = " -> str[]";

  // The same operation twice: autograd is registered for the second alone, so that calls that want no gradient do not pay for it.
  // `saved` is for chunk_backward; it has no element if `save` is false or the implementation leaves nothing.
  define("chunk_forward" + kChunkForward + two);
  define("chunk_forward_training" + kChunkForwardTraining + " -> (Tensor o, Tensor final_state, Tensor saved)");
  define("chunk_forward_low_level" + kChunkForwardLowLevel +
         " -> (Tensor g_cumulative, Tensor A, Tensor o, Tensor h, Tensor final_state)");
  define("chunk_forward_pool" + chunk_pool("Tensor(a!)", "Tensor(b!)?") + " -> Tensor o");
  define(
      "chunk_backward" + kChunkBackward +
      " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor d_initial_state, Tensor dA_log, Tensor ddt_bias)");
  define("recurrent_forward" + kChunkForward + two);
  define("recurrent_forward_pool" + recurrent_pool("Tensor(a!)", "Tensor(b!)?") + " -> Tensor o");

  const auto define_explanation = [&](const std::string& name, const std::string& arguments, const std::string& result) {
    define("explain_" + name + arguments + result);
    define("explain_" + name + ".cuda(int device, " + arguments.substr(1) + result);
  };
  define_explanation("saved_elements", kChunkForwardTraining, " -> int");
  define_explanation("chunk_forward", kChunkForward, reasons);
  define_explanation("chunk_forward_low_level", kChunkForwardLowLevel, reasons);
  define_explanation("chunk_forward_pool", chunk_pool("Tensor", "Tensor?"), reasons);
  define_explanation("chunk_backward", kChunkBackward, reasons);
  define_explanation("recurrent_forward", kChunkForward, reasons);
  define_explanation("recurrent_forward_pool", recurrent_pool("Tensor", "Tensor?"), reasons);

  define("version() -> str");
  // Of the CUDA library, which has these two: why nothing can run on a device (empty: it can), and its version.
  define("missing_for_cuda(int device) -> str");
  define("version_for_cuda() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(flashqla, CompositeExplicitAutograd, library) {
  library.impl("version", [](StableIValue* stack, std::uint64_t, std::uint64_t) {
    flashqla::bindings::ResultWriter(stack).write(std::string(flashqla::kVersion));
  });
}
