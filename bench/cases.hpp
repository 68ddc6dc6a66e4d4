// Benchmark cases as text: `key=value ...` a line, `#` starts a comment, and a comma list of values expands to one case for each
// value.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

#include "flashqla/problem.hpp"
#include "flashqla/types.hpp"

namespace flashqla::bench {

enum class Op { forward, backward, recurrent };
enum class Temperature { cold, warm };  // whether a recurrent call finds its states in memory or in the cache

struct Case {
  std::string text;  // the expanded line
  Op op = Op::forward;
  std::int64_t batch = 1, tokens = 1, heads_qk = 1, heads_v = 1, dim_k = 128, dim_v = 128;
  DType dtype = DType::f32;
  DType state_dtype = DType::f32;
  StateLayout layout = StateLayout::key_value;
  Temperature states = Temperature::cold;
  bool saved = false;  // the forward leaves errors and states for the backward; the backward is given them
  int threads = 1;
  std::string implementation = "best";  // or a name, as FLASHQLA_IMPL takes it
};

/// Throws std::runtime_error that names the line.
std::vector<Case> read_cases(std::istream& stream);

const char* name_of(Op op);
const char* name_of(Temperature states);
const char* name_of(StateLayout layout);
/// As the case file spells it: f32, bf16, f16.
const char* short_name_of(DType dtype);

}  // namespace flashqla::bench
