// Vector operations of AVX-512 (F, BW, DQ, VL). The same names exist in scalar.hpp and avx2.hpp; the kernels are written once
// against them. Loads and stores take any alignment. "partial" touches the first n elements only (0 <= n <= kWidth) and gives
// zeros beyond.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)  // gcc's own header passes deliberately undefined vectors around
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include <cstdint>

#include "cpu/simd/inline.hpp"

#include "cpu/simd/avx512_begin.inc"

using Vec = __m512;
inline constexpr int kWidth = 16;
inline constexpr int kRegisters = 32;

FLASHQLA_INLINE Vec zero() { return _mm512_setzero_ps(); }
FLASHQLA_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
FLASHQLA_INLINE __mmask16 first_lanes_mask(int n) {
  return static_cast<__mmask16>(n >= kWidth ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1u);
}

FLASHQLA_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
/// Keeps a loaded value in a register: gcc may otherwise load it again for each use.
FLASHQLA_INLINE Vec in_register(Vec a) {
  asm("" : "+v"(a));
  return a;
}
FLASHQLA_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
/// To memory that nobody reads soon, past the caches. p is 64-byte aligned; finish_streams() orders it before later stores.
FLASHQLA_INLINE void store_stream(float* p, Vec a) { _mm512_stream_ps(p, a); }
FLASHQLA_INLINE void finish_streams() { _mm_sfence(); }
FLASHQLA_INLINE Vec load_partial(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes_mask(n), p); }
FLASHQLA_INLINE void store_partial(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, first_lanes_mask(n), a); }

/// a * b + c and c - a * b, rounded once.
FLASHQLA_INLINE Vec fmadd(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
FLASHQLA_INLINE Vec fnmadd(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
FLASHQLA_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
FLASHQLA_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
FLASHQLA_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
FLASHQLA_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
FLASHQLA_INLINE Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
/// If either is NaN the result is b: put the value that must propagate second.
FLASHQLA_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
FLASHQLA_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
FLASHQLA_INLINE Vec abs(Vec a) { return _mm512_abs_ps(a); }
FLASHQLA_INLINE Vec round_to_integer(Vec a) { return _mm512_roundscale_ps(a, 8); }
/// x 2^n for an integral n within +-260, with overflow to infinity.
FLASHQLA_INLINE Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
/// a < b ? x : y in each lane (false for NaN).
FLASHQLA_INLINE Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
/// The first n lanes of a (any n), zero elsewhere whatever a holds there.
FLASHQLA_INLINE Vec first_lanes(Vec a, int n) { return _mm512_maskz_mov_ps(first_lanes_mask(n), a); }

/// Sum of the lanes, always in the same order.
FLASHQLA_INLINE float sum(Vec a) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

FLASHQLA_INLINE Vec from_bf16_bits(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
/// Round to nearest even, for any number but NaN: the bf16 values in the upper halves of the lanes (lower halves undefined).
FLASHQLA_INLINE __m512i round_number_to_bf16(Vec a) {
  const __m512i bits = _mm512_castps_si512(a), half = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  return _mm512_mask_sub_epi32(half, odd, half, _mm512_set1_epi32(-1));
}
/// The same for any value: NaN stays NaN.
FLASHQLA_INLINE __m512i round_to_bf16(Vec a) {
  const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(round_number_to_bf16(a), nan, _mm512_castps_si512(a), _mm512_set1_epi32(0x400000));
}
FLASHQLA_INLINE __m256i to_bf16_bits(Vec a) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_bf16(a), 16)); }

