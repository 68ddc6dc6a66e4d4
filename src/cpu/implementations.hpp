// The rows of the CPU backend.
#pragma once

#include <span>

#include "dispatch/implementation.hpp"

namespace flashqla::cpu {

/// In the order in which they should be tried on this processor; those it cannot run are among them and say so.
std::span<const detail::Implementation* const> implementations();

}  // namespace flashqla::cpu
