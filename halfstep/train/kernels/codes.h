// Moments in bf16 and 8 bits: the codes of halfstep/train/optim/moments.py, bit for bit.

#pragma once

#include <algorithm>

#include "blocks.h"

namespace {

enum Width : int32_t { kWhole = 0, kTwoBytes = 1, kOneByte = 2 };
constexpr int64_t kGroup = 64;
constexpr int kFine = 19, kCoarse = 20;  // bits of fp32 that a code drops
constexpr uint32_t kSign = 0x80000000u, kNan = 0x7FC00000u, kSpread = 0x9E3779B1u;

inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// The hash of an element's index, but for its last factor, of which each tensor that takes random bits has its own.
inline uint32_t stirred(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  return x ^ (x >> 15);
}

constexpr uint32_t kLast[] = {0x846CA68Bu, 0xC2B2AE3Du, 0x85EBCA77u};  // of the first state, the second, and weights

struct Run {  // elements of one group: which, where it begins in the block, its length, its index in the whole tensor
  int64_t group, from, length;
  uint32_t index;
};

// Writes the runs of `n` elements from `at`, at most as many; returns their number.
inline int64_t runs_of(const Shard& p, int64_t at, int64_t n, Run* to) {
  const bool even = p.row % kGroup == 0 && p.row == p.stride;  // then without a division
  const int64_t row = even ? kGroup : p.row, stride = even ? kGroup : p.stride;
  const int64_t each = (row + kGroup - 1) / kGroup;
  int64_t slice = even ? at / kGroup : at / row, column = at - slice * row, count = 0;
  for (int64_t done = 0; done < n; count++) {
    const int64_t length = std::min({kGroup - column % kGroup, row - column, n - done});
    to[count] = {slice * each + column / kGroup, done, length, uint32_t(p.first + slice * stride + column)};
    done += length;
    column += length;
    if (column == row) slice++, column = 0;
  }
  return count;
}

// The end of a part from `at` of at most `length` elements, at least a group, that cuts no group.
inline int64_t whole_groups(const Shard& p, int64_t at, int64_t length) {
  const int64_t end = at + length;
  if (p.row % kGroup == 0) return end / kGroup * kGroup;
  return end / p.row * p.row + end % p.row / kGroup * kGroup;
}

__attribute__((noinline)) void random_bits(uint32_t index, uint32_t key, uint32_t* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = stirred((index + uint32_t(i)) * kSpread + key);
}

inline uint32_t key_of(const Shard& p, float step) {
  return mix(uint32_t(int64_t(step)) * 0x85EBCA77u ^ uint32_t(p.number) * 0xC2B2AE3Du);
}

inline void random_bits(const Tensors& b, int64_t t, const Run* runs, int64_t count, uint32_t* to) {
  const uint32_t key = key_of(b.places[t], *b.steps[t]);
  for (const Run* run = runs; run < runs + count; run++) random_bits(run->index, key, to + run->from, run->length);
}

// ---- two bytes ------------------------------------------------------------------------------------------------------

// A NaN stays one.
template <int kTensor>
__attribute__((noinline)) void to_bf16(const float* __restrict from, const uint32_t* __restrict random,
                                       uint16_t* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t u = bits(from[i]), added = random[i] * kLast[kTensor] >> 16;
    to[i] = uint16_t((u + ((u & ~kSign) > 0x7F800000u ? 0 : added)) >> 16);
  }
}

// ---- one byte -------------------------------------------------------------------------------------------------------

// Returns the values of a group of codes.
template <bool kSigned>
__attribute__((noinline)) void decode(const uint8_t* __restrict from, int32_t base, float* __restrict to) {
  const int drop = base >= 0 ? kFine : kCoarse;
  const int32_t least = base >= 0 ? base : -1 - base;
  for (int64_t i = 0; i < kGroup; i++) {
    const int32_t code = kSigned ? int32_t(int8_t(from[i])) : int32_t(from[i]);
    const int32_t magnitude = code < 0 ? -code : code;
    const uint32_t value = magnitude ? uint32_t(magnitude + least) << drop : 0;
    to[i] = number(code < 0 ? value | kSign : value);
  }
}

