// The reference implementation: docs/math.md token by token in double. Slow and obvious on purpose; the oracle of every test and
// the last fallback. It runs on the calling thread, so its results cannot depend on the number of threads.
#pragma once

#include <cstddef>

#include "common/arguments.hpp"

namespace flashqla::reference {

std::size_t chunk_forward_workspace(const ChunkForward& descriptor, int threads);
void chunk_forward(const ChunkForwardArguments& arguments, std::byte* workspace, const Parallel& parallel);

std::size_t recurrent_forward_workspace(const RecurrentForward& descriptor, int threads);
void recurrent_forward(const RecurrentForwardArguments& arguments, std::byte* workspace, const Parallel& parallel);

std::size_t chunk_backward_workspace(const ChunkBackward& descriptor, int threads);
void chunk_backward(const ChunkBackwardArguments& arguments, std::byte* workspace, const Parallel& parallel);

}  // namespace flashqla::reference
