// Choice of the implementation of a problem: the first in table order that takes it, or the one that FLASHQLA_IMPL names.
#pragma once

#include <string>
#include <vector>

#include "dispatch/implementation.hpp"

namespace flashqla::detail {

inline const Operation<ChunkForward, ChunkForwardArguments>& operation_of(const Implementation& implementation,
                                                                          const ChunkForward&) {
  return implementation.chunk_forward;
}
inline const Operation<ChunkBackward, ChunkBackwardArguments>& operation_of(const Implementation& implementation,
                                                                            const ChunkBackward&) {
  return implementation.chunk_backward;
}
inline const Operation<RecurrentForward, RecurrentForwardArguments>& operation_of(const Implementation& implementation,
                                                                                  const RecurrentForward&) {
  return implementation.recurrent_forward;
}

/// Every implementation of `table` in its order, with its answer to a checked descriptor.
template <class Descriptor>
std::vector<ImplementationReport> report(std::span<const Implementation* const> table, const Descriptor& descriptor);

/// The first implementation of `table` that takes a checked descriptor; throws Unsupported with every reason when none does.
template <class Descriptor>
const Implementation& choose(std::span<const Implementation* const> table, const Descriptor& descriptor);

}  // namespace flashqla::detail
