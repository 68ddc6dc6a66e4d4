// The vector operations in plain C++ for any processor; avx512.hpp says what each does. Four floats are what every 64-bit
// processor holds in a register.
#pragma once

#include <cstdint>

#include "cpu/simd/inline.hpp"

#include "cpu/simd/scalar_begin.inc"

inline constexpr int kWidth = 4;
inline constexpr int kRegisters = 16;

using Vec = float __attribute__((vector_size(16)));
using LaneBits = std::int32_t __attribute__((vector_size(16)));  // also what comparisons of two Vec give: all bits set where true

/// f(i) in lane i.
template <class Function>
FLASHQLA_INLINE Vec lanes(Function f) {
  return Vec{f(0), f(1), f(2), f(3)};
}

FLASHQLA_INLINE Vec zero() { return Vec{}; }
FLASHQLA_INLINE Vec set1(float x) { return Vec{x, x, x, x}; }
FLASHQLA_INLINE LaneBits first_lanes_mask(int n) { return LaneBits{0, 1, 2, 3} < n; }

FLASHQLA_INLINE Vec load(const float* p) {
  Vec a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
FLASHQLA_INLINE Vec in_register(Vec a) { return a; }
FLASHQLA_INLINE void store(float* p, Vec a) { __builtin_memcpy(p, &a, sizeof a); }
FLASHQLA_INLINE void store_stream(float* p, Vec a) { store(p, a); }
FLASHQLA_INLINE void finish_streams() {}
FLASHQLA_INLINE Vec load_partial(const float* p, int n) {
  return lanes([&](int i) { return i < n ? p[i] : 0.0f; });
}
FLASHQLA_INLINE void store_partial(float* p, Vec a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a[i];
}

/// Rounded twice, unlike those of the other instruction sets.
FLASHQLA_INLINE Vec fmadd(Vec a, Vec b, Vec c) { return a * b + c; }
FLASHQLA_INLINE Vec fnmadd(Vec a, Vec b, Vec c) { return c - a * b; }
FLASHQLA_INLINE Vec add(Vec a, Vec b) { return a + b; }
FLASHQLA_INLINE Vec sub(Vec a, Vec b) { return a - b; }
FLASHQLA_INLINE Vec mul(Vec a, Vec b) { return a * b; }
FLASHQLA_INLINE Vec div(Vec a, Vec b) { return a / b; }
FLASHQLA_INLINE Vec sqrt(Vec a) {
  return lanes([&](int i) { return __builtin_sqrtf(a[i]); });
}
FLASHQLA_INLINE Vec select_less(Vec a, Vec b, Vec x, Vec y) { return a < b ? x : y; }
FLASHQLA_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
FLASHQLA_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
FLASHQLA_INLINE Vec abs(Vec a) { return (Vec)((LaneBits)a & 0x7fffffff); }
/// Adding 1.5 * 2^23 leaves no fraction bits; numbers of 2^22 and more have none that matter to exp(), and NaN stays NaN.
FLASHQLA_INLINE Vec round_to_integer(Vec a) {
  const Vec shift = set1(12582912.0f);
  return select_less(abs(a), set1(4194304.0f), (a + shift) - shift, a);
}
/// In two factors, since one alone may be outside the exponent range although the product is not.
FLASHQLA_INLINE Vec scale_by_power(Vec x, Vec n) {
  const LaneBits exponent = __builtin_convertvector(n == n ? n : zero(), LaneBits);
  const LaneBits half = exponent >> 1, rest = exponent - half;
  return x * (Vec)((half + 127) << 23) * (Vec)((rest + 127) << 23);
}
FLASHQLA_INLINE Vec first_lanes(Vec a, int n) { return (Vec)((LaneBits)a & first_lanes_mask(n)); }

FLASHQLA_INLINE float sum(Vec a) { return (a[0] + a[2]) + (a[1] + a[3]); }

using Halves = std::uint16_t __attribute__((vector_size(8)));

FLASHQLA_INLINE LaneBits load_u16(const std::uint16_t* p) {
  Halves a;
  __builtin_memcpy(&a, p, sizeof a);
  return __builtin_convertvector(a, LaneBits);
}
FLASHQLA_INLINE LaneBits load_u16_partial(const std::uint16_t* p, int n) {
  const auto element = [&](int i) { return i < n ? p[i] : 0; };
  return LaneBits{element(0), element(1), element(2), element(3)};
}
FLASHQLA_INLINE void store_u16(std::uint16_t* p, LaneBits a) {
  const Halves halves = __builtin_convertvector(a, Halves);
  __builtin_memcpy(p, &halves, sizeof halves);
}
FLASHQLA_INLINE void store_u16_partial(std::uint16_t* p, LaneBits a, int n) {
  for (int i = 0; i < n; ++i) p[i] = static_cast<std::uint16_t>(a[i]);
}

// The conversions of common/scalar.hpp, lane by lane.
FLASHQLA_INLINE Vec from_bf16_bits(LaneBits bits) { return (Vec)(bits << 16); }
FLASHQLA_INLINE LaneBits to_bf16_bits(Vec a) {
  const LaneBits bits = (LaneBits)a;
  const LaneBits rounded = ((bits >> 16) + (((bits & 0xffff) + 0x7fff + ((bits >> 16) & 1)) >> 16)) & 0xffff;
  return a != a ? ((bits >> 16) & 0xffff) | 0x40 : rounded;
}
FLASHQLA_INLINE Vec from_f16_bits(LaneBits bits) {
  const LaneBits sign = (bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  const LaneBits normal = (magnitude << 13) + 0x38000000;
  const LaneBits subnormal = (LaneBits)(__builtin_convertvector(magnitude, Vec) * 0x1p-24f);
  return (Vec)(sign | (magnitude >= 0x7c00 ? normal + 0x38000000 : magnitude < 0x400 ? subnormal : normal));
}
FLASHQLA_INLINE LaneBits to_f16_bits(Vec a) {
  const LaneBits bits = (LaneBits)a, sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  const LaneBits subnormal = (LaneBits)((Vec)magnitude + 0.5f) - 0x3f000000;
  using Unsigned = std::uint32_t __attribute__((vector_size(16)));  // lanes that are not taken may wrap around
  const Unsigned wide = (Unsigned)magnitude;
  const LaneBits normal = (LaneBits)((wide - 0x38000000u + 0xfffu + ((wide >> 13) & 1u)) >> 13);
  const LaneBits finite = magnitude < 0x38800000 ? subnormal : normal;
  return sign | (magnitude > 0x7f800000 ? 0x7e00 : magnitude >= 0x477ff000 ? 0x7c00 : finite);
}

FLASHQLA_INLINE Vec load_bf16(const std::uint16_t* p) { return from_bf16_bits(load_u16(p)); }
FLASHQLA_INLINE Vec load_bf16_partial(const std::uint16_t* p, int n) { return from_bf16_bits(load_u16_partial(p, n)); }
FLASHQLA_INLINE void store_bf16(std::uint16_t* p, Vec a) { store_u16(p, to_bf16_bits(a)); }
/// Two vectors that lie one after the other.
FLASHQLA_INLINE void load_bf16_two(const std::uint16_t* p, Vec& a, Vec& b) {
  a = load_bf16(p);
  b = load_bf16(p + kWidth);
}
FLASHQLA_INLINE void store_bf16_two(std::uint16_t* p, Vec a, Vec b) {
  store_bf16(p, a);
  store_bf16(p + kWidth, b);
}
FLASHQLA_INLINE void store_bf16_partial(std::uint16_t* p, Vec a, int n) { store_u16_partial(p, to_bf16_bits(a), n); }
FLASHQLA_INLINE Vec load_f16(const std::uint16_t* p) { return from_f16_bits(load_u16(p)); }
FLASHQLA_INLINE Vec load_f16_partial(const std::uint16_t* p, int n) { return from_f16_bits(load_u16_partial(p, n)); }
FLASHQLA_INLINE void store_f16(std::uint16_t* p, Vec a) { store_u16(p, to_f16_bits(a)); }
FLASHQLA_INLINE void store_f16_partial(std::uint16_t* p, Vec a, int n) { store_u16_partial(p, to_f16_bits(a), n); }

FLASHQLA_INLINE Vec sum_each(const Vec (&r)[kWidth]) {
  return lanes([&](int i) { return sum(r[i]); });
}
FLASHQLA_INLINE void store_halves(float* low, float* high, Vec a) {
  for (int i = 0; i < kWidth / 2; ++i) {
    low[i] = a[i];
    high[i] = a[kWidth / 2 + i];
  }
}

FLASHQLA_INLINE void transpose(Vec (&r)[kWidth]) {
  for (int i = 0; i < kWidth; ++i) {
    for (int j = 0; j < i; ++j) {
      const float upper = r[j][i];
      r[j][i] = r[i][j];
      r[i][j] = upper;
    }
  }
}

#include "cpu/simd/scalar_end.inc"
