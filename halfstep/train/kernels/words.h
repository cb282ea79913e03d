// 32 elements of 16 bits between memory and two registers of fp32, with AVX-512.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

using Numbers = __m512;

inline Numbers root_of(Numbers x) { return _mm512_sqrt_ps(x); }

struct Order {
  alignas(64) uint16_t at[32];

  operator __m512i() const { return _mm512_load_si512(at); }
};

// The words of 16 numbers: one word of the lower registers, one of the upper, beginning at `first`.
constexpr Order zip_from(int first) {
  Order order{};
  for (int i = 0; i < 32; i++) order.at[i] = uint16_t(first + i / 2 + i % 2 * 32);
  return order;
}

// Every second word of two registers.
constexpr Order unzip_from(int first) {
  Order order{};
  for (int i = 0; i < 32; i++) order.at[i] = uint16_t(first + 2 * i);
  return order;
}

constexpr Order kZip[2] = {zip_from(0), zip_from(16)}, kUnzip[2] = {unzip_from(0), unzip_from(1)};

// Numbers whose lower 16 bits are 0, of half of `words`.
inline __m512i widened(__m512i words, int half) { return _mm512_maskz_permutexvar_epi16(0xAAAAAAAA, kZip[half], words); }
inline __m512i zipped(__m512i lower, __m512i upper, int half) { return _mm512_permutex2var_epi16(lower, kZip[half], upper); }
inline __m512i lower_halves(__m512i x, __m512i y) { return _mm512_permutex2var_epi16(x, kUnzip[0], y); }
inline __m512i upper_halves(__m512i x, __m512i y) { return _mm512_permutex2var_epi16(x, kUnzip[1], y); }

inline void join_words(const uint16_t* high, const int16_t* low, float* to) {
  const __m512i upper = _mm512_loadu_si512(high), rest = _mm512_loadu_si512(low), zero = _mm512_setzero_si512();
  const __mmask32 none = _mm512_testn_epi16_mask(upper, _mm512_set1_epi16(0x7FFF));
  const __m512i lower = _mm512_mask_max_epi16(rest, none, rest, zero);  // a zero that was written past it
  const __m512i joined = _mm512_add_epi16(upper, _mm512_srai_epi16(lower, 15));
  for (int half = 0; half < 2; half++) _mm512_storeu_si512(to + 16 * half, zipped(lower, joined, half));
}

inline void split_words(const float* from, uint16_t* high, int16_t* low) {
  const __m512i x = _mm512_loadu_si512(from), y = _mm512_loadu_si512(from + 16);
  const __m512i upper = upper_halves(x, y), most = _mm512_set1_epi16(0x7FFF);
  __m512i lower = lower_halves(x, y), rounded = _mm512_sub_epi16(upper, _mm512_srai_epi16(lower, 15));
  const __mmask32 last = _mm512_cmpeq_epi16_mask(_mm512_and_si512(upper, most), most);
  if (__builtin_expect(last != 0, 0)) {  // NaN that would round to a zero
    const __mmask32 past = last & _mm512_movepi16_mask(lower);
    rounded = _mm512_mask_mov_epi16(rounded, past, upper), lower = _mm512_mask_mov_epi16(lower, past, most);
  }
  _mm512_storeu_si512(high, rounded);
  _mm512_storeu_si512(low, lower);
}

inline void widen_words(const void* from, float factor, float* to) {
  const __m512i words = _mm512_loadu_si512(from);
  for (int half = 0; half < 2; half++)
    _mm512_storeu_ps(to + 16 * half,
                     _mm512_mul_ps(_mm512_castsi512_ps(widened(words, half)), _mm512_set1_ps(factor)));
}

}  // namespace
