// The optimizer step on a CPU: one read of the gradients, one pass over everything else.
//
// The arithmetic is that of halfstep/optim/eager.py, operation by operation, each rounded once to fp32, so that both
// give the same bits. Compiled without contraction (see build.py). Tensors are dense blocks of memory; their elements
// are brought to fp32 in small blocks that stay in the first-level cache, so one loop serves every storage format.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int64_t kBlock = 128;          // elements opened at a time; more keep the processor's prefetching from running ahead
constexpr int64_t kRead = 4096;          // elements whose squares are summed in fp32, 64 sums side by side
constexpr int64_t kAhead = 8192;         // bytes that the read asks for in advance: the processor alone looks too short ahead
constexpr int64_t kPart = 16 * 1024;     // elements that one thread takes at a time; the sums' order does not depend on threads
constexpr int64_t kAlone = 64 * 1024;    // below this many elements a second thread costs more than it brings

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

// ---- fp16 -------------------------------------------------------------------------------------------------------

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  const uint32_t rest = h & 0x7FFF;
  if (rest >= 0x7C00) return number(sign | 0x7F800000 | (rest & 0x3FF) << 13);
  if (rest >= 0x0400) return number(sign | ((rest << 13) + 0x38000000));
  return number(sign | bits(float(rest) * 0x1p-24f));  // a subnormal is a whole number of 2^-24
}

inline uint16_t float_to_half(float x) {
  const uint32_t u = bits(x);
  const uint16_t sign = (u >> 16) & 0x8000;
  const uint32_t rest = u & 0x7FFFFFFF;
  if (rest > 0x7F800000) return sign | 0x7E00;
  if (rest >= 0x477FF000) return sign | 0x7C00;  // half a step beyond 65504 and on
  if (rest < 0x38800000) return sign | uint16_t(bits(number(rest) + 0.5f) - 0x3F000000);  // 0.5 has the subnormals' grid
  return sign | uint16_t((rest - 0x38000000 + 0xFFF + ((rest >> 13) & 1)) >> 13);
}

void load_half(const uint16_t* from, float* to, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + i))));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
#endif
  for (; i < n; i++) to[i] = half_to_float(from[i]);
}

void store_half(const float* from, uint16_t* to, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256((__m256i*)(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; i++) to[i] = float_to_half(from[i]);
}

// ---- blocks in and out ------------------------------------------------------------------------------------------

void load(int32_t format, const void* base, int64_t at, float* __restrict to, int64_t n) {
  if (format == kFloat) {
    std::memcpy(to, (const float*)base + at, n * sizeof(float));
  } else if (format == kBfloat) {
    const uint16_t* from = (const uint16_t*)base + at;
    for (int64_t i = 0; i < n; i++) to[i] = number(uint32_t(from[i]) << 16);
  } else {
    load_half((const uint16_t*)base + at, to, n);
  }
}

// bf16 ties go away from zero, as in halfstep/optim/split.py; fp16 ties to even.
void store_low(int32_t format, const float* __restrict from, void* base, int64_t at, int64_t n) {
  if (format == kBfloat) {
    uint16_t* to = (uint16_t*)base + at;
    for (int64_t i = 0; i < n; i++) to[i] = uint16_t((bits(from[i]) + 0x8000) >> 16);
  } else {
    store_half(from, (uint16_t*)base + at, n);
  }
}

void join(const uint16_t* __restrict high, const int16_t* __restrict low, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = number((uint32_t(high[i]) << 16) + uint32_t(int32_t(low[i])));
}

void split(const float* __restrict from, uint16_t* __restrict high, int16_t* __restrict low, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t u = bits(from[i]);
    high[i] = uint16_t((u + 0x8000) >> 16);
    low[i] = int16_t(uint16_t(u));
  }
}

// ---- parts: which thread takes which elements of which tensor ---------------------------------------------------

struct Part {
  int64_t tensor, begin, end;
};

std::vector<Part> parts_of(int64_t tensors, const int64_t* numels) {
  std::vector<Part> parts;
  parts.reserve(tensors);
  for (int64_t t = 0; t < tensors; t++)
    for (int64_t begin = 0; begin < numels[t]; begin += kPart)
      parts.push_back({t, begin, begin + kPart < numels[t] ? begin + kPart : numels[t]});
  return parts;
}

int threads_for(int64_t tensors, const int64_t* numels, int32_t threads) {
  int64_t all = 0;
  for (int64_t t = 0; t < tensors; t++) all += numels[t];
  return all < kAlone ? 1 : threads;
}

// ---- the read pass ----------------------------------------------------------------------------------------------

inline float value(float x) { return x; }
inline float value(uint16_t x) { return number(uint32_t(x) << 16); }

template <typename T>
__attribute__((noinline)) double squares_in_double(const T* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += double(value(x[i])) * double(value(x[i]));
  return sum;
}

