// Checks of descriptors, before an implementation is chosen.
#pragma once

#include "api/text.hpp"
#include "flashqla/problem.hpp"

namespace flashqla::api {

/// Threads that a plan may be made for: keeps the sizes of workspaces in range.
inline constexpr int kMaxThreads = 1024;

/// Check a descriptor (throws InvalidArgument or InvalidType) and return it with every default filled in: num_sequences, scale,
/// max_sequence_tokens.
ChunkForward resolved(const ChunkForward& descriptor);
ChunkBackward resolved(const ChunkBackward& descriptor);
RecurrentForward resolved(const RecurrentForward& descriptor);

/// Upper bound of the number of stored states of a resolved descriptor, whatever its offsets and prefixes.
std::int64_t max_stored_states(const ChunkForward& descriptor);

/// Elements of `saved`, of a resolved descriptor's problem.
std::int64_t saved_size(const Problem& problem);

}  // namespace flashqla::api
