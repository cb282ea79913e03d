// The codes of a group in registers of AVX-512 or AVX2, bit for bit those of the loops in codes.h, which other processors run.
//
// Values on their way to codes have 16 bits, the upper ones of fp32, of which codes keep none but these.

#pragma once

#include "codes.h"

namespace {

// Asks for what a group will read when some more are done.
constexpr int64_t kGroupsAhead = 4;

template <typename T>
inline void ask_for(const T* group) {
  for (int byte = 0; byte < kGroup * int(sizeof(T)); byte += 64)
    __builtin_prefetch((const char*)(group + kGroupsAhead * kGroup) + byte, 1);
}

// Whether the numbers of a group stand apart (words.h) in the arrays of the functions below; the first keeps its place.
#if defined(__AVX512BW__)
constexpr bool kGroupsApart = true;
#else
constexpr bool kGroupsApart = false;
#endif

struct Steps {
  alignas(64) uint32_t at[kGroup] = {};
  constexpr Steps() {
    for (int k = 0; k < kGroup; k++) at[k] = uint32_t(kGroupsApart ? k / 32 * 32 + k % 16 * 2 + k / 16 % 2 : k) * kSpread;
  }
};

constexpr Steps kSteps;

// What `random_bits` in codes.h writes, of a group.
inline void random_group(uint32_t first, uint32_t* to) {
  for (int k = 0; k < kGroup; k++) to[k] = stirred(kSteps.at[k] + first);
}

#if defined(__AVX512BW__)

// The greatest of 64 unsigned numbers in 16 bits.
inline int32_t greatest_of(__m512i x, __m512i y) {
  x = _mm512_max_epu16(x, y);
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
  const __m128i last = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  return uint16_t(~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(last, _mm_set1_epi16(-1)))));
}

// A register full of one of two words. They come from memory, in pairs, since such a broadcast is a load and no more.
inline __m512i one_of(const uint32_t (&words)[2], bool second) { return _mm512_set1_epi32(int(words[second])); }

constexpr uint32_t twice(uint32_t word) { return word << 16 | word; }
constexpr uint32_t kDropped[] = {twice(1 << (kFine - 16)), twice(1 << (kCoarse - 16))};
constexpr uint32_t kUnits[2][2] = {{twice(1 << 12), twice(1 << 11)}, {twice(1 << 13), twice(1 << 12)}};
constexpr uint32_t kMore[] = {0, twice(8)};  // of codes that are rounded stochastically

template <bool kSigned>
__attribute__((always_inline)) inline void decode_group(const uint8_t* from, int32_t base, float* to) {
  const __m512i least = _mm512_set1_epi16(base >= 0 ? base : -1 - base);
  const __m512i unit = one_of(kDropped, base < 0);
  for (int i = 0; i < kGroup; i += 32) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)(from + i));
    const __m512i code = kSigned ? _mm512_cvtepi8_epi16(bytes) : _mm512_cvtepu8_epi16(bytes);
    const __m512i size = kSigned ? _mm512_abs_epi16(code) : code;
    __m512i value = _mm512_maskz_mullo_epi16(_mm512_test_epi16_mask(code, code), _mm512_add_epi16(size, least), unit);
    if (kSigned) value = _mm512_ternarylogic_epi32(value, code, _mm512_set1_epi16(int16_t(0x8000)), 0xF8);  // a | b & c
    put<true>(widened(value), to + i);
  }
}

// The hash of 16 elements, of which noise takes the upper bits.
template <int kState>
inline __m512i hash_of(const uint32_t* random) {
  return _mm512_mullo_epi32(_mm512_loadu_si512(random), _mm512_set1_epi32(int(kLast[kState])));
}

// The bits of magnitudes, of every NaN those of one that no noise carries beyond the last. A square has no sign but a NaN's.
template <bool kSigned>
inline __m512i magnitudes(__m512i x) {
  return _mm512_min_epu32(kSigned ? _mm512_and_si512(x, _mm512_set1_epi32(0x7FFFFFFF)) : x, _mm512_set1_epi32(kNan));
}

