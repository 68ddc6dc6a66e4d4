// What plan(), run() and explain() of the three operations share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

#include "api/problem.hpp"
#include "api/tensors.hpp"
#include "common/parallel.hpp"
#include "dispatch/choose.hpp"

namespace flashqla::api {

inline constexpr std::size_t kWorkspaceAlignment = 64;

/// `check_bytes`: scratch of the checks, which run before the implementation and may use the same memory.
template <class Descriptor>
Plan<Descriptor> make_plan(const Descriptor& descriptor, int threads, std::size_t check_bytes) {
  if (threads < 1 || threads > kMaxThreads) invalid("threads", "1 to " + std::to_string(kMaxThreads), std::to_string(threads));
  const detail::Implementation& chosen = detail::choose(detail::implementations(), descriptor);
  const std::size_t run_bytes = detail::operation_of(chosen, descriptor).workspace_bytes(descriptor, threads);
  if (chosen.device != DeviceType::cpu) check_bytes = 0;  // contents of device memory are not looked at
  return {descriptor, chosen.name, run_bytes > check_bytes ? run_bytes : check_bytes, threads, &chosen};
}

/// Throws unless the plan was made by plan() for that kind of device and the workspace serves it.
template <class Descriptor>
void check_call(const Plan<Descriptor>& plan, const Workspace& workspace, DeviceType device) {
  if (plan.chosen == nullptr) invalid("plan", "one that plan() made", "an empty one");
  if (plan.chosen->device != device) {
    invalid("plan", device == DeviceType::cpu ? "one for the CPU, with a Parallel" : "one for a CUDA device, with a Stream",
            device == DeviceType::cpu ? "one for a CUDA device: give run a Stream" : "one for the CPU: give run a Parallel");
  }
  if (workspace.bytes < plan.workspace_bytes) {
    invalid("workspace", std::to_string(plan.workspace_bytes) + " bytes", std::to_string(workspace.bytes));
  }
  if (plan.workspace_bytes > 0 && workspace.data == nullptr) invalid("workspace", "memory", "a null pointer");
  if (reinterpret_cast<std::uintptr_t>(workspace.data) % kWorkspaceAlignment != 0) {
    invalid("workspace", "an address that is a multiple of " + std::to_string(kWorkspaceAlignment), "one that is not");
  }
}

template <class Descriptor>
void check_call(const Plan<Descriptor>& plan, const Workspace& workspace, const Parallel& parallel) {
  check_call(plan, workspace, DeviceType::cpu);
  if (parallel.threads < 1) invalid("parallel.threads", "at least 1", std::to_string(parallel.threads));
}

/// Starts the work on the stream.
template <class Descriptor, class Arguments>
void launch(const Plan<Descriptor>& plan, const Arguments& arguments, const Workspace& workspace, Stream stream) {
  detail::operation_of(*plan.chosen, plan.descriptor).launch(arguments, static_cast<std::byte*>(workspace.data), stream);
}

template <class Descriptor, class Arguments>
void execute(const Plan<Descriptor>& plan, const Arguments& arguments, const Workspace& workspace, Parallel parallel) {
  if (parallel.threads > plan.threads) parallel.threads = plan.threads;
  if (parallel.run == nullptr) parallel = serial();
  const QuietFloatEnvironment quiet;
  detail::operation_of(*plan.chosen, plan.descriptor).run(arguments, static_cast<std::byte*>(workspace.data), parallel);
}

/// Plan and run with a workspace of its own, on the library's pool.
template <class Descriptor, class Tensors>
void plan_and_run(const Descriptor& descriptor, const Tensors& tensors) {
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, std::align_val_t{kWorkspaceAlignment}); }
  };
  const Parallel parallel = own_pool();
  const Plan<Descriptor> made = plan(descriptor, std::min(parallel.threads, kMaxThreads));
  const std::unique_ptr<void, Free> memory(::operator new(made.workspace_bytes, std::align_val_t{kWorkspaceAlignment}));
  run(made, tensors, {memory.get(), made.workspace_bytes}, parallel);
}

}  // namespace flashqla::api
