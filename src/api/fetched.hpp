// FLASHQLA_CUDA_CHECK: indices of a CUDA call on the host, for the checks that CPU calls always go through.
#pragma once

#include <cstddef>
#include <vector>

#include "common/arguments.hpp"
#include "common/environment.hpp"
#include "dispatch/implementation.hpp"

namespace flashqla::api {

class Fetched {
 public:
  Fetched(const detail::Implementation& implementation, Device device, Stream stream)
      : implementation_(implementation), device_(device), stream_(stream) {}

  /// Whether plans for the implementation's device are to be checked so.
  static bool wanted(const detail::Implementation& implementation) {
    return implementation.fetch != nullptr && environment::check_device_indices();
  }

  /// Makes the view one of a copy that lives as long as this.
  void take(IndexView& view);
  void take(StateArguments& states);

 private:
  const detail::Implementation& implementation_;
  Device device_;
  Stream stream_;
  std::vector<std::vector<std::byte>> copies_;
};

}  // namespace flashqla::api