FLASHQLA_INLINE Vec load_bf16(const std::uint16_t* p) {
  return from_bf16_bits(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
FLASHQLA_INLINE Vec load_bf16_partial(const std::uint16_t* p, int n) {
  return from_bf16_bits(_mm256_maskz_loadu_epi16(first_lanes_mask(n), p));
}
FLASHQLA_INLINE void store_bf16(std::uint16_t* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16_bits(a)); }
/// Two vectors that lie one after the other.
FLASHQLA_INLINE void load_bf16_two(const std::uint16_t* p, Vec& a, Vec& b) {
  // Word i of the first half, respectively the second, to the upper half of lane i.
  const __m512i first = _mm512_set_epi32(0xf0000, 0xe0000, 0xd0000, 0xc0000, 0xb0000, 0xa0000, 0x90000, 0x80000, 0x70000, 0x60000,
                                         0x50000, 0x40000, 0x30000, 0x20000, 0x10000, 0x0);
  const __m512i second = _mm512_or_si512(first, _mm512_set1_epi32(0x100000));
  const __m512i bits = _mm512_loadu_si512(p);
  a = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, first, bits));
  b = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, second, bits));
}
FLASHQLA_INLINE void store_bf16_two(std::uint16_t* p, Vec a, Vec b) {
  const __m512i upper =
      _mm512_set_epi32(0x3f003d, 0x3b0039, 0x370035, 0x330031, 0x2f002d, 0x2b0029, 0x270025, 0x230021, 0x1f001d, 0x1b0019,
                       0x170015, 0x130011, 0xf000d, 0xb0009, 0x70005, 0x30001);  // words 1, 3, 5, ... of both
  __m512i bits_a = round_number_to_bf16(a), bits_b = round_number_to_bf16(b);
  if (__builtin_expect(_mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0, 0)) {
    bits_a = round_to_bf16(a);
    bits_b = round_to_bf16(b);
  }
  _mm512_storeu_si512(p, _mm512_permutex2var_epi16(bits_a, upper, bits_b));
}
FLASHQLA_INLINE void store_bf16_partial(std::uint16_t* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes_mask(n), to_bf16_bits(a));
}
FLASHQLA_INLINE Vec load_f16(const std::uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
FLASHQLA_INLINE Vec load_f16_partial(const std::uint16_t* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes_mask(n), p));
}
FLASHQLA_INLINE __m256i to_f16_bits(Vec a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FLASHQLA_INLINE void store_f16(std::uint16_t* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_f16_bits(a)); }
FLASHQLA_INLINE void store_f16_partial(std::uint16_t* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes_mask(n), to_f16_bits(a));
}

/// Lane i is the sum of r[i]'s lanes, each in the same order.
FLASHQLA_INLINE Vec sum_each(const Vec (&r)[16]) {
  Vec t[8];
  FLASHQLA_UNROLL
  for (int i = 0; i < 8; ++i)
    t[i] = _mm512_add_ps(_mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]), _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]));
  FLASHQLA_UNROLL
  for (int i = 0; i < 4; ++i)  // one sum of four lanes in each 128-bit block, rows 4 i .. 4 i + 3
    t[i] = _mm512_add_ps(_mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44), _mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0xee));
  FLASHQLA_UNROLL
  for (int i = 0; i < 2; ++i)
    t[i] = _mm512_add_ps(_mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0x88), _mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(t[0], t[1], 0x88), _mm512_shuffle_f32x4(t[0], t[1], 0xdd));
}
/// The first half of the lanes to `low`, the second to `high`.
FLASHQLA_INLINE void store_halves(float* low, float* high, Vec a) {
  _mm256_storeu_ps(low, _mm512_castps512_ps256(a));
  _mm256_storeu_ps(high, _mm512_extractf32x8_ps(a, 1));
}

/// Transposes the kWidth x kWidth matrix whose rows are r.
FLASHQLA_INLINE void transpose(Vec (&r)[16]) {
  Vec t[16];
  FLASHQLA_UNROLL
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  FLASHQLA_UNROLL
  for (int i = 0; i < 4; ++i) {  // r[4 i + c]: column c of each 4x4 block, rows 4 i .. 4 i + 3
    r[4 * i] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  FLASHQLA_UNROLL
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88);
    t[4 + c] = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
    t[8 + c] = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
    t[12 + c] = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
  }
  FLASHQLA_UNROLL
  for (int c = 0; c < 8; ++c) {
    r[c] = _mm512_shuffle_f32x4(t[c], t[8 + c], 0x88);
    r[8 + c] = _mm512_shuffle_f32x4(t[c], t[8 + c], 0xdd);
  }
}

#include "cpu/simd/avx512_end.inc"
