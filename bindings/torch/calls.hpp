// What the ops of every device do alike: errors under marks that Python reads, and explanations.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "operations.hpp"

namespace flashqla::bindings {

/// The stable ABI turns every exception into a RuntimeError. The mark in front names the Python type; flash_qla/_call.py puts it
/// back.
template <class Function>
void with_marked_errors(const Function& function) {
  try {
    function();
  } catch (const InvalidType& error) {
    throw std::runtime_error(std::string("flashqla:TypeError: ") + error.what());
  } catch (const InvalidArgument& error) {
    throw std::runtime_error(std::string("flashqla:ValueError: ") + error.what());
  } catch (const Unsupported& error) {
    throw std::runtime_error(std::string("flashqla:NotImplementedError: ") + error.what());
  } catch (const OutOfMemory& error) {
    throw std::runtime_error(std::string("flashqla:OutOfMemoryError: ") + error.what());
  } catch (const DeviceError& error) {
    throw std::runtime_error(std::string("flashqla:RuntimeError: ") + error.what());
  }
}

/// An explain op: its answer for a call on `device`.
template <class Operation>
void explain_call(StableIValue* stack, ArgumentReader& reader, Device device) {
  const Operation operation(reader, {device, Results::nowhere});
  const auto descriptor = operation.descriptor();
  std::vector<std::string> answer;
  bool taken = false;
  for (const ImplementationReport& report : explain(descriptor)) {
    answer.push_back(report.name);
    answer.push_back(report.reason);
    taken = taken || report.reason.empty();
  }
  if (taken) check(plan(descriptor), operation.tensors());
  ResultWriter(stack).write(std::move(answer));
}

/// For fake kernels: how many elements chunk_forward_training's `saved` has.
inline void count_saved_elements(StableIValue* stack, ArgumentReader& reader, Device device) {
  const ChunkForwardTrainingOp operation(reader, {device, Results::nowhere});
  ResultWriter(stack).write(operation.saved.numel());
}

}  // namespace flashqla::bindings
