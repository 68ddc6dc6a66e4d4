// The vector operations in plain C++ for any processor; avx512.hpp says what each does. Four floats are what every 64-bit
// processor holds in a register.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/scalar.hpp"
#include "cpu/simd/inline.hpp"

#include "cpu/simd/scalar_begin.inc"

inline constexpr int kWidth = 4;
inline constexpr int kRegisters = 16;

struct Vec {
  float lane[kWidth];
};

/// f(i) in lane i.
template <class Function>
FLASHQLA_INLINE Vec lanes(Function f) {
  return Vec{{f(0), f(1), f(2), f(3)}};
}

FLASHQLA_INLINE Vec zero() { return Vec{}; }
FLASHQLA_INLINE Vec set1(float x) { return Vec{{x, x, x, x}}; }

FLASHQLA_INLINE Vec load(const float* p) { return Vec{{p[0], p[1], p[2], p[3]}}; }
FLASHQLA_INLINE void store(float* p, Vec a) {
  for (int i = 0; i < kWidth; ++i) p[i] = a.lane[i];
}
FLASHQLA_INLINE Vec load_partial(const float* p, int n) {
  return lanes([&](int i) { return i < n ? p[i] : 0.0f; });
}
FLASHQLA_INLINE void store_partial(float* p, Vec a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a.lane[i];
}

FLASHQLA_INLINE Vec fmadd(Vec a, Vec b, Vec c) {
  return lanes([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
}
FLASHQLA_INLINE Vec fnmadd(Vec a, Vec b, Vec c) {
  return lanes([&](int i) { return c.lane[i] - a.lane[i] * b.lane[i]; });
}
FLASHQLA_INLINE Vec add(Vec a, Vec b) {
  return lanes([&](int i) { return a.lane[i] + b.lane[i]; });
}
FLASHQLA_INLINE Vec sub(Vec a, Vec b) {
  return lanes([&](int i) { return a.lane[i] - b.lane[i]; });
}
FLASHQLA_INLINE Vec mul(Vec a, Vec b) {
  return lanes([&](int i) { return a.lane[i] * b.lane[i]; });
}
FLASHQLA_INLINE Vec div(Vec a, Vec b) {
  return lanes([&](int i) { return a.lane[i] / b.lane[i]; });
}
FLASHQLA_INLINE Vec max(Vec a, Vec b) {
  return lanes([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
FLASHQLA_INLINE Vec min(Vec a, Vec b) {
  return lanes([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
FLASHQLA_INLINE Vec abs(Vec a) {
  return lanes([&](int i) { return std::fabs(a.lane[i]); });
}
FLASHQLA_INLINE Vec round_to_integer(Vec a) {
  return lanes([&](int i) { return std::nearbyintf(a.lane[i]); });
}
FLASHQLA_INLINE Vec scale_by_power(Vec x, Vec n) {
  return lanes([&](int i) { return n.lane[i] == n.lane[i] ? std::ldexp(x.lane[i], static_cast<int>(n.lane[i])) : n.lane[i]; });
}
FLASHQLA_INLINE Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return lanes([&](int i) { return a.lane[i] < b.lane[i] ? x.lane[i] : y.lane[i]; });
}
FLASHQLA_INLINE Vec first_lanes(Vec a, int n) {
  return lanes([&](int i) { return i < n ? a.lane[i] : 0.0f; });
}

FLASHQLA_INLINE float sum(Vec a) { return (a.lane[0] + a.lane[2]) + (a.lane[1] + a.lane[3]); }

FLASHQLA_INLINE Vec load_bf16(const std::uint16_t* p) {
  return lanes([&](int i) { return bf16_to_float(p[i]); });
}
FLASHQLA_INLINE Vec load_bf16_partial(const std::uint16_t* p, int n) {
  return lanes([&](int i) { return i < n ? bf16_to_float(p[i]) : 0.0f; });
}
FLASHQLA_INLINE void store_bf16_partial(std::uint16_t* p, Vec a, int n) {
  for (int i = 0; i < n; ++i) p[i] = float_to_bf16(a.lane[i]);
}
FLASHQLA_INLINE void store_bf16(std::uint16_t* p, Vec a) { store_bf16_partial(p, a, kWidth); }
FLASHQLA_INLINE Vec load_f16(const std::uint16_t* p) {
  return lanes([&](int i) { return f16_to_float(p[i]); });
}
FLASHQLA_INLINE Vec load_f16_partial(const std::uint16_t* p, int n) {
  return lanes([&](int i) { return i < n ? f16_to_float(p[i]) : 0.0f; });
}
FLASHQLA_INLINE void store_f16_partial(std::uint16_t* p, Vec a, int n) {
  for (int i = 0; i < n; ++i) p[i] = float_to_f16(a.lane[i]);
}
FLASHQLA_INLINE void store_f16(std::uint16_t* p, Vec a) { store_f16_partial(p, a, kWidth); }

FLASHQLA_INLINE Vec sum_each(const Vec (&r)[kWidth]) {
  return lanes([&](int i) { return sum(r[i]); });
}
FLASHQLA_INLINE void store_halves(float* low, float* high, Vec a) {
  for (int i = 0; i < kWidth / 2; ++i) {
    low[i] = a.lane[i];
    high[i] = a.lane[kWidth / 2 + i];
  }
}

FLASHQLA_INLINE void transpose(Vec (&r)[kWidth]) {
  for (int i = 0; i < kWidth; ++i) {
    for (int j = 0; j < i; ++j) {
      const float upper = r[j].lane[i];
      r[j].lane[i] = r[i].lane[j];
      r[i].lane[j] = upper;
    }
  }
}

#include "cpu/simd/scalar_end.inc"
