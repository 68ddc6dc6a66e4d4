// The CUDA backend's rows of the table of implementations.
#pragma once

#include <span>

#include "dispatch/implementation.hpp"

namespace flashqla::cuda {

std::span<const detail::Implementation* const> implementations();

}  // namespace flashqla::cuda
