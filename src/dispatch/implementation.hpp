// One way to compute an operation, as a row of a table. src/dispatch/table.cpp lists them in the order in which they are tried,
// `reference` last.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "common/arguments.hpp"

namespace flashqla::detail {

/// Fields of an operation that an implementation lacks are null.
template <class Descriptor, class Arguments>
struct Operation {
  /// Empty when it takes the problem, else why not. The descriptor has been checked.
  std::string (*refusal)(const Descriptor&) = nullptr;
  /// Scratch bytes for `threads` threads.
  std::size_t (*workspace_bytes)(const Descriptor&, int threads) = nullptr;
  /// Computes. `workspace` is 64-byte aligned and as large as promised for `parallel.threads`.
  void (*run)(const Arguments&, std::byte* workspace, const Parallel& parallel) = nullptr;
  bool saves = false;  // chunk_forward: whether it leaves something for the backward
  /// On a CUDA device, in place of run: starts the work on the stream and returns.
  void (*launch)(const Arguments&, std::byte* workspace, Stream stream) = nullptr;
};

struct Implementation {
  const char* name;  // "cpu-avx512", as FLASHQLA_IMPL spells it
  /// Empty when this processor can run it, else what is missing.
  std::string (*missing)();
  Operation<ChunkForward, ChunkForwardArguments> chunk_forward;
  Operation<ChunkBackward, ChunkBackwardArguments> chunk_backward;
  Operation<RecurrentForward, RecurrentForwardArguments> recurrent_forward;
  DeviceType device = DeviceType::cpu;
  /// On a CUDA device: copies bytes of its memory to the host once the work on the stream is done, and waits for that.
  void (*fetch)(Device, void* to, const void* from, std::size_t bytes, Stream) = nullptr;
};

std::span<const Implementation* const> implementations();

}  // namespace flashqla::detail
