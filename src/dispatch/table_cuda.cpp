// In place of table.cpp in a library for CUDA tensors alone, which needs no kernels for the CPU.
#include "cuda/implementations.hpp"
#include "dispatch/implementation.hpp"

namespace flashqla::detail {

std::span<const Implementation* const> implementations() { return cuda::implementations(); }

}  // namespace flashqla::detail
