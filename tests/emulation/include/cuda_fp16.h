// float16 as device code has it.
#pragma once

#include "emulation/language.hpp"

struct __half {
  std::uint16_t bits;
  __half() = default;
  explicit __half(float x) : bits(flashqla::emulation::float_to_f16(x)) {}
  explicit operator float() const { return flashqla::emulation::f16_to_float(bits); }
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half x) { return static_cast<float>(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline float2 __half22float2(__half2 x) { return {static_cast<float>(x.x), static_cast<float>(x.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