// The bits of a magnitude, of every NaN those of one that no noise carries beyond the last.
inline uint32_t magnitude_of(float x) { return std::min(bits(x) & ~kSign, kNan); }

inline uint32_t to_nearest(uint32_t magnitude, int drop) { return (magnitude + (1u << (drop - 1))) >> drop; }

struct Range {  // of a group's codes with 4 bits of the fraction; `least` of numbers that are not too small for a code
  uint32_t top = 0, least = ~0u;
};

template <int kState, bool kStochastic>
inline uint32_t fine_code(float x, uint32_t random, Range& range) {
  const uint32_t magnitude = magnitude_of(x), counted = kState == 0 ? magnitude >> 16 : magnitude;
  const uint32_t added = random * kLast[kState] >> (32 - kFine);
  const uint32_t code = kStochastic ? (magnitude + added) >> kFine : to_nearest(magnitude, kFine);
  const uint32_t seen = code | (counted ? 0u : kSign);
  range.top = code > range.top ? code : range.top;
  range.least = seen < range.least ? seen : range.least;
  return code;
}

// Writes the codes of a group; returns its base.
template <int kState, bool kSigned, bool kStochastic>
__attribute__((noinline)) int16_t encode(const float* __restrict from, const uint32_t* __restrict random,
                                         uint8_t* __restrict to) {
  constexpr uint32_t kMost = kSigned ? 127 : 255, kLeast = kSigned ? 0 : 1;
  uint32_t codes[kGroup];
  Range range;
  for (int64_t i = 0; i < kGroup; i++) codes[i] = fine_code<kState, kStochastic>(from[i], random[i], range);
  const bool near = range.least > range.top || range.top - range.least < kMost;
  if (!near && kStochastic) {
    const uint32_t more = random[0] * kLast[kState] >> 12 & 1;
    for (int64_t i = 0; i < kGroup; i++) codes[i] = (codes[i] + more) >> 1;
    range.top = (range.top + more) >> 1;
  } else if (!near) {
    range.top = 0;
    for (int64_t i = 0; i < kGroup; i++) codes[i] = to_nearest(magnitude_of(from[i]), kCoarse);
    for (int64_t i = 0; i < kGroup; i++) range.top = std::max(range.top, codes[i]);
  }
  const int32_t base = range.top > kMost ? int32_t(range.top - kMost) : 0;
  for (int64_t i = 0; i < kGroup; i++) {
    int32_t code = int32_t(codes[i]) - base;
    code = code < int32_t(kLeast) ? int32_t(kLeast) : code;
    if (!kSigned) code = bits(from[i]) & ~kSign ? code : 0;
    to[i] = uint8_t(kSigned && int32_t(bits(from[i])) < 0 ? -code : code);
  }
  return int16_t(near ? base : -1 - base);
}

// ---- a batch's states -----------------------------------------------------------------------------------------------

enum Code : int32_t { kHasSign = 1, kIsRandom = 2 };

// Whether the loops have the codes of a batch: a signed state, and beside it a square that is rounded stochastically.
inline bool codes_are_known(const Tensors& b) {
  return b.width != kOneByte || (b.codes[0] & kHasSign && (!b.states[1] || b.codes[1] == kIsRandom) && !b.states[2]);
}

// Returns `n` elements of a state in fp32: in place where they are kept so, else in `room`. `runs` are those of the block.
inline float* open_state(const Tensors& b, int64_t t, int k, int64_t at, int64_t n, const Run* runs, int64_t count,
                         float* room) {
  void* held = b.states[k][t];
  if (b.width == kWhole) return (float*)held + at;
  if (b.width == kTwoBytes) {
    load(kBfloat, held, at, room, n);
    return room;
  }
  const auto decoded = b.codes[k] & kHasSign ? decode<true> : decode<false>;
  for (const Run* run = runs; run < runs + count; run++) {
    const uint8_t* codes = (const uint8_t*)held + at + run->from;
    const int32_t base = b.bases[k][t][run->group];
    if (run->length == kGroup) {
      decoded(codes, base, room + run->from);
      continue;
    }
    uint8_t some[kGroup] = {};
    float values[kGroup];
    std::memcpy(some, codes, run->length);
    decoded(some, base, values);
    std::memcpy(room + run->from, values, run->length * sizeof(float));
  }
  return room;
}

}  // namespace