// With the noise for 4 bits of the fraction.
template <int kState>
inline __m512i noisy(__m512i magnitudes, const uint32_t* random) {
  return _mm512_add_epi32(magnitudes, _mm512_srli_epi32(hash_of<kState>(random), 13));
}

// Rounds a group to bf16 as `to_bf16` does.
template <int kState>
inline void round_group(const float* from, const uint32_t* random, uint16_t* to) {
  __m512i sums[kGroup / 16];
  for (int i = 0; i < kGroup / 16; i++) {
    const __m512i x = _mm512_loadu_si512(from + 16 * i), noise = _mm512_srli_epi32(hash_of<kState>(random + 16 * i), 16);
    const __m512 number = _mm512_castsi512_ps(x);
    sums[i] = _mm512_mask_add_epi32(x, _mm512_cmp_ps_mask(number, number, _CMP_ORD_Q), x, noise);
  }
  for (int i = 0; i < kGroup / 32; i++) _mm512_storeu_si512(to + 32 * i, upper_halves(sums[2 * i], sums[2 * i + 1]));
}

// Writes the codes of a group; returns its base. There is no branch on the spread, which is hard to foresee.
template <int kState, bool kSigned, bool kStochastic>
__attribute__((always_inline)) inline int16_t encode_group(const float* from, const uint32_t* random, uint8_t* to) {
  constexpr int32_t kMost = kSigned ? 127 : 255, kHalf = kStochastic ? 0 : 4;
  __m512i values[2], sizes[2];  // the upper halves of numbers and of magnitudes, with the noise for 4 bits of the fraction
  __mmask32 some[2];
  for (int i = 0; i < 2; i++) {
    const __m512i x = _mm512_loadu_si512(from + 32 * i), y = _mm512_loadu_si512(from + 32 * i + 16);
    if (kSigned) values[i] = upper_halves(x, y);
    if (kStochastic) {
      const __m512i lower = magnitudes<kSigned>(x), upper = magnitudes<kSigned>(y);
      const __m512i counted = kSigned ? upper_halves(lower, upper)
                                      : _mm512_shuffle_epi8(_mm512_packus_epi32(lower, upper), kZipWords);
      some[i] = _mm512_test_epi16_mask(counted, counted);
      sizes[i] = upper_halves(noisy<kState>(lower, random + 32 * i), noisy<kState>(upper, random + 32 * i + 16));
    } else {
      sizes[i] = _mm512_and_si512(values[i], _mm512_set1_epi16(0x7FFF));
      sizes[i] = _mm512_min_epu16(sizes[i], _mm512_set1_epi16(kNan >> 16));
      some[i] = _mm512_test_epi16_mask(sizes[i], sizes[i]);
    }
  }
  const int32_t top = greatest_of(sizes[0], sizes[1]), first_near = ((top + kHalf) >> 3) - kMost + 1;
  const __m512i bound = _mm512_set1_epi16(int16_t(std::max(8 * first_near - kHalf, 0)));
  const bool near = !(_mm512_mask_cmplt_epu16_mask(some[0], sizes[0], bound) |
                      _mm512_mask_cmplt_epu16_mask(some[1], sizes[1], bound));
  const int32_t more = near ? 0 : kStochastic ? (random[0] * kLast[kState]) >> 9 & 8 : kHalf;
  const int32_t base = std::max(((top + kHalf + more) >> (near ? 3 : 4)) - kMost, 0);
  const __m512i unit = one_of(kUnits[kStochastic], !near), added = one_of(kMore, more);
  const __m512i least = _mm512_set1_epi16(int16_t(base));
  __m512i codes[2];
  for (int i = 0; i < 2; i++) {
    codes[i] = kStochastic ? _mm512_mulhi_epu16(_mm512_add_epi16(sizes[i], added), unit) : _mm512_mulhrs_epi16(sizes[i], unit);
    codes[i] = _mm512_subs_epu16(codes[i], least);
    if (!kSigned) codes[i] = _mm512_maskz_max_epu16(some[i], codes[i], _mm512_set1_epi16(1));
  }
  __m512i bytes = _mm512_packus_epi16(codes[0], codes[1]);
  if (kSigned) {
    const __mmask64 negative = _mm512_movepi8_mask(_mm512_packs_epi16(values[0], values[1]));
    bytes = _mm512_mask_sub_epi8(bytes, negative, _mm512_setzero_si512(), bytes);
  }
  const __m512i in_order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi64(in_order, bytes));
  return int16_t(near ? base : -1 - base);
}

