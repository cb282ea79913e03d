// Words, elements of 16 bits, between memory and registers of fp32: 32 of them with AVX-512, 16 with AVX2.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

#if defined(__AVX512BW__)

constexpr int kWords = 32;
using Numbers = __m512;

inline Numbers root_of(Numbers x) { return _mm512_sqrt_ps(x); }

template <typename T>
struct Places {  // of numbers, or of bytes, in a register
  alignas(64) T at[64 / sizeof(T)];

  operator __m512i() const { return _mm512_load_si512(at); }
};

template <typename T, typename Place>
constexpr Places<T> places(const Place& place) {
  Places<T> made{};
  for (int i = 0; i < 64 / int(sizeof(T)); i++) made.at[i] = T(place(i));
  return made;
}

// In turn a number of one register and of another, for the first 16 of them and the rest; and back.
constexpr auto kZip = places<uint32_t>([](int i) { return i / 2 + i % 2 * 16; });
constexpr auto kZipRest = places<uint32_t>([](int i) { return 8 + i / 2 + i % 2 * 16; });
constexpr auto kEven = places<uint32_t>([](int i) { return 2 * i; }), kOdd = places<uint32_t>([](int i) { return 2 * i + 1; });
// Bytes of 16: moved up or down by a word; in turn a word of their lower and of their upper half.
constexpr auto kWordUp = places<uint8_t>([](int i) { return (i - 2) & 15; });
constexpr auto kWordDown = places<uint8_t>([](int i) { return (i + 2) & 15; });
constexpr auto kZipWords = places<uint8_t>([](int i) { return i % 16 / 4 * 2 + i % 2 + i / 2 % 2 * 8; });

// The lower, or upper, words of the numbers in two registers, in turn one of the first and of the second. Each is one
// operation, and so 32 words become numbers, and numbers words, if the numbers stand apart: those of even places in one
// register, those of odd places in another.
inline __m512i lower_halves(__m512i x, __m512i y) { return _mm512_mask_shuffle_epi8(x, 0xCCCCCCCCCCCCCCCC, y, kWordUp); }
inline __m512i upper_halves(__m512i x, __m512i y) { return _mm512_mask_shuffle_epi8(y, 0x3333333333333333, x, kWordDown); }

struct Pair {  // 32 numbers that stand apart
  __m512i even, odd;
};

inline Pair widened(__m512i words) { return {_mm512_slli_epi32(words, 16), _mm512_maskz_mov_epi16(0xAAAAAAAA, words)}; }

// Reads and writes 32 numbers, in memory apart as in registers, or in order.
template <bool kApart>
inline Pair take(const float* from) {
  const __m512i x = _mm512_loadu_si512(from), y = _mm512_loadu_si512(from + 16);
  if (kApart) return {x, y};
  return {_mm512_permutex2var_epi32(x, kEven, y), _mm512_permutex2var_epi32(x, kOdd, y)};
}

template <bool kApart>
inline void put(Pair x, float* to) {
  _mm512_storeu_si512(to, kApart ? x.even : _mm512_permutex2var_epi32(x.even, kZip, x.odd));
  _mm512_storeu_si512(to + 16, kApart ? x.odd : _mm512_permutex2var_epi32(x.even, kZipRest, x.odd));
}

template <bool kApart = false>
inline void join_words(const uint16_t* high, const int16_t* low, float* to) {
  const __m512i upper = _mm512_loadu_si512(high), rest = _mm512_loadu_si512(low), zero = _mm512_setzero_si512();
  const __mmask32 none = _mm512_testn_epi16_mask(upper, _mm512_set1_epi16(0x7FFF));
  const __m512i lower = _mm512_mask_max_epi16(rest, none, rest, zero);  // a zero that was written past it
  const __m512i joined = _mm512_add_epi16(upper, _mm512_srai_epi16(lower, 15));
  put<kApart>({lower_halves(lower, joined), upper_halves(lower, joined)}, to);
}

template <bool kApart = false>
inline void split_words(const float* from, uint16_t* high, int16_t* low) {
  const Pair x = take<kApart>(from);
  const __m512i upper = upper_halves(x.even, x.odd), most = _mm512_set1_epi16(0x7FFF);
  __m512i lower = lower_halves(x.even, x.odd), rounded = _mm512_sub_epi16(upper, _mm512_srai_epi16(lower, 15));
  const __mmask32 last = _mm512_cmpeq_epi16_mask(_mm512_and_si512(upper, most), most);
  if (__builtin_expect(last != 0, 0)) {  // NaN that would round to a zero
    const __mmask32 past = last & _mm512_movepi16_mask(lower);
    rounded = _mm512_mask_mov_epi16(rounded, past, upper), lower = _mm512_mask_mov_epi16(lower, past, most);
  }
  _mm512_storeu_si512(high, rounded);
  _mm512_storeu_si512(low, lower);
}

template <bool kApart = false>
inline void widen_words(const void* from, float factor, float* to) {
  const Pair x = widened(_mm512_loadu_si512(from));
  const Numbers even = _mm512_castsi512_ps(x.even) * factor, odd = _mm512_castsi512_ps(x.odd) * factor;
  put<kApart>({_mm512_castps_si512(even), _mm512_castps_si512(odd)}, to);
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

template <bool = false>
inline void join_words(const uint16_t* high, const int16_t* low, float* to) {
  const __m256i upper = across(loaded(high)), rest = across(loaded(low));
  const __m256i none = _mm256_cmpeq_epi16(_mm256_slli_epi16(upper, 1), _mm256_setzero_si256());
  const __m256i negative = _mm256_srai_epi16(rest, 15), past = _mm256_and_si256(none, negative);
  const __m256i lower = _mm256_andnot_si256(past, rest);  // a zero that was written past it
  const __m256i joined = _mm256_add_epi16(upper, _mm256_andnot_si256(past, negative));
  for (int half = 0; half < 2; half++) store(to + 8 * half, zipped(lower, joined, half));
}

template <bool = false>
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

template <bool = false>
inline void widen_words(const void* from, float factor, float* to) {
  const __m256i words = across(loaded(from));
  for (int half = 0; half < 2; half++)
    _mm256_storeu_ps(to + 8 * half, _mm256_mul_ps(_mm256_castsi256_ps(zipped(_mm256_setzero_si256(), words, half)),
                                                  _mm256_set1_ps(factor)));
}

#endif

}  // namespace
