#include "common/environment.hpp"

#include <cstdlib>

namespace flashqla::environment {

namespace {

std::string_view read(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view{} : std::string_view{value};
}

bool is_set(const char* name) {
  const std::string_view value = read(name);
  return !value.empty() && value != "0";
}

}  // namespace

std::string_view forced_implementation() { return read("FLASHQLA_IMPL"); }

bool log_choices() { return is_set("FLASHQLA_LOG"); }

std::string_view state_walk() { return read("FLASHQLA_STATE_WALK"); }

bool check_device_indices() { return is_set("FLASHQLA_CUDA_CHECK"); }

int cuda_shared_kb() {
  const char* const value = std::getenv("FLASHQLA_CUDA_SHARED_KB");
  return value == nullptr ? 0 : std::atoi(value);
}

}  // namespace flashqla::environment