// The sum of squares, infinite or NaN exactly where an element is: where fp32 sums may have lost something they are
// taken again in double, in which no square of a finite fp32 number overflows or vanishes.
template <typename T>
__attribute__((noinline)) double squares(const T* __restrict x, int64_t n) {
  constexpr int kLanes = 64;
  float sums[kLanes] = {0};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int byte = 0; byte < kLanes * int(sizeof(T)); byte += 64) __builtin_prefetch((const char*)(x + i) + kAhead + byte);
    for (int k = 0; k < kLanes; k++) sums[k] += value(x[i + k]) * value(x[i + k]);
  }
  for (int k = 0; i < n; i++, k++) sums[k] += value(x[i]) * value(x[i]);
  for (int width = kLanes / 2; width; width /= 2)
    for (int k = 0; k < width; k++) sums[k] += sums[k + width];
  return sums[0] > 1e-28f && sums[0] < 1e38f ? double(sums[0]) : squares_in_double(x, n);
}

}  // namespace

extern "C" {

// Reads all gradients once. `norm` becomes their L2 norm, `found` whether an element is infinite or NaN, and
// `flags[t]` the same of tensor t.
void halfstep_read(int64_t tensors, const void* const* grads, const int64_t* numels, const int32_t* formats,
                   int32_t threads, float* norm, uint8_t* found, uint8_t* flags) {
  const std::vector<Part> parts = parts_of(tensors, numels);
  const int64_t count = int64_t(parts.size());
  std::vector<double> sums(count);
  threads = threads_for(tensors, numels, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < count; i++) {
    const Part& part = parts[i];
    const void* grad = grads[part.tensor];
    float opened[kRead];
    double sum = 0;
    for (int64_t at = part.begin; at < part.end; at += kRead) {
      const int64_t n = at + kRead < part.end ? kRead : part.end - at;
      switch (formats[part.tensor]) {
        case kFloat: sum += squares((const float*)grad + at, n); break;
        case kBfloat: sum += squares((const uint16_t*)grad + at, n); break;
        default: load_half((const uint16_t*)grad + at, opened, n), sum += squares(opened, n);
      }
    }
    sums[i] = sum;
  }
  std::memset(flags, 0, tensors);
  double all = 0;
  for (int64_t i = 0; i < count; i++) {
    if (!std::isfinite(sums[i])) flags[parts[i].tensor] = 1;
    all += sums[i];
  }
  *found = !std::isfinite(all);
  *norm = float(std::sqrt(all));
}

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

double rate(const Common& c) { return c.lr_single ? double(*c.lr_single) : c.lr_double ? *c.lr_double : c.lr; }

// Opens each block of weights and gradients, has `core` update it, and stores it again.
template <typename Core>
void for_each_block(const Tensors& b, const Common& c, const Core& core) {
  const std::vector<Part> parts = parts_of(b.tensors, b.numels);
  const int64_t count = int64_t(parts.size());
  const int threads = threads_for(b.tensors, b.numels, b.threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < count; i++) {
    const int64_t t = parts[i].tensor;
    alignas(64) float opened[kBlock];
    alignas(64) float gradient[kBlock];
    for (int64_t at = parts[i].begin; at < parts[i].end; at += kBlock) {
      const int64_t n = at + kBlock < parts[i].end ? kBlock : parts[i].end - at;
      float* w = opened;
      if (b.layout == kFull) w = (float*)b.weights[t] + at;
      else if (b.layout == kCopy) w = (float*)b.extras[t] + at;
      else if (b.layout == kSplit) join((const uint16_t*)b.weights[t] + at, (const int16_t*)b.extras[t] + at, opened, n);
      else load(b.format, b.weights[t], at, opened, n);
      load(b.grad_formats[t], b.grads[t], at, gradient, n);
      if (c.factor) {
        const float factor = *c.factor;
        for (int64_t k = 0; k < n; k++) gradient[k] *= factor;
      }
      if (c.maximize)
        for (int64_t k = 0; k < n; k++) gradient[k] = -gradient[k];
      core(t, at, n, w, gradient);
      if (b.layout == kSplit) split(opened, (uint16_t*)b.weights[t] + at, (int16_t*)b.extras[t] + at, n);
      else if (b.layout != kFull) store_low(b.format, w, b.weights[t], at, n);
    }
  }
}

// ---- the updates of one block: not inlined, or the compiler forgets that the pointers do not overlap -------------

struct Adam {
  float beta1, take1, beta2, take2, eps, decay, l2;
  bool decays, adds;
};

__attribute__((noinline)) void decay_block(int64_t n, float decay, float* __restrict w) {
  for (int64_t k = 0; k < n; k++) w[k] *= decay;
}

__attribute__((noinline)) void add_block(int64_t n, float l2, const float* __restrict w, float* __restrict g) {
  for (int64_t k = 0; k < n; k++) g[k] = g[k] + w[k] * l2;
}

__attribute__((noinline)) void adam_block(int64_t n, const Adam& o, float size, float root, float* __restrict w,
                                          const float* __restrict g, float* __restrict m, float* __restrict v) {
  const float beta1 = o.beta1, take1 = o.take1, beta2 = o.beta2, take2 = o.take2, eps = o.eps;
  for (int64_t k = 0; k < n; k++) {
    m[k] = m[k] * beta1 + g[k] * take1;
    v[k] = v[k] * beta2 + (g[k] * g[k]) * take2;
    w[k] = w[k] - (m[k] / (std::sqrt(v[k]) / root + eps)) * size;
  }
}

__attribute__((noinline)) void amsgrad_block(int64_t n, const Adam& o, float size, float root, float* __restrict w,
                                             const float* __restrict g, float* __restrict m, float* __restrict v,
                                             float* __restrict peak) {
  const float beta1 = o.beta1, take1 = o.take1, beta2 = o.beta2, take2 = o.take2, eps = o.eps;
  for (int64_t k = 0; k < n; k++) {
    m[k] = m[k] * beta1 + g[k] * take1;
    v[k] = v[k] * beta2 + (g[k] * g[k]) * take2;
    peak[k] = v[k] > peak[k] || v[k] != v[k] ? v[k] : peak[k];
    w[k] = w[k] - (m[k] / (std::sqrt(peak[k]) / root + eps)) * size;
  }
}

__attribute__((noinline)) void momentum_block(int64_t n, float momentum, float take, float* __restrict buffer,
                                              const float* __restrict g) {
  for (int64_t k = 0; k < n; k++) buffer[k] = buffer[k] * momentum + g[k] * take;
}

__attribute__((noinline)) void nesterov_block(int64_t n, float momentum, const float* __restrict buffer,
                                              float* __restrict g) {
  for (int64_t k = 0; k < n; k++) g[k] = g[k] + buffer[k] * momentum;
}

__attribute__((noinline)) void descend_block(int64_t n, float lr, float* __restrict w, const float* __restrict g) {
  for (int64_t k = 0; k < n; k++) w[k] = w[k] - g[k] * lr;
}

}  // namespace

