// The ops on CUDA devices, in a library of their own; the schemas are the CPU library's. A call puts its work on torch's current
// stream of the tensors' device, which need not be the current device, and returns: it reads no contents of tensors, waits for
// nothing and takes all memory from torch, so it can be captured in a graph.
#include "calls.hpp"
#include "cuda_torch.hpp"
#include "flashqla/version.hpp"

namespace {

using namespace flashqla;            // NOLINT(google-build-using-namespace)
using namespace flashqla::bindings;  // NOLINT(google-build-using-namespace)

Device cuda_device(std::int64_t index) { return {DeviceType::cuda, static_cast<int>(index)}; }

template <class Operation>
void run_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_marked_errors([&] {
    ArgumentReader reader(stack);
    const Device device = cuda_device(reader.next_device_index());
    const Operation operation(reader, {device});
    // Without a mark: flash_qla/_call.py then finds out which argument it is.
    if (reader.several_devices()) throw std::runtime_error("flashqla: the tensors of a call must be on one device");
    const auto planned = plan(operation.descriptor());
    const Stream stream = current_stream(device.index);
    const Scratch scratch(planned.workspace_bytes, device);
    run(planned, operation.tensors(), scratch.workspace(), stream);
    ResultWriter results(stack);
    operation.write_results(results);
  });
}

/// The arguments of the CPU library's explanation after the number of the device; all tensors are meta tensors.
template <class Operation>
void explain_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_marked_errors([&] {
    ArgumentReader reader(stack);
    const Device device = cuda_device(reader.read<std::int64_t>());
    explain_call<Operation>(stack, reader, device);
  });
}

void saved_elements_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_marked_errors([&] {
    ArgumentReader reader(stack);
    const Device device = cuda_device(reader.read<std::int64_t>());
    count_saved_elements(stack, reader, device);
  });
}

/// Why no call can run on a device: driver, hardware, torch. Empty if calls can.
void missing_op(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_marked_errors([&] {
    std::string answer = missing_in_torch();
    RecurrentForward simple;
    simple.problem.device = cuda_device(ArgumentReader(stack).read<std::int64_t>());
    if (answer.empty()) {
      for (const ImplementationReport& report : explain(simple)) {
        if (report.reason.empty()) return ResultWriter(stack).write(std::string());
        answer += (answer.empty() ? "" : "; ") + report.name + ": " + report.reason;
      }
    }
    ResultWriter(stack).write(answer);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flashqla, CUDA, library) {
  library.impl("chunk_forward", run_op<ChunkForwardOp>);
  library.impl("chunk_forward_training", run_op<ChunkForwardTrainingOp>);
  library.impl("chunk_forward_low_level", run_op<ChunkForwardLowLevelOp>);
  library.impl("chunk_forward_pool", run_op<ChunkForwardPoolOp>);
  library.impl("chunk_backward", run_op<ChunkBackwardOp>);
  library.impl("recurrent_forward", run_op<RecurrentForwardOp>);
  library.impl("recurrent_forward_pool", run_op<RecurrentForwardPoolOp>);
}

STABLE_TORCH_LIBRARY_IMPL(flashqla, Meta, library) {
  library.impl("explain_saved_elements.cuda", saved_elements_op);
  library.impl("explain_chunk_forward.cuda", explain_op<ChunkForwardOp>);
  library.impl("explain_chunk_forward_low_level.cuda", explain_op<ChunkForwardLowLevelOp>);
  library.impl("explain_chunk_forward_pool.cuda", explain_op<ChunkForwardPoolOp>);
  library.impl("explain_chunk_backward.cuda", explain_op<ChunkBackwardOp>);
  library.impl("explain_recurrent_forward.cuda", explain_op<RecurrentForwardOp>);
  library.impl("explain_recurrent_forward_pool.cuda", explain_op<RecurrentForwardPoolOp>);
}

STABLE_TORCH_LIBRARY_IMPL(flashqla, CompositeExplicitAutograd, library) {
  library.impl("missing_for_cuda", missing_op);
  library.impl("version_for_cuda",
               [](StableIValue* stack, std::uint64_t, std::uint64_t) { ResultWriter(stack).write(std::string(kVersion)); });
}
