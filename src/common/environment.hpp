// Every environment variable that the library reads. They are read at each plan (the last one at each run), so that a program (or
// a test) may change them between two.
#pragma once

#include <string_view>

namespace flashqla::environment {

/// FLASHQLA_IMPL: name of the only implementation that may run ("cpu" stands for the first cpu-* that takes the problem); empty
/// when unset.
std::string_view forced_implementation();

/// FLASHQLA_LOG: anything but unset, empty and "0" prints each choice of an implementation to stderr.
bool log_choices();

/// FLASHQLA_STATE_WALK: "in_order" or "side_by_side" reads the states of recurrent_forward so, whatever the processor prefers;
/// empty when unset.
std::string_view state_walk();

/// FLASHQLA_CUDA_SHARED_KB: CUDA kernels take no more shared memory a block than so many KB, as on a device that has no more (99:
/// consumer cards); 0 when unset.
int cuda_shared_kb();

/// FLASHQLA_CUDA_CHECK: anything but unset, empty and "0" brings offsets and rows of CUDA calls to the host and checks them
/// there, as those of CPU calls always are. Every call then waits for its stream.
bool check_device_indices();

}  // namespace flashqla::environment
