// Combinations of options such that every pair of settings of two different options occurs together.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "harness/case.hpp"

namespace flashqla::test {

/// One option: its settings, each a change of the case.
using Option = std::vector<std::function<void(Case&)>>;

/// Cases that cover every pair, made greedily from `base`; later options see what earlier ones set. Each gets a seed of its own.
std::vector<Case> pairwise(const Case& base, const std::vector<Option>& options, std::uint64_t seed);

}  // namespace flashqla::test