#elif defined(__AVX2__)

// The greatest of 64 numbers of 16 bits without a sign.
inline int32_t greatest_of(const __m256i* x) {
  const __m256i all = _mm256_max_epu16(_mm256_max_epu16(x[0], x[1]), _mm256_max_epu16(x[2], x[3]));
  const __m128i last = _mm_max_epu16(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  return 0xFFFF - _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(last, _mm_set1_epi16(-1))), 0);
}

template <bool kSigned>
__attribute__((always_inline)) inline void decode_group(const uint8_t* from, int32_t base, float* to) {
  const __m256i least = _mm256_set1_epi16(base >= 0 ? base : -1 - base);
  const __m256i unit = _mm256_set1_epi16(base >= 0 ? 1 << (kFine - 16) : 1 << (kCoarse - 16));
  for (int i = 0; i < kGroup; i += kWords) {
    const __m128i bytes = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i*)(from + i)), 0xD8);
    const __m256i code = kSigned ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes);
    const __m256i size = kSigned ? _mm256_abs_epi16(code) : code;
    __m256i value = _mm256_sign_epi16(_mm256_mullo_epi16(_mm256_add_epi16(size, least), unit), size);  // 0 of the code 0
    if (kSigned) value = _mm256_or_si256(value, _mm256_and_si256(code, _mm256_set1_epi16(int16_t(0x8000))));
    for (int half = 0; half < 2; half++) store(to + i + 8 * half, zipped(_mm256_setzero_si256(), value, half));
  }
}

template <int kState>
inline __m256i hash_of(const uint32_t* random) {
  return _mm256_mullo_epi32(loaded(random), _mm256_set1_epi32(int(kLast[kState])));
}

template <bool kSigned>
inline __m256i magnitudes(__m256i x) {
  return _mm256_min_epu32(kSigned ? _mm256_and_si256(x, _mm256_set1_epi32(0x7FFFFFFF)) : x, _mm256_set1_epi32(kNan));
}

template <int kState>
inline __m256i noisy(__m256i magnitudes, const uint32_t* random) {
  return _mm256_add_epi32(magnitudes, _mm256_srli_epi32(hash_of<kState>(random), 13));
}

template <int kState>
inline void round_group(const float* from, const uint32_t* random, uint16_t* to) {
  __m256i sums[kGroup / 8];
  for (int i = 0; i < kGroup / 8; i++) {
    const __m256i noise = _mm256_srli_epi32(hash_of<kState>(random + 8 * i), 16);
    const __m256 x = _mm256_loadu_ps(from + 8 * i), known = _mm256_cmp_ps(x, x, _CMP_ORD_Q);
    sums[i] = _mm256_add_epi32(_mm256_castps_si256(x), _mm256_and_si256(noise, _mm256_castps_si256(known)));
  }
  for (int i = 0; i < kGroup / kWords; i++) store(to + kWords * i, across(upper_halves(sums[2 * i], sums[2 * i + 1])));
}