extern "C" {

// Adam (Kingma & Ba 2015), or AdamW with `decoupled` weight decay. Nothing changes where `found` is set.
void halfstep_adam(const Tensors* tensors, const Common* common, double beta1, double beta2, double eps,
                   int32_t decoupled) {
  const Tensors& b = *tensors;
  const Common& c = *common;
  if (*c.found) return;
  const double lr = rate(c);
  std::vector<float> sizes(b.tensors), roots(b.tensors);
  double last = -1, size = 0, root = 0;
  for (int64_t t = 0; t < b.tensors; t++) {
    const double step = *b.steps[t] += 1;
    if (step != last) {
      size = lr / (1 - std::pow(beta1, step));
      root = std::sqrt(1 - std::pow(beta2, step));
      last = step;
    }
    sizes[t] = float(size);
    roots[t] = float(root);
  }
  const Adam o{float(beta1), float(1 - beta1), float(beta2), float(1 - beta2), float(eps),
               float(1 - lr * c.weight_decay), float(c.weight_decay), c.weight_decay != 0 && decoupled,
               c.weight_decay != 0 && !decoupled};
  for_each_block(b, c, [&](int64_t t, int64_t at, int64_t n, float* w, float* g) {
    if (o.decays) decay_block(n, o.decay, w);
    if (o.adds) add_block(n, o.l2, w, g);
    float *m = b.firsts[t] + at, *v = b.seconds[t] + at;
    if (b.peaks)
      amsgrad_block(n, o, sizes[t], roots[t], w, g, m, v, b.peaks[t] + at);
    else
      adam_block(n, o, sizes[t], roots[t], w, g, m, v);
  });
}

// SGD as torch has it: the first momentum is the gradient itself. Nothing changes where `found` is set.
void halfstep_sgd(const Tensors* tensors, const Common* common, double momentum, double dampening, int32_t nesterov) {
  const Tensors& b = *tensors;
  const Common& c = *common;
  if (*c.found) return;
  const float lr = float(rate(c)), mu = float(momentum), take = float(1 - dampening), l2 = float(c.weight_decay);
  const bool adds = c.weight_decay != 0;
  for_each_block(b, c, [&](int64_t t, int64_t at, int64_t n, float* w, float* g) {
    if (adds) add_block(n, l2, w, g);
    if (b.firsts) {
      float* buffer = b.firsts[t] + at;
      if (*b.fresh[t] == 1)
        std::memcpy(buffer, g, n * sizeof(float));
      else
        momentum_block(n, mu, take, buffer, g);
      if (nesterov)
        nesterov_block(n, mu, buffer, g);
      else
        std::memcpy(g, buffer, n * sizeof(float));
    }
    descend_block(n, lr, w, g);
  });
  if (b.fresh)
    for (int64_t t = 0; t < b.tensors; t++) *b.fresh[t] = 0;
}

}  // extern "C"
