// Every environment variable that the library reads. They are read at each plan, so that a program (or a test) may change them
// between two.
#pragma once

#include <string_view>

namespace flashqla::environment {

/// FLASHQLA_IMPL: name of the only implementation that may run ("cpu" stands for the first cpu-* that takes the problem); empty
/// when unset.
std::string_view forced_implementation();

/// FLASHQLA_LOG: anything but unset, empty and "0" prints each choice of an implementation to stderr.
bool log_choices();

}  // namespace flashqla::environment
