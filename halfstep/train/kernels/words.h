// Words, elements of 16 bits, between memory and registers of fp32: 32 of them with AVX-512, 16 with AVX2.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

#if defined(__AVX512BW__)

constexpr int kWords = 32;
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

#else

constexpr int kWords = 16;

// Packing and unpacking work on each half of a register; this moves the words between to where they belong.
inline __m256i across(__m256i x) { return _mm256_permute4x64_epi64(x, 0xD8); }

// Numbers of a lower and an upper word, of half of the words; both are `across`.
inline __m256i zipped(__m256i lower, __m256i upper, int half) {
  return half ? _mm256_unpackhi_epi16(lower, upper) : _mm256_unpacklo_epi16(lower, upper);
}

// The words of two registers, to be brought `across`.
inline __m256i lower_halves(__m256i x, __m256i y) {
  const __m256i zero = _mm256_setzero_si256();
  return _mm256_packus_epi32(_mm256_blend_epi16(x, zero, 0xAA), _mm256_blend_epi16(y, zero, 0xAA));
}
inline __m256i upper_halves(__m256i x, __m256i y) {
  return _mm256_packus_epi32(_mm256_srli_epi32(x, 16), _mm256_srli_epi32(y, 16));
}

inline __m256i loaded(const void* from) { return _mm256_loadu_si256((const __m256i*)from); }
inline void store(void* to, __m256i x) { _mm256_storeu_si256((__m256i*)to, x); }

inline void join_words(const uint16_t* high, const int16_t* low, float* to) {
  const __m256i upper = across(loaded(high)), rest = across(loaded(low));
  const __m256i none = _mm256_cmpeq_epi16(_mm256_slli_epi16(upper, 1), _mm256_setzero_si256());
  const __m256i negative = _mm256_srai_epi16(rest, 15), past = _mm256_and_si256(none, negative);
  const __m256i lower = _mm256_andnot_si256(past, rest);  // a zero that was written past it
  const __m256i joined = _mm256_add_epi16(upper, _mm256_andnot_si256(past, negative));
  for (int half = 0; half < 2; half++) store(to + 8 * half, zipped(lower, joined, half));
}

inline void split_words(const float* from, uint16_t* high, int16_t* low) {
  const __m256i x = loaded(from), y = loaded(from + 8), most = _mm256_set1_epi16(0x7FFF);
  const __m256i upper = upper_halves(x, y);
  __m256i lower = lower_halves(x, y), rounded = _mm256_sub_epi16(upper, _mm256_srai_epi16(lower, 15));
  const __m256i last = _mm256_cmpeq_epi16(_mm256_and_si256(upper, most), most);
  if (__builtin_expect(_mm256_movemask_epi8(last), 0)) {  // NaN that would round to a zero
    const __m256i past = _mm256_and_si256(last, _mm256_srai_epi16(lower, 15));
    rounded = _mm256_blendv_epi8(rounded, upper, past), lower = _mm256_blendv_epi8(lower, most, past);
  }
  store(high, across(rounded));
  store(low, across(lower));
}

inline void widen_words(const void* from, float factor, float* to) {
  const __m256i words = across(loaded(from));
  for (int half = 0; half < 2; half++)
    _mm256_storeu_ps(to + 8 * half, _mm256_mul_ps(_mm256_castsi256_ps(zipped(_mm256_setzero_si256(), words, half)),
                                                  _mm256_set1_ps(factor)));
}

#endif

}  // namespace
