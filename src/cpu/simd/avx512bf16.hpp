// The operations of avx512.hpp plus AVX512_BF16, products of pairs of bf16 numbers summed into f32, and AVX512_VNNI, products of
// pairs of int16 summed into int32. The bf16 instructions take denormal inputs as zero. A "pair row" holds two rows of a matrix,
// element j of both in the 32-bit lane j, the first in the low half.
#pragma once

#include "cpu/simd/avx512.hpp"

#include "cpu/simd/avx512bf16_begin.inc"

using namespace avx512;
using PairVec = __m512i;

FLASHQLA_INLINE PairVec load_pair(const std::uint32_t* p) { return _mm512_loadu_si512(p); }
FLASHQLA_INLINE void store_pair(std::uint32_t* p, PairVec a) { _mm512_storeu_si512(p, a); }
/// The pair at p in every lane.
FLASHQLA_INLINE PairVec set1_pair(const std::uint16_t* p) {
  std::int32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return _mm512_set1_epi32(pair);
}
/// acc + a.first * b.first + a.second * b.second.
FLASHQLA_INLINE Vec dot_pair(Vec acc, PairVec a, PairVec b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
/// The same of pairs of int16; acc holds int32. Not the intrinsic: gcc 12 copies an accumulator of another type before and after.
FLASHQLA_INLINE Vec dot_int16(Vec acc, PairVec a, PairVec b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}
FLASHQLA_INLINE Vec from_int32(Vec a) { return _mm512_cvtepi32_ps(_mm512_castps_si512(a)); }
/// Two rows of f32, rounded to bf16 and interleaved.
FLASHQLA_INLINE PairVec pack_pair(Vec first, Vec second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                         19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (PairVec)_mm512_cvtne2ps_pbh(second, first));
}
/// Two rows of f32 within the range of int16, rounded to it and interleaved.
FLASHQLA_INLINE PairVec pack_int16(Vec first, Vec second) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_cvtps_epi32(first), _mm512_slli_epi32(_mm512_cvtps_epi32(second), 16));
}
/// 2 kWidth numbers within the range of int16 to int16.
FLASHQLA_INLINE void store_int16(std::int16_t* p, Vec low, Vec high) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(low)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + kWidth), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(high)));
}
/// Two pair rows of kWidth columns to their first, or second, row: neighbours of 2 kWidth columns in one lane.
FLASHQLA_INLINE PairVec first_halves(PairVec low, PairVec high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)), _mm512_cvtepi32_epi16(high), 1);
}
FLASHQLA_INLINE PairVec second_halves(PairVec low, PairVec high) {
  return first_halves(_mm512_srli_epi32(low, 16), _mm512_srli_epi32(high, 16));
}
/// kWidth numbers of int16 as f32.
FLASHQLA_INLINE Vec load_int16(const std::int16_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
/// The two rows of a pair row of bf16 as f32.
FLASHQLA_INLINE Vec first_of_pair(PairVec a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
FLASHQLA_INLINE Vec second_of_pair(PairVec a) {
  return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
/// Two rows of bf16, interleaved.
FLASHQLA_INLINE PairVec interleave_bf16(__m256i first, __m256i second) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
}

#include "cpu/simd/avx512bf16_end.inc"
