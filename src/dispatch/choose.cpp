#include "dispatch/choose.hpp"

#include <algorithm>
#include <cstdio>
#include <string_view>

#include "common/environment.hpp"

namespace flashqla::detail {

namespace {

constexpr std::string_view kCpuPrefix = "cpu-";

const char* operation_name(const ChunkForward&) { return "chunk_forward"; }
const char* operation_name(const ChunkBackward&) { return "chunk_backward"; }
const char* operation_name(const RecurrentForward&) { return "recurrent_forward"; }

bool asked_for(std::string_view name, std::string_view forced) {
  if (forced.empty() || forced == name) return true;
  return forced == "cpu" && name.substr(0, kCpuPrefix.size()) == kCpuPrefix;
}

template <class Descriptor>
std::string refusal(const Implementation& implementation, const Descriptor& descriptor, std::string_view forced) {
  if (!asked_for(implementation.name, forced)) return "FLASHQLA_IMPL=" + std::string(forced) + " asks for another";
  if (descriptor.problem.device.type != implementation.device)
    return implementation.device == DeviceType::cpu ? "computes on the CPU only" : "computes on CUDA devices only";
  const auto& operation = operation_of(implementation, descriptor);
  if (operation.run == nullptr && operation.launch == nullptr) return std::string("has no ") + operation_name(descriptor);
  std::string missing = implementation.missing == nullptr ? std::string() : implementation.missing();
  return missing.empty() ? operation.refusal(descriptor) : missing;
}

template <class Descriptor>
[[noreturn]] void refuse_all(std::span<const Implementation* const> table, const Descriptor& descriptor) {
  std::string message = std::string(operation_name(descriptor)) + ": no implementation takes this problem";
  for (const ImplementationReport& answer : report(table, descriptor)) message += "\n  " + answer.name + ": " + answer.reason;
  const bool on_cuda = descriptor.problem.device.type == DeviceType::cuda;
  if (on_cuda && std::none_of(table.begin(), table.end(), [](const auto* row) { return row->device == DeviceType::cuda; }))
    message += "\nThis library was built without kernels for CUDA devices: configure it with -DFLASHQLA_CUDA=ON";
  throw Unsupported(message);
}

}  // namespace

template <class Descriptor>
std::vector<ImplementationReport> report(std::span<const Implementation* const> table, const Descriptor& descriptor) {
  const std::string_view forced = environment::forced_implementation();
  std::vector<ImplementationReport> answers;
  for (const Implementation* implementation : table) {
    answers.push_back({implementation->name, refusal(*implementation, descriptor, forced)});
  }
  return answers;
}

template <class Descriptor>
const Implementation& choose(std::span<const Implementation* const> table, const Descriptor& descriptor) {
  const std::string_view forced = environment::forced_implementation();
  const bool log = environment::log_choices();
  for (const Implementation* implementation : table) {
    const std::string reason = refusal(*implementation, descriptor, forced);
    if (log) {
      std::fprintf(stderr, "flashqla: %s: %s %s%s\n", operation_name(descriptor), implementation->name,
                   reason.empty() ? "runs" : "refused: ", reason.c_str());
    }
    if (reason.empty()) return *implementation;
  }
  refuse_all(table, descriptor);
}

#define FLASHQLA_INSTANTIATE(Descriptor)                                                                                    \
  template std::vector<ImplementationReport> report<Descriptor>(std::span<const Implementation* const>, const Descriptor&); \
  template const Implementation& choose<Descriptor>(std::span<const Implementation* const>, const Descriptor&);

FLASHQLA_INSTANTIATE(ChunkForward)
FLASHQLA_INSTANTIATE(ChunkBackward)
FLASHQLA_INSTANTIATE(RecurrentForward)

#undef FLASHQLA_INSTANTIATE

}  // namespace flashqla::detail
