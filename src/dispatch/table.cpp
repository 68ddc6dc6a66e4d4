// The implementations in the order in which they are tried.
#include <vector>

#include "cpu/implementations.hpp"
#ifdef FLASHQLA_WITH_CUDA
#include "cuda/implementations.hpp"
#endif
#include "dispatch/implementation.hpp"
#include "reference/implementation.hpp"

namespace flashqla::detail {

std::span<const Implementation* const> implementations() {
  static const std::vector<const Implementation*> all = [] {
    std::vector<const Implementation*> rows;
    for (const Implementation* row : cpu::implementations()) rows.push_back(row);
#ifdef FLASHQLA_WITH_CUDA
    for (const Implementation* row : cuda::implementations()) rows.push_back(row);
#endif
    rows.push_back(&reference::kImplementation);
    return rows;
  }();
  return all;
}

}  // namespace flashqla::detail
