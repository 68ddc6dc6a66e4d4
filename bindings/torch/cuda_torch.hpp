// What the CUDA ops need of a torch that is built with CUDA.
#pragma once

#include <string>

#include "boxing.hpp"
#include "flashqla/types.hpp"

namespace flashqla::bindings {

/// Torch's current stream on a device. Throws DeviceError if torch is built without CUDA.
Stream current_stream(int device);

/// Empty, or why this torch has no streams of CUDA devices.
std::string missing_in_torch();

}  // namespace flashqla::bindings
