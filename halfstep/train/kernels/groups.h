// The codes of a group in registers of AVX-512, bit for bit those of the loops in codes.h.
//
// Values on their way to codes have 16 bits, the upper ones of fp32, of which codes keep none but these. Numbers widen and
// narrow inside lanes of 128 bits; `by_fours` orders the bytes of a group so that neighbours in fp32 are neighbours.

#pragma once

#include <immintrin.h>

#include "codes.h"

namespace {

inline __m512i by_fours(__m512i x) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
}

inline __m512i upper_halves(__m512i x, __m512i y) {
  const __m512i in_lanes = _mm512_set_epi16(63, 61, 59, 57, 31, 29, 27, 25, 55, 53, 51, 49, 23, 21, 19, 17, 47, 45, 43, 41,
                                            15, 13, 11, 9, 39, 37, 35, 33, 7, 5, 3, 1);
  return _mm512_permutex2var_epi16(x, in_lanes, y);
}

// The least of 64 unsigned numbers in 16 bits, and the greatest.
inline int32_t least_of(__m512i x, __m512i y) {
  x = _mm512_min_epu16(x, y);
  const __m256i half = _mm256_min_epu16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
  return _mm_extract_epi16(
      _mm_minpos_epu16(_mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1))), 0);
}

inline int32_t greatest_of(__m512i x, __m512i y) {
  const __m512i all = _mm512_set1_epi16(-1);
  return 0xFFFF - least_of(_mm512_xor_si512(x, all), _mm512_xor_si512(y, all));
}

template <bool kSigned>
__attribute__((always_inline)) inline void decode_group(const uint8_t* from, int32_t base, float* to) {
  const __m512i zero = _mm512_setzero_si512(), least = _mm512_set1_epi16(base >= 0 ? base : -1 - base);
  const __m512i unit = _mm512_set1_epi16(base >= 0 ? 1 << (kFine - 16) : 1 << (kCoarse - 16));
  const __m512i codes = by_fours(_mm512_loadu_si512(from)), sizes = kSigned ? _mm512_abs_epi8(codes) : codes;
  for (int i = 0; i < 2; i++, to += 32) {
    const __m512i size = i ? _mm512_unpackhi_epi8(sizes, zero) : _mm512_unpacklo_epi8(sizes, zero);
    const __m512i sign = i ? _mm512_unpackhi_epi8(zero, codes) : _mm512_unpacklo_epi8(zero, codes);
    const __mmask32 some = _mm512_test_epi16_mask(size, size);
    __m512i value = _mm512_maskz_mullo_epi16(some, _mm512_add_epi16(size, least), unit);
    if (kSigned) value = _mm512_or_si512(value, _mm512_and_si512(sign, _mm512_set1_epi16(int16_t(0x8000))));
    _mm512_storeu_si512(to, _mm512_unpacklo_epi16(zero, value));
    _mm512_storeu_si512(to + 16, _mm512_unpackhi_epi16(zero, value));
  }
}

// Writes the codes of a group; returns its base.
template <int kState, bool kSigned, bool kStochastic>
__attribute__((always_inline)) inline int16_t encode_group(const float* from, const uint32_t* random, uint8_t* to) {
  constexpr int32_t kMost = kSigned ? 127 : 255;
  __m512i values[2], sizes[2], more[2];  // with the noise for 4 bits of the fraction, and what 3 bits add
  for (int i = 0; i < 2; i++, from += 32, random += 32) {
    __m512i noisy[2], hash[2];
    for (int j = 0; j < 2; j++) {
      const __m512i value = _mm512_loadu_si512(from + 16 * j);
      hash[j] = _mm512_loadu_si512(random + 16 * j);
      const __m512i bits = kState == 0 ? _mm512_srli_epi32(hash[j], 12) : hash[j];
      const __m512i noise = kStochastic ? _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFF)) : _mm512_set1_epi32(0x40000);
      const __mmask16 some = _mm512_test_epi32_mask(value, _mm512_set1_epi32(0x7FFFFFFF));  // a bit that no code keeps
      noisy[j] = _mm512_maskz_or_epi32(some, _mm512_add_epi32(value, noise), _mm512_set1_epi32(0x10000));
    }
    values[i] = upper_halves(noisy[0], noisy[1]);
    sizes[i] = _mm512_and_si512(values[i], _mm512_set1_epi16(0x7FFF));
    const __m512i bits = upper_halves(hash[0], hash[1]);
    more[i] = _mm512_and_si512(kState == 0 ? _mm512_srli_epi16(bits, 12) : bits, _mm512_set1_epi16(8));
    if (!kStochastic) more[i] = _mm512_set1_epi16(4);
  }
  const __m512i one = _mm512_set1_epi16(1);
  const int32_t top = greatest_of(sizes[0], sizes[1]);
  const int32_t least = least_of(_mm512_sub_epi16(sizes[0], one), _mm512_sub_epi16(sizes[1], one)) + 1;  // but for zeros
  const bool near = (top >> 3) - (least >> 3) < kMost;
  if (!near)
    for (int i = 0; i < 2; i++) sizes[i] = _mm512_add_epi16(sizes[i], more[i]);
  const int32_t most = near ? top >> 3 : greatest_of(sizes[0], sizes[1]) >> 4, base = most > kMost ? most - kMost : 0;
  const __m512i unit = _mm512_set1_epi16(near ? 1 << 13 : 1 << 12);
  __m512i codes[2];
  for (int i = 0; i < 2; i++) {
    codes[i] = _mm512_mulhi_epu16(sizes[i], unit);
    if (!kSigned) codes[i] = _mm512_max_epu16(codes[i], _mm512_set1_epi16(base + 1));
    codes[i] = _mm512_subs_epu16(codes[i], _mm512_set1_epi16(base));
    if (!kSigned) codes[i] = _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(values[i], values[i]), codes[i]);
  }
  __m512i bytes = _mm512_packus_epi16(codes[0], codes[1]);
  if (kSigned) {
    const __mmask64 negative = _mm512_movepi8_mask(_mm512_packs_epi16(values[0], values[1]));
    bytes = _mm512_mask_sub_epi8(bytes, negative, _mm512_setzero_si512(), bytes);
  }
  _mm512_storeu_si512(to, by_fours(bytes));
  return int16_t(near ? base : -1 - base);
}

}  // namespace
