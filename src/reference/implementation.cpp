// The reference takes every problem on every processor.
#include "reference/implementation.hpp"

#include "reference/reference.hpp"

namespace flashqla::reference {

namespace {

template <class Descriptor>
std::string refuse_nothing(const Descriptor&) {
  return {};
}

std::string miss_nothing() { return {}; }

}  // namespace

const detail::Implementation kImplementation{
    "reference",
    miss_nothing,
    {refuse_nothing<ChunkForward>, chunk_forward_workspace, chunk_forward},
    {refuse_nothing<ChunkBackward>, chunk_backward_workspace, chunk_backward},
    {refuse_nothing<RecurrentForward>, recurrent_forward_workspace, recurrent_forward},
};

}  // namespace flashqla::reference
