// What a step and those who watch it share: the tensors of a batch, opened block by block, and the updates of a block.
//
// The arithmetic is that of halfstep/optim/eager.py, operation by operation, each rounded once to fp32, so that both
// give the same bits. Compiled without contraction (see build.py).

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

extern "C" {

struct Tensors {  // aligned tables of the tensors of one batch; a pointer to a table is null where the batch has none
  int64_t tensors;
  const int64_t* numels;
  void* const* weights;
  void* const* extras;
  const void* const* grads;
  const int32_t* grad_formats;
  float* const* firsts;    // exp_avg, or momentum_buffer
  float* const* seconds;   // exp_avg_sq
  float* const* peaks;     // max_exp_avg_sq
  float* const* steps;     // counts of updates made
  float* const* fresh;     // 1 where no update has been made
  int32_t layout;
  int32_t format;          // of the weights
  int32_t threads;
};

struct Common {
  const float* factor;  // what each gradient is multiplied by; null for 1
  const uint8_t* found;
  const float* lr_single;  // a learning rate in a tensor; null where `lr` is it
  const double* lr_double;
  double lr;
  double weight_decay;
  int32_t maximize;
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

template <typename T>
void load(const T* __restrict from, float factor, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = number(widened(from[i])) * factor;
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

void join(const uint16_t* __restrict high, const int16_t* __restrict low, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = number((uint32_t(high[i]) << 16) + uint32_t(int32_t(low[i])));
}

double rate(const Common& c) { return c.lr_single ? double(*c.lr_single) : c.lr_double ? *c.lr_double : c.lr; }

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
  const float unscale = c.factor ? *c.factor : 1, factor = c.maximize ? -unscale : unscale;
  if (b.grad_formats[t] == kFloat && factor == 1 && l2 == 0) return (const float*)b.grads[t] + at;
  in_format(b.grad_formats[t], b.grads[t], at, [&](auto* from) {
    if (l2 != 0)
      load_adding(from, factor, l2, weight, room, n);
    else
      load(from, factor, room, n);
  });
  return room;
}

// ---- the updates of one block: not inlined, or the compiler forgets that the pointers do not overlap -------------

struct Adam {
  float beta1, take1, beta2, take2, eps, decay, l2;
  std::vector<float> sizes, roots;  // of each tensor
};

struct Sgd {
  float lr, momentum, take, l2;
  bool nesterov;
};

template <bool kPeaks>
__attribute__((noinline)) void adam_block(int64_t n, const Adam& o, float size, float root, float* __restrict w,
                                          const float* __restrict g, float* __restrict m, float* __restrict v,
                                          float* __restrict peak) {
  const float beta1 = o.beta1, take1 = o.take1, beta2 = o.beta2, take2 = o.take2, eps = o.eps, decay = o.decay;
  for (int64_t k = 0; k < n; k++) {
    m[k] = m[k] * beta1 + g[k] * take1;
    v[k] = v[k] * beta2 + (g[k] * g[k]) * take2;
    if (kPeaks) peak[k] = v[k] > peak[k] || v[k] != v[k] ? v[k] : peak[k];
    w[k] = w[k] * decay - (m[k] / (std::sqrt(kPeaks ? peak[k] : v[k]) / root + eps)) * size;
  }
}

template <bool kFresh>
__attribute__((noinline)) void momentum_block(int64_t n, const Sgd& o, float* __restrict w, const float* __restrict g,
                                              float* __restrict buffer) {
  const float lr = o.lr, momentum = o.momentum, take = o.take;
  const bool nesterov = o.nesterov;
  for (int64_t k = 0; k < n; k++) {
    buffer[k] = kFresh ? g[k] : buffer[k] * momentum + g[k] * take;
    w[k] = w[k] - (nesterov ? g[k] + buffer[k] * momentum : buffer[k]) * lr;
  }
}

__attribute__((noinline)) void descend_block(int64_t n, float lr, float* __restrict w, const float* __restrict g) {
  for (int64_t k = 0; k < n; k++) w[k] = w[k] - g[k] * lr;
}

// The coefficients of the update that comes when `ahead` more are counted than now.
Adam adam_of(const Tensors& b, const Common& c, double beta1, double beta2, double eps, bool decoupled, float ahead) {
  const double lr = rate(c);
  const float decay = decoupled ? float(1 - lr * c.weight_decay) : 1;
  Adam o{float(beta1), float(1 - beta1), float(beta2), float(1 - beta2), float(eps), decay,
         decoupled ? 0 : float(c.weight_decay), {}, {}};
  double last = -1;
  for (int64_t t = 0; t < b.tensors; t++) {
    const double step = *b.steps[t] + ahead;
    if (step == last) {
      o.sizes.push_back(o.sizes.back());
      o.roots.push_back(o.roots.back());
    } else {
      o.sizes.push_back(float(lr / (1 - std::pow(beta1, step))));
      o.roots.push_back(float(std::sqrt(1 - std::pow(beta2, step))));
    }
    last = step;
  }
  return o;
}

Sgd sgd_of(const Common& c, double momentum, double dampening, int32_t nesterov) {
  return {float(rate(c)), float(momentum), float(1 - dampening), float(c.weight_decay), nesterov != 0};
}

// `peak` is null without amsgrad.
inline void update_block(const Adam& o, int64_t t, int64_t n, float* w, const float* g, float* m, float* v, float* peak) {
  if (peak)
    adam_block<true>(n, o, o.sizes[t], o.roots[t], w, g, m, v, peak);
  else
    adam_block<false>(n, o, o.sizes[t], o.roots[t], w, g, m, v, nullptr);
}

// `buffer` is null without momentum; the first one is the gradient itself.
inline void update_block(const Sgd& o, bool fresh, int64_t n, float* w, const float* g, float* buffer) {
  if (!buffer)
    descend_block(n, o.lr, w, g);
  else if (fresh)
    momentum_block<true>(n, o, w, g, buffer);
  else
    momentum_block<false>(n, o, w, g, buffer);
}

}  // namespace
