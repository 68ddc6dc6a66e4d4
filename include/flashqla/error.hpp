// Exceptions of the library. Every one is thrown before any work is done and names the argument, what was expected and what came.
#pragma once

#include <stdexcept>
#include <string>

namespace flashqla {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// An argument has a wrong value, size, stride or offset.
struct InvalidArgument : Error {
  using Error::Error;
};

/// An argument has a type (element type, kind of option) that the operation does not take.
struct InvalidType : InvalidArgument {
  using InvalidArgument::InvalidArgument;
};

/// The problem is well formed but no implementation takes it; the message lists why each refused.
struct Unsupported : Error {
  using Error::Error;
};

/// CUDA refused a call.
struct DeviceError : Error {
  using Error::Error;
};

}  // namespace flashqla
