// Operation::refusal of the CPU kernels. Everything but the element type is taken.
#pragma once

#include <string>

#include "flashqla/problem.hpp"

namespace flashqla::cpu {

template <class Descriptor>
std::string refuse_f64(const Descriptor& descriptor) {
  return descriptor.problem.dtype == DType::f64 ? "computes in float32, not float64" : "";
}

template <class Descriptor>
std::string refuse_all_but_bf16(const Descriptor& descriptor) {
  return descriptor.problem.dtype == DType::bf16 ? "" : "computes with bfloat16 q, k and v only";
}

}  // namespace flashqla::cpu
