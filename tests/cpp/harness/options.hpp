// The options of each operation, for pairwise(): small sizes, every setting.
#pragma once

#include <vector>

#include "harness/pairwise.hpp"

namespace flashqla::test {

std::vector<Option> forward_options();
std::vector<Option> backward_options();
std::vector<Option> recurrent_options();

}  // namespace flashqla::test
