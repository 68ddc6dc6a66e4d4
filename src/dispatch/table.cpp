// The implementations in the order in which they are tried.
#include "dispatch/implementation.hpp"
#include "reference/implementation.hpp"

namespace flashqla::detail {

namespace {

constexpr const Implementation* kImplementations[] = {
    &reference::kImplementation,
};

}  // namespace

std::span<const Implementation* const> implementations() { return kImplementations; }

}  // namespace flashqla::detail
