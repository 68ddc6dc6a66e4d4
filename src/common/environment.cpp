#include "common/environment.hpp"

#include <cstdlib>

namespace flashqla::environment {

namespace {

std::string_view read(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view{} : std::string_view{value};
}

}  // namespace

std::string_view forced_implementation() { return read("FLASHQLA_IMPL"); }

bool log_choices() {
  const std::string_view value = read("FLASHQLA_LOG");
  return !value.empty() && value != "0";
}

std::string_view state_walk() { return read("FLASHQLA_STATE_WALK"); }

int cuda_shared_kb() {
  const char* const value = std::getenv("FLASHQLA_CUDA_SHARED_KB");
  return value == nullptr ? 0 : std::atoi(value);
}

}  // namespace flashqla::environment
