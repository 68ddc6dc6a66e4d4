// One element of any dtype, read and written one at a time. Kernels load vectors their own way; this is for the reference, small
// tensors and tails.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "flashqla/types.hpp"

namespace flashqla {

inline float bf16_to_float(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

/// Round to nearest even; NaN stays NaN.
inline std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_float(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x0400u) return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(subnormal));
}

/// Round to nearest even; overflow gives infinity, NaN stays NaN.
inline std::uint16_t float_to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);
  if (magnitude <
      0x38800000u) {  // below the smallest normal half: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
  }
  return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

/// Nearest float unless inexact, else the odd neighbour: rounding that once more to a 16-bit type is the same as rounding `value`
/// directly.
inline float double_to_odd_float(double value) {
  const auto nearest = static_cast<float>(value);
  const auto bits = std::bit_cast<std::uint32_t>(nearest);
  const double back = static_cast<double>(nearest);
  if (back == value || value != value || (bits & 1u) != 0) return nearest;
  return std::bit_cast<float>((value < 0 ? back < value : back > value) ? bits - 1 : bits + 1);
}

inline double load_scalar(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::f64:
      return static_cast<const double*>(data)[index];
    case DType::f32:
      return static_cast<double>(static_cast<const float*>(data)[index]);
    case DType::bf16:
      return static_cast<double>(bf16_to_float(static_cast<const std::uint16_t*>(data)[index]));
    case DType::f16:
      return static_cast<double>(f16_to_float(static_cast<const std::uint16_t*>(data)[index]));
    case DType::i64:
      return static_cast<double>(static_cast<const std::int64_t*>(data)[index]);
    case DType::i32:
      return static_cast<double>(static_cast<const std::int32_t*>(data)[index]);
  }
  return 0.0;
}

inline void store_scalar(void* data, DType dtype, std::int64_t index, double value) {
  switch (dtype) {
    case DType::f64:
      static_cast<double*>(data)[index] = value;
      return;
    case DType::f32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      return;
    case DType::bf16:
      static_cast<std::uint16_t*>(data)[index] = float_to_bf16(double_to_odd_float(value));
      return;
    case DType::f16:
      static_cast<std::uint16_t*>(data)[index] = float_to_f16(double_to_odd_float(value));
      return;
    case DType::i64:
    case DType::i32:
      return;  // never a result
  }
}

}  // namespace flashqla
