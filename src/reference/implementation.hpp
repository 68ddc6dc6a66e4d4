// The reference's row of the implementation table.
#pragma once

#include "dispatch/implementation.hpp"

namespace flashqla::reference {

extern const detail::Implementation kImplementation;

}  // namespace flashqla::reference
