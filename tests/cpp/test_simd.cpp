// Conversions of the vector operations, for every 16-bit pattern and for numbers around every rounding boundary, against
// common/scalar.hpp.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/scalar.hpp"
#include "cpu/cpuid.hpp"
#include "cpu/simd/scalar.hpp"
#if defined(__x86_64__)
#include "cpu/simd/avx512.hpp"  // first: it silences false warnings of the intrinsics' header

#include "cpu/simd/avx2.hpp"
#endif

namespace flashqla::test {

/// 32 floats whose conversion is checked at once. Suffix "two": by the operations on two vectors.
struct Numbers {
  float f[32], f_two[32];
  std::uint16_t bf16[32], bf16_two[32], f16[32];
};

}  // namespace flashqla::test

// One function for each instruction set: f -> bf16 and f16, and back into f.
#define FLASHQLA_TEST_CONVERSIONS                                                                                   \
  inline void narrow(flashqla::test::Numbers& x) {                                                                  \
    for (int i = 0; i < 32; i += kWidth) {                                                                          \
      store_bf16(x.bf16 + i, load(x.f + i));                                                                        \
      store_f16(x.f16 + i, load(x.f + i));                                                                          \
    }                                                                                                               \
    for (int i = 0; i < 32; i += 2 * kWidth) store_bf16_two(x.bf16_two + i, load(x.f + i), load(x.f + i + kWidth)); \
  }                                                                                                                 \
  inline void widen_bf16(flashqla::test::Numbers& x) {                                                              \
    for (int i = 0; i < 32; i += kWidth) store(x.f + i, load_bf16(x.bf16 + i));                                     \
    for (int i = 0; i < 32; i += 2 * kWidth) {                                                                      \
      Vec a, b;                                                                                                     \
      load_bf16_two(x.bf16 + i, a, b);                                                                              \
      store(x.f_two + i, a);                                                                                        \
      store(x.f_two + i + kWidth, b);                                                                               \
    }                                                                                                               \
  }                                                                                                                 \
  inline void widen_f16(flashqla::test::Numbers& x) {                                                               \
    for (int i = 0; i < 32; i += kWidth) store(x.f + i, load_f16(x.f16 + i));                                       \
  }

#include "cpu/simd/scalar_begin.inc"
FLASHQLA_TEST_CONVERSIONS
#include "cpu/simd/scalar_end.inc"
#if defined(__x86_64__)
#include "cpu/simd/avx2_begin.inc"
FLASHQLA_TEST_CONVERSIONS
#include "cpu/simd/avx2_end.inc"
#include "cpu/simd/avx512_begin.inc"
FLASHQLA_TEST_CONVERSIONS
#include "cpu/simd/avx512_end.inc"
#endif

namespace flashqla::test {
namespace {

struct Conversions {
  const char* name;
  void (*narrow)(Numbers&);
  void (*widen_bf16)(Numbers&);
  void (*widen_f16)(Numbers&);
};

std::vector<Conversions> conversions() {
  std::vector<Conversions> all{{"scalar", cpu::scalar::narrow, cpu::scalar::widen_bf16, cpu::scalar::widen_f16}};
#if defined(__x86_64__)
  if (cpu::missing_avx2().empty()) all.push_back({"avx2", cpu::avx2::narrow, cpu::avx2::widen_bf16, cpu::avx2::widen_f16});
  if (cpu::missing_avx512().empty())
    all.push_back({"avx512", cpu::avx512::narrow, cpu::avx512::widen_bf16, cpu::avx512::widen_f16});
#endif
  return all;
}

bool same(float a, float b) {
  return std::isnan(a) ? std::isnan(b) : std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

TEST(Simd, WidensEvery16BitPattern) {
  for (const Conversions& set : conversions()) {
    for (std::uint32_t first = 0; first < 0x10000; first += 32) {
      Numbers x;
      for (std::uint32_t i = 0; i < 32; ++i) x.bf16[i] = x.f16[i] = static_cast<std::uint16_t>(first + i);
      set.widen_bf16(x);
      for (int i = 0; i < 32; ++i) {
        ASSERT_TRUE(same(x.f[i], bf16_to_float(x.bf16[i]))) << set.name << " bf16 " << first + i;
        ASSERT_TRUE(same(x.f_two[i], bf16_to_float(x.bf16[i]))) << set.name << " bf16, two vectors " << first + i;
      }
      set.widen_f16(x);
      for (int i = 0; i < 32; ++i) ASSERT_TRUE(same(x.f[i], f16_to_float(x.f16[i]))) << set.name << " f16 " << first + i;
    }
  }
}

TEST(Simd, NarrowsAroundEveryBoundary) {
  for (const Conversions& set : conversions()) {
    for (std::uint32_t high = 0; high < 0x10000; ++high) {
      Numbers x;
      // Below, at and above the halfway points of bf16 (bit 15) and of f16 (bit 12), for even and odd results. The second half
      // holds no NaN, so that pairs of vectors with NaN in one of them occur.
      constexpr std::uint32_t kLow[16] = {0,      1,      0xfff,  0x1000, 0x1001, 0x1fff, 0x2000, 0x2fff,
                                          0x3000, 0x3001, 0x7fff, 0x8000, 0x8001, 0xefff, 0xf000, 0xffff};
      for (int i = 0; i < 16; ++i) {
        x.f[i] = std::bit_cast<float>((high << 16) | kLow[i]);
        x.f[16 + i] = std::bit_cast<float>(((high & 0x807f) << 16) | 0x3f000000 | kLow[i]);
      }
      set.narrow(x);
      for (int i = 0; i < 32; ++i) {
        const std::uint16_t bf16 = float_to_bf16(x.f[i]);
        ASSERT_TRUE(same(bf16_to_float(x.bf16[i]), bf16_to_float(bf16))) << set.name << " bf16 " << high << ' ' << i;
        ASSERT_TRUE(same(bf16_to_float(x.bf16_two[i]), bf16_to_float(bf16)))
            << set.name << " bf16, two vectors " << high << ' ' << i;
        ASSERT_TRUE(same(f16_to_float(x.f16[i]), f16_to_float(float_to_f16(x.f[i])))) << set.name << " f16 " << high << ' ' << i;
      }
    }
  }
}

}  // namespace
}  // namespace flashqla::test
