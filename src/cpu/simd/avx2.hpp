// Vector operations of AVX2 with FMA and F16C; avx512.hpp says what each does.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/simd/inline.hpp"

#include "cpu/simd/avx2_begin.inc"

using Vec = __m256;
inline constexpr int kWidth = 8;
inline constexpr int kRegisters = 16;

FLASHQLA_INLINE Vec zero() { return _mm256_setzero_ps(); }
FLASHQLA_INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
FLASHQLA_INLINE __m256i first_lanes_mask(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

FLASHQLA_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
FLASHQLA_INLINE Vec in_register(Vec a) {
  asm("" : "+x"(a));
  return a;
}
FLASHQLA_INLINE void store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
/// To memory that nobody reads soon, past the caches. p is 64-byte aligned; finish_streams() orders it before later stores.
FLASHQLA_INLINE void store_stream(float* p, Vec a) { _mm256_stream_ps(p, a); }
FLASHQLA_INLINE void finish_streams() { _mm_sfence(); }
FLASHQLA_INLINE Vec load_partial(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes_mask(n)); }
FLASHQLA_INLINE void store_partial(float* p, Vec a, int n) { _mm256_maskstore_ps(p, first_lanes_mask(n), a); }

FLASHQLA_INLINE Vec fmadd(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
FLASHQLA_INLINE Vec fnmadd(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
FLASHQLA_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
FLASHQLA_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
FLASHQLA_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
FLASHQLA_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
FLASHQLA_INLINE Vec sqrt(Vec a) { return _mm256_sqrt_ps(a); }
FLASHQLA_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
FLASHQLA_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
FLASHQLA_INLINE Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
FLASHQLA_INLINE Vec round_to_integer(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/// In two factors, since one alone may be outside the exponent range although the product is not.
FLASHQLA_INLINE Vec scale_by_power(Vec x, Vec n) {
  const __m256i exponent = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(exponent, 1);
  const __m256i rest = _mm256_sub_epi32(exponent, half);
  const __m256i bias = _mm256_set1_epi32(127);
  x = _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
FLASHQLA_INLINE Vec select_less(Vec a, Vec b, Vec x, Vec y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
FLASHQLA_INLINE Vec first_lanes(Vec a, int n) { return _mm256_and_ps(a, _mm256_castsi256_ps(first_lanes_mask(n))); }

FLASHQLA_INLINE float sum(Vec a) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

FLASHQLA_INLINE Vec from_bf16_bits(__m128i bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
/// Round to nearest even, NaN stays NaN: the bf16 values in the lower halves of the lanes, zeros above.
FLASHQLA_INLINE __m256i round_to_bf16(Vec a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
FLASHQLA_INLINE __m128i to_bf16_bits(Vec a) {
  const __m256i result = round_to_bf16(a);
  return _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1));
}
/// The first n of eight 16-bit numbers, zeros beyond.
FLASHQLA_INLINE __m128i load_u16_partial(const std::uint16_t* p, int n) {
  std::uint16_t buffer[kWidth] = {};
  for (int i = 0; i < n; ++i) buffer[i] = p[i];
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(buffer));
}
FLASHQLA_INLINE void store_u16_partial(std::uint16_t* p, __m128i a, int n) {
  std::uint16_t buffer[kWidth];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(buffer), a);
  for (int i = 0; i < n; ++i) p[i] = buffer[i];
}
FLASHQLA_INLINE __m128i to_f16_bits(Vec a) { return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

FLASHQLA_INLINE Vec load_bf16(const std::uint16_t* p) {
  return from_bf16_bits(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
FLASHQLA_INLINE Vec load_bf16_partial(const std::uint16_t* p, int n) { return from_bf16_bits(load_u16_partial(p, n)); }
FLASHQLA_INLINE void store_bf16(std::uint16_t* p, Vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16_bits(a)); }
/// Two vectors that lie one after the other.
FLASHQLA_INLINE void load_bf16_two(const std::uint16_t* p, Vec& a, Vec& b) {
  a = load_bf16(p);
  b = load_bf16(p + kWidth);
}
FLASHQLA_INLINE void store_bf16_two(std::uint16_t* p, Vec a, Vec b) {
  const __m256i mixed = _mm256_packus_epi32(round_to_bf16(a), round_to_bf16(b));  // a, b, a, b: four of each in turn
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(mixed, 0xd8));
}
FLASHQLA_INLINE void store_bf16_partial(std::uint16_t* p, Vec a, int n) { store_u16_partial(p, to_bf16_bits(a), n); }
FLASHQLA_INLINE Vec load_f16(const std::uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
FLASHQLA_INLINE Vec load_f16_partial(const std::uint16_t* p, int n) { return _mm256_cvtph_ps(load_u16_partial(p, n)); }
FLASHQLA_INLINE void store_f16(std::uint16_t* p, Vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_f16_bits(a)); }
FLASHQLA_INLINE void store_f16_partial(std::uint16_t* p, Vec a, int n) { store_u16_partial(p, to_f16_bits(a), n); }

FLASHQLA_INLINE Vec sum_each(const Vec (&r)[8]) {
  const Vec first = _mm256_hadd_ps(_mm256_hadd_ps(r[0], r[1]), _mm256_hadd_ps(r[2], r[3]));
  const Vec second = _mm256_hadd_ps(_mm256_hadd_ps(r[4], r[5]), _mm256_hadd_ps(r[6], r[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31));
}
FLASHQLA_INLINE void store_halves(float* low, float* high, Vec a) {
  _mm_storeu_ps(low, _mm256_castps256_ps128(a));
  _mm_storeu_ps(high, _mm256_extractf128_ps(a, 1));
}

FLASHQLA_INLINE void transpose(Vec (&r)[8]) {
  Vec t[8];
  FLASHQLA_UNROLL
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  FLASHQLA_UNROLL
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  FLASHQLA_UNROLL
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x20);
    t[4 + c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x31);
  }
  FLASHQLA_UNROLL
  for (int c = 0; c < 8; ++c) r[c] = t[c];
}

#include "cpu/simd/avx2_end.inc"
