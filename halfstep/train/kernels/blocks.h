// The tensors of a batch, opened block by block: what a step and those who watch it read.
//
// The arithmetic is that of halfstep/train/optim/laws.py, operation by operation, each rounded once to fp32, so that both
// give the same bits. Compiled without contraction (see hatch_build.py).

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__AVX2__)
#include "words.h"
#endif

constexpr int kStates = 3;

extern "C" {

struct Shard {  // where a tensor lies in the whole one: see Place in batch.py
  int64_t number, first, row, stride;
};

// native.py repeats the next two by hand; tests/kernels/test_native.py compares their fields.
struct Tensors {  // aligned tables of the tensors of one batch; a pointer to a table is null where the batch has none
  int64_t tensors;
  const int64_t* numels;
  void* const* weights;
  void* const* extras;
  const void* const* grads;
  const int32_t* grad_formats;
  void* const* states[kStates];  // in the order of the optimizer's options
  int16_t* const* bases[kStates];  // of states in 8 bits
  float* const* steps;     // counts of updates made
  const Shard* places;     // null where states are fp32
  int32_t layout;
  int32_t format;          // of the weights
  int32_t threads;
  int32_t width;           // of the states
  int32_t rounds;          // weights without a master are rounded stochastically
  int32_t codes[kStates];
};

struct Common {
  const float* factor;  // what each gradient is multiplied by; null for 1
  const uint8_t* found;
  double lr;
  double weight_decay;
  int32_t maximize;
  int32_t decoupled;  // the decay is of the weight itself, not of the gradient
};

}  // extern "C"

namespace {

enum Format : int32_t { kFloat = 0, kBfloat = 1, kHalf = 2 };
enum Layout : int32_t { kFull = 0, kCopy = 1, kSplit = 2, kLow = 3 };

inline uint32_t bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

inline float number(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// The bits of the fp32 value that equals an element. Subnormals of fp16 go through an integer, which a processor that
// flushes subnormal floats to zero leaves alone. Without branches, so that loops over it are vectorised.
inline uint32_t widened(uint32_t bits) { return bits; }

inline uint32_t widened(float x) { return bits(x); }

inline uint32_t widened(BFloat16 x) { return uint32_t(x.bits) << 16; }

inline uint32_t widened(Float16 x) {
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t small = bits(float(int32_t(magnitude)) * 0x1p-24f);
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  return sign | (magnitude < 0x0400u ? small : magnitude >= 0x7c00u ? special : normal);
}

// ---- blocks in ---------------------------------------------------------------------------------------------------

template <bool kApart = false, typename T>
void load(const T* __restrict from, float factor, float* __restrict to, int64_t n) {
  int64_t i = 0;
#if defined(__AVX2__)
  if (std::is_same_v<T, BFloat16>)
    for (; i + kWords <= n; i += kWords) widen_words<kApart>(from + i, factor, to + i);
#endif
  for (; i < n; i++) to[i] = number(widened(from[i])) * factor;
}

template <typename T>
void load_adding(const T* __restrict from, float factor, float l2, const float* __restrict weight,
                 float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = number(widened(from[i])) * factor + weight[i] * l2;
}

template <typename Call>
void in_format(int32_t format, const void* base, int64_t at, const Call& call) {
  switch (format) {
    case kFloat: return call((const uint32_t*)base + at);
    case kBfloat: return call((const BFloat16*)base + at);
    default: return call((const Float16*)base + at);
  }
}

inline void load(int32_t format, const void* base, int64_t at, float* to, int64_t n) {
  in_format(format, base, at, [&](auto* from) { load(from, 1, to, n); });
}

template <bool kApart = false>
__attribute__((always_inline)) inline void join(const uint16_t* __restrict high, const int16_t* __restrict low,
                                                float* __restrict to, int64_t n) {
  int64_t i = 0;
#if defined(__AVX2__)
  for (; i + kWords <= n; i += kWords) join_words<kApart>(high + i, low + i, to + i);
#endif
  for (; i < n; i++) {
    const int32_t rest = (high[i] & 0x7fff) == 0 && low[i] < 0 ? 0 : low[i];  // a zero that was written past it
    to[i] = number((uint32_t(high[i]) << 16) + uint32_t(rest));
  }
}

// What the weight decay adds of the weight to the gradient, and what it leaves of the weight.
inline float l2_of(const Common& c) { return c.decoupled ? 0 : float(c.weight_decay); }
inline float kept_of(const Common& c) { return c.decoupled ? float(1 - c.lr * c.weight_decay) : 1; }

// What gradients are multiplied by.
inline float factor_of(const Common& c) { return (c.factor ? *c.factor : 1) * (c.maximize ? -1.0f : 1.0f); }

// Returns `n` full weights: in place where they are kept so, else in `room`.
inline float* open_weights(const Tensors& b, int64_t t, int64_t at, int64_t n, float* room) {
  if (b.layout == kFull) return (float*)b.weights[t] + at;
  if (b.layout == kCopy) return (float*)b.extras[t] + at;
  if (b.layout == kSplit)
    join((const uint16_t*)b.weights[t] + at, (const int16_t*)b.extras[t] + at, room, n);
  else
    load(b.format, b.weights[t], at, room, n);
  return room;
}

// Returns `n` true gradients with `l2` times the full weights added: in place where they lie so, else in `room`.
inline const float* open_gradient(const Tensors& b, const Common& c, int64_t t, int64_t at, int64_t n, float l2,
                                  const float* weight, float* room) {
  const float factor = factor_of(c);
  if (b.grad_formats[t] == kFloat && factor == 1 && l2 == 0) return (const float*)b.grads[t] + at;
  in_format(b.grad_formats[t], b.grads[t], at, [&](auto* from) {
    if (l2 != 0)
      load_adding(from, factor, l2, weight, room, n);
    else
      load(from, factor, room, n);
  });
  return room;
}

}  // namespace
