// The operations of avx512.hpp plus AVX512_BF16: products of pairs of bf16 numbers summed into f32. The instructions take
// denormal inputs as zero. A "pair row" holds two rows of a matrix, element j of both in the 32-bit lane j, the first in the low
// half.
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
/// Two rows of f32, rounded and interleaved.
FLASHQLA_INLINE PairVec pack_pair(Vec first, Vec second) {
  const __m512i low = _mm512_srli_epi32(round_to_bf16(first), 16);
  return _mm512_mask_blend_epi16(0xaaaaaaaau, low, round_to_bf16(second));
}
/// Two rows of bf16, interleaved.
FLASHQLA_INLINE PairVec interleave_bf16(__m256i first, __m256i second) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
}

#include "cpu/simd/avx512bf16_end.inc"
