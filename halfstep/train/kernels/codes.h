// Moments in bf16 and 8 bits: the codes of halfstep/train/optim/codes.py, bit for bit.

#pragma once

#include <algorithm>

#include "blocks.h"

namespace {

enum Width : int32_t { kWhole = 0, kTwoBytes = 1, kOneByte = 2 };
constexpr int64_t kGroup = 64;
constexpr int kFine = 19, kCoarse = 20;  // bits of fp32 that a code drops
constexpr uint32_t kSign = 0x80000000u;

inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// A run of elements of one group: its number, where it begins in the block, its length, its index in the whole tensor.
template <typename Call>
void in_groups(const Shard& p, int64_t at, int64_t n, const Call& call) {
  const int64_t each = (p.row + kGroup - 1) / kGroup;
  for (int64_t done = 0; done < n;) {
    const int64_t slice = (at + done) / p.row, column = (at + done) % p.row;
    const int64_t length = std::min({kGroup - column % kGroup, p.row - column, n - done});
    call(slice * each + column / kGroup, done, length, uint32_t(p.first + slice * p.stride + column));
    done += length;
  }
}

// The end of a part from `at` of at most `length` elements, at least a group, that cuts no group.
inline int64_t whole_groups(const Shard& p, int64_t at, int64_t length) {
  const int64_t end = at + length;
  return end / p.row * p.row + end % p.row / kGroup * kGroup;
}

inline void random_bits(uint32_t index, uint32_t key, uint32_t* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = mix((index + uint32_t(i)) * 0x9E3779B1u + key);
}

inline uint32_t key_of(const Shard& p, float step) {
  return mix(uint32_t(int64_t(step)) * 0x85EBCA77u ^ uint32_t(p.number) * 0xC2B2AE3Du);
}

template <int kState>
inline uint32_t noise(uint32_t bits) {
  return kState == 0 ? bits >> 12 : bits & 0xFFFFFu;
}

// ---- two bytes ------------------------------------------------------------------------------------------------------

template <int kState>
__attribute__((noinline)) void to_bf16(const float* __restrict from, const uint32_t* __restrict random,
                                       uint16_t* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = uint16_t((bits(from[i]) + (noise<kState>(random[i]) >> 4)) >> 16);
}

// ---- one byte -------------------------------------------------------------------------------------------------------

template <bool kSigned>
inline void decode(const uint8_t* __restrict from, int32_t base, float* __restrict to, int64_t n) {
  const int drop = base >= 0 ? kFine : kCoarse;
  const uint32_t least = uint32_t(base >= 0 ? base : -1 - base);
  for (int64_t i = 0; i < n; i++) {
    const int32_t code = kSigned ? int32_t(int8_t(from[i])) : int32_t(from[i]);
    const uint32_t magnitude = uint32_t(code < 0 ? -code : code);
    const uint32_t value = magnitude ? (magnitude + least) << drop : 0;
    to[i] = number(code < 0 ? value | kSign : value);
  }
}

// Writes the codes of one group; returns its base.
template <int kState, bool kSigned, bool kStochastic>
inline int16_t encode(const float* __restrict from, const uint32_t* __restrict random, uint8_t* __restrict to,
                      int64_t n) {
  constexpr uint32_t kMost = kSigned ? 127 : 255;
  uint32_t top = 0, least = 1u << 30, coarse = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t magnitude = bits(from[i]) & ~kSign;
    const uint32_t added = kStochastic ? noise<kState>(random[i]) : 0;
    const uint32_t fine = (magnitude + (kStochastic ? added & ((1u << kFine) - 1) : 1u << (kFine - 1))) >> kFine;
    const uint32_t wide = (magnitude + (kStochastic ? added : 1u << (kCoarse - 1))) >> kCoarse;
    const uint32_t seen = magnitude ? fine : 1u << 30;
    top = fine > top ? fine : top;
    coarse = wide > coarse ? wide : coarse;
    least = seen < least ? seen : least;
  }
  const bool near = int32_t(top) - int32_t(least) < int32_t(kMost);
  const int drop = near ? kFine : kCoarse;
  const uint32_t mask = (1u << drop) - 1, half = 1u << (drop - 1);
  const int32_t peak = int32_t(near ? top : coarse), base = peak > int32_t(kMost) ? peak - int32_t(kMost) : 0;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t u = bits(from[i]), magnitude = u & ~kSign;
    const uint32_t added = kStochastic ? noise<kState>(random[i]) & mask : half;
    int32_t code = int32_t((magnitude + added) >> drop) - base;
    code = code < int32_t(!kSigned) ? int32_t(!kSigned) : code;
    code = magnitude ? code : 0;
    to[i] = uint8_t(kSigned && (u & kSign) ? -code : code);
  }
  return int16_t(near ? base : -1 - base);
}

// ---- a batch's states -----------------------------------------------------------------------------------------------

enum Code : int32_t { kHasSign = 1, kIsRandom = 2 };

// Returns `n` elements of a state in fp32: in place where they are kept so, else in `room`.
inline float* open_state(const Tensors& b, int64_t t, int k, int64_t at, int64_t n, float* room) {
  void* held = b.states[k][t];
  if (b.width == kWhole) return (float*)held + at;
  if (b.width == kTwoBytes) {
    load(kBfloat, held, at, room, n);
    return room;
  }
  const uint8_t* codes = (const uint8_t*)held + at;
  in_groups(b.places[t], at, n, [&](int64_t group, int64_t from, int64_t length, uint32_t) {
    const int32_t base = b.bases[k][t][group];
    if (b.codes[k] & kHasSign)
      decode<true>(codes + from, base, room + from, length);
    else
      decode<false>(codes + from, base, room + from, length);
  });
  return room;
}

template <int kState>
void close_state(const Tensors& b, int64_t t, int64_t at, int64_t n, const float* values, const uint32_t* random) {
  void* held = b.states[kState][t];
  if (b.width == kTwoBytes) return to_bf16<kState>(values, random, (uint16_t*)held + at, n);
  uint8_t* codes = (uint8_t*)held + at;
  const int32_t code = b.codes[kState];
  in_groups(b.places[t], at, n, [&](int64_t group, int64_t from, int64_t length, uint32_t) {
    const float* x = values + from;
    const uint32_t* r = random + from;
    uint8_t* to = codes + from;
    int16_t& base = b.bases[kState][t][group];
    switch (code) {
      case 0: base = encode<kState, false, false>(x, r, to, length); break;
      case kHasSign: base = encode<kState, true, false>(x, r, to, length); break;
      case kIsRandom: base = encode<kState, false, true>(x, r, to, length); break;
      default: base = encode<kState, true, true>(x, r, to, length);
    }
  });
}

// Keeps `n` elements of all states; the block holds whole groups, and the step is counted already.
inline void close_states(const Tensors& b, int64_t t, int64_t at, int64_t n, float* const* states, uint32_t* random) {
  const uint32_t key = key_of(b.places[t], *b.steps[t]);
  in_groups(b.places[t], at, n, [&](int64_t, int64_t from, int64_t length, uint32_t index) {
    random_bits(index, key, random + from, length);
  });
  if (states[0]) close_state<0>(b, t, at, n, states[0], random);
  if (states[1]) close_state<1>(b, t, at, n, states[1], random);
}

}  // namespace