template <int kState, bool kSigned, bool kStochastic>
__attribute__((always_inline)) inline int16_t encode_group(const float* from, const uint32_t* random, uint8_t* to) {
  constexpr int kRegisters = kGroup / kWords;
  constexpr int32_t kMost = kSigned ? 127 : 255, kHalf = kStochastic ? 0 : 4;
  const __m256i zero = _mm256_setzero_si256(), nan = _mm256_set1_epi16(kNan >> 16);
  __m256i values[kRegisters], sizes[kRegisters], none[kRegisters];  // in the order of `upper_halves`
  for (int i = 0; i < kRegisters; i++) {
    const __m256i x = loaded(from + kWords * i), y = loaded(from + kWords * i + 8);
    if (kSigned) values[i] = upper_halves(x, y);
    if (kStochastic) {
      const __m256i lower = magnitudes<kSigned>(x), upper = magnitudes<kSigned>(y);
      none[i] = kSigned ? _mm256_cmpeq_epi16(upper_halves(lower, upper), zero)
                        : _mm256_packs_epi32(_mm256_cmpeq_epi32(lower, zero), _mm256_cmpeq_epi32(upper, zero));
      sizes[i] = upper_halves(noisy<kState>(lower, random + kWords * i), noisy<kState>(upper, random + kWords * i + 8));
    } else {
      sizes[i] = _mm256_min_epu16(_mm256_and_si256(values[i], _mm256_set1_epi16(0x7FFF)), nan);
      none[i] = _mm256_cmpeq_epi16(sizes[i], zero);
    }
  }
  const int32_t top = greatest_of(sizes), first_near = ((top + kHalf) >> 3) - kMost + 1;
  const __m256i bound = _mm256_set1_epi16(int16_t(std::max(8 * first_near - kHalf, 0)));
  __m256i far = zero;
  for (int i = 0; i < kRegisters; i++)
    far = _mm256_or_si256(far, _mm256_andnot_si256(none[i], _mm256_cmpgt_epi16(bound, sizes[i])));
  const bool near = _mm256_testz_si256(far, far);
  const int32_t more = near ? 0 : kStochastic ? (random[0] * kLast[kState]) >> 9 & 8 : kHalf;
  const int32_t base = std::max(((top + kHalf + more) >> (near ? 3 : 4)) - kMost, 0);
  const __m256i unit = _mm256_set1_epi16((near ? 1 << 13 : 1 << 12) >> !kStochastic);
  const __m256i least = _mm256_set1_epi16(int16_t(base)), added = _mm256_set1_epi16(int16_t(more));
  for (int i = 0; i < kRegisters; i += 2) {
    __m256i codes[2];
    for (int k = 0; k < 2; k++) {
      codes[k] = kStochastic ? _mm256_mulhi_epu16(_mm256_add_epi16(sizes[i + k], added), unit)
                             : _mm256_mulhrs_epi16(sizes[i + k], unit);
      if (!kSigned) codes[k] = _mm256_max_epu16(codes[k], _mm256_set1_epi16(int16_t(base + 1)));
      codes[k] = _mm256_subs_epu16(codes[k], least);
      if (!kSigned) codes[k] = _mm256_andnot_si256(none[i + k], codes[k]);
    }
    __m256i bytes = _mm256_packus_epi16(codes[0], codes[1]);
    if (kSigned) {
      const __m256i signs = _mm256_packs_epi16(values[i], values[i + 1]);
      bytes = _mm256_sign_epi8(bytes, _mm256_or_si256(signs, _mm256_set1_epi8(1)));
    }
    store(to + kWords * i, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  }
  return int16_t(near ? base : -1 - base);
}

#else

template <bool kSigned>
inline void decode_group(const uint8_t* from, int32_t base, float* to) { decode<kSigned>(from, base, to); }

template <int kState>
inline void round_group(const float* from, const uint32_t* random, uint16_t* to) { to_bf16<kState>(from, random, to, kGroup); }

template <int kState, bool kSigned, bool kStochastic>
inline int16_t encode_group(const float* from, const uint32_t* random, uint8_t* to) {
  return encode<kState, kSigned, kStochastic>(from, random, to);
}

#endif

}  // namespace
