// The ops on the CPU: read the arguments, allocate, run, hand back. And their explanations.
#include "calls.hpp"

namespace {

using namespace flashqla;            // NOLINT(google-build-using-namespace)
using namespace flashqla::bindings;  // NOLINT(google-build-using-namespace)

template <class Operation>
void run_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_marked_errors([&] {
    ArgumentReader reader(stack);
    const Operation operation(reader, Placement{});
    const Parallel parallel = torch_pool();
    const auto planned = plan(operation.descriptor(), parallel.threads);
    const Scratch scratch(planned.workspace_bytes, {});
    run(planned, operation.tensors(), scratch.workspace(), parallel);
    ResultWriter results(stack);
    operation.write_results(results);
  });
}

template <class Operation>
void explain_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_marked_errors([&] {
    ArgumentReader reader(stack);
    explain_call<Operation>(stack, reader, {});
  });
}

void saved_elements_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_marked_errors([&] {
    ArgumentReader reader(stack);
    count_saved_elements(stack, reader, {});
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flashqla, CPU, library) {
  library.impl("chunk_forward", run_op<ChunkForwardOp>);
  library.impl("chunk_forward_training", run_op<ChunkForwardTrainingOp>);
  library.impl("chunk_forward_low_level", run_op<ChunkForwardLowLevelOp>);
  library.impl("chunk_forward_pool", run_op<ChunkForwardPoolOp>);
  library.impl("chunk_backward", run_op<ChunkBackwardOp>);
  library.impl("recurrent_forward", run_op<RecurrentForwardOp>);
  library.impl("recurrent_forward_pool", run_op<RecurrentForwardPoolOp>);
}

#define FLASHQLA_EXPLANATIONS(key)                                                       \
  STABLE_TORCH_LIBRARY_IMPL(flashqla, key, library) {                                    \
    library.impl("explain_saved_elements", saved_elements_op);                           \
    library.impl("explain_chunk_forward", explain_op<ChunkForwardOp>);                   \
    library.impl("explain_chunk_forward_low_level", explain_op<ChunkForwardLowLevelOp>); \
    library.impl("explain_chunk_forward_pool", explain_op<ChunkForwardPoolOp>);          \
    library.impl("explain_chunk_backward", explain_op<ChunkBackwardOp>);                 \
    library.impl("explain_recurrent_forward", explain_op<RecurrentForwardOp>);           \
    library.impl("explain_recurrent_forward_pool", explain_op<RecurrentForwardPoolOp>);  \
  }
FLASHQLA_EXPLANATIONS(CPU)
FLASHQLA_EXPLANATIONS(Meta)
