// The optimizer step on a CPU: one read of the gradients, one pass over everything else.
//
// Tensors are dense blocks of memory; their elements are brought to fp32 in small blocks that stay in the first-level
// cache, so one loop serves every storage format.

#include "codes.h"
#include "optimizers.h"

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

// ---- blocks out -------------------------------------------------------------------------------------------------

inline uint16_t float_to_half(float x) {
  const uint32_t u = bits(x);
  const uint16_t sign = (u >> 16) & 0x8000;
  const uint32_t rest = u & 0x7FFFFFFF;
  if (rest > 0x7F800000) return sign | 0x7E00;
  if (rest >= 0x477FF000) return sign | 0x7C00;  // half a step beyond 65504 and on
  if (rest < 0x38800000) return sign | uint16_t(bits(number(rest) + 0.5f) - 0x3F000000);  // 0.5 has the subnormals' grid
  return sign | uint16_t((rest - 0x38000000 + 0xFFF + ((rest >> 13) & 1)) >> 13);
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

// The bits of a result in fp32, each NaN that would round to a zero moved to the last that does not, as in
// halfstep/train/optim/split.py. Those next to infinity do not come here: arithmetic makes every NaN quiet.
inline uint32_t storable(uint32_t u) {
  const uint32_t magnitude = u & 0x7FFFFFFF, last = 0x7FFF7FFF;
  return magnitude > last ? u - (magnitude - last) : u;
}

// bf16 ties go away from zero, as in halfstep/train/optim/split.py; fp16 ties to even.
void store_low(int32_t format, const float* __restrict from, void* base, int64_t at, int64_t n) {
  if (format == kBfloat) {
    uint16_t* to = (uint16_t*)base + at;
    for (int64_t i = 0; i < n; i++) to[i] = uint16_t((storable(bits(from[i])) + 0x8000) >> 16);
  } else {
    store_half(from, (uint16_t*)base + at, n);
  }
}

void split(const float* __restrict from, uint16_t* __restrict high, int16_t* __restrict low, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t u = storable(bits(from[i]));
    high[i] = uint16_t((u + 0x8000) >> 16);
    low[i] = int16_t(uint16_t(u));
  }
}

// ---- parts: which thread takes which elements of which tensor ---------------------------------------------------

struct Part {
  int64_t tensor, begin, end;
};

int64_t end_of(const Shard* shard, int64_t at, int64_t length, int64_t end) {
  return at + length >= end ? end : shard ? whole_groups(*shard, at, length) : at + length;
}

std::vector<Part> parts_of(int64_t tensors, const int64_t* numels, const Shard* places = nullptr) {
  std::vector<Part> parts;
  parts.reserve(tensors);
  for (int64_t t = 0; t < tensors; t++)
    for (int64_t begin = 0, end; begin < numels[t]; begin = end) {
      end = end_of(places ? places + t : nullptr, begin, kPart, numels[t]);
      parts.push_back({t, begin, end});
    }
  return parts;
}

int threads_for(int64_t tensors, const int64_t* numels, int32_t threads) {
  int64_t all = 0;
  for (int64_t t = 0; t < tensors; t++) all += numels[t];
  return all < kAlone ? 1 : threads;
}

// ---- the read pass ----------------------------------------------------------------------------------------------

template <typename T>
inline float value(T x) {
  return number(widened(x));
}

// The sum of the squares of elements times `unit`, in fp32.
template <typename T>
__attribute__((noinline)) float scaled_squares(const T* __restrict x, int64_t n, float unit) {
  constexpr int kLanes = 64;
  float sums[kLanes] = {0};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int byte = 0; byte < kLanes * int(sizeof(T)); byte += 64) __builtin_prefetch((const char*)(x + i) + kAhead + byte);
    for (int k = 0; k < kLanes; k++) sums[k] += (value(x[i + k]) * unit) * (value(x[i + k]) * unit);
  }
  for (int k = 0; i < n; i++, k++) sums[k] += (value(x[i]) * unit) * (value(x[i]) * unit);
  for (int width = kLanes / 2; width; width /= 2)
    for (int k = 0; k < width; k++) sums[k] += sums[k + width];
  return sums[0];
}

// The sum of squares, infinite or NaN exactly where an element is: where some may have overflowed or vanished they are
// taken again of elements times a power of two with which none does. The next block begins with that `unit`.
template <typename T>
double squares(const T* x, int64_t n, float& unit) {
  for (;;) {
    const float sum = scaled_squares(x, n, unit);
    const bool vanished = sum <= 1e-28f && unit <= 1, overflowed = !(sum < 1e38f) && unit >= 1;
    if (!vanished && !overflowed) return double(sum) / unit / unit;
    unit *= vanished ? 0x1p100f : 0x1p-100f;
  }
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
    double sum = 0;
    float unit = 1;
    for (int64_t at = part.begin; at < part.end; at += kRead) {
      const int64_t n = at + kRead < part.end ? kRead : part.end - at;
      switch (formats[part.tensor]) {
        case kFloat: sum += squares((const uint32_t*)grad + at, n, unit); break;
        case kBfloat: sum += squares((const BFloat16*)grad + at, n, unit); break;
        default: sum += squares((const Float16*)grad + at, n, unit);
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

}  // extern "C"

namespace {

// Updates a block whose states are in 2 bytes, given in fp32, and keeps them. The step is counted already.
template <typename Rule>
void update_in_bf16(const Rule& rule, const Tensors& b, int64_t at, const Block& x, uint32_t key, const Run* runs,
                    int64_t count, uint32_t* random) {
  for (const Run* run = runs; run < runs + count; run++) {
    const auto from = [&](float* states) { return states ? states + run->from : nullptr; };
    update<kHashed, false>(rule, run->length, x.w + run->from, x.g + run->from, from(x.states[0]), from(x.states[1]),
                           from(x.states[2]), run->index, key, random + run->from, nullptr, nullptr, nullptr);
  }
  if (x.states[0]) to_bf16<0>(x.states[0], random, (uint16_t*)b.states[0][x.tensor] + at, x.n);
  if (x.states[1]) to_bf16<1>(x.states[1], random, (uint16_t*)b.states[1][x.tensor] + at, x.n);
}

// The same for 8 bits. The block holds whole groups; those that a row ends early are filled up with zeros.
template <bool kRandom, typename Rule>
void update_in_codes(const Rule& rule, const Tensors& b, int64_t at, const Block& x, uint32_t key, const Run* runs,
                     int64_t count) {
  alignas(64) uint32_t random[kGroup], codes[kStates][kGroup];
  alignas(64) float some[2 + kStates][kGroup];
  uint8_t short_codes[kGroup];
  Range ranges[2];
  for (const Run* run = runs; run < runs + count; run++) {
    const bool whole = run->length == kGroup;
    const size_t bytes = run->length * sizeof(float);
    const auto opened = [&](int which, const float* from) {
      if (whole || !from) return (float*)from + (from ? run->from : 0);
      std::memset(some[which], 0, sizeof some[which]);
      return (float*)std::memcpy(some[which], from + run->from, bytes);
    };
    float* w = opened(0, x.w);
    float* states[2] = {opened(2, x.states[0]), opened(3, x.states[1])};
    update<kCoded, kRandom>(rule, kGroup, w, opened(1, x.g), states[0], states[1], (float*)nullptr, run->index, key,
                            random, codes[0], codes[1], ranges);
    if (!whole) std::memcpy(x.w + run->from, w, bytes);
    for (int k = 0; k < 2 && states[k]; k++) {
      uint8_t* held = (uint8_t*)b.states[k][x.tensor] + at + run->from;
      const auto encoded = k ? encode<1, false, true> : encode<0, true, kRandom>;
      b.bases[k][x.tensor][run->group] = encoded(states[k], random, ranges[k], codes[k], whole ? held : short_codes);
      if (!whole) std::memcpy(held, short_codes, run->length);
    }
  }
}

// Opens each block of weights and gradients, has `optimizer` update it, and stores it again.
template <typename Optimizer>
void for_each_block(const Tensors& b, const Common& c, const Optimizer& optimizer) {
  const std::vector<Part> parts = parts_of(b.tensors, b.numels, b.places);
  const int64_t count = int64_t(parts.size());
  const int threads = threads_for(b.tensors, b.numels, b.threads);
  const float l2 = l2_of(c);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < count; i++) {
    const int64_t t = parts[i].tensor;
    alignas(64) float opened[kBlock];
    alignas(64) float room[kBlock], states[kStates][kBlock];
    alignas(64) uint32_t random[kBlock];
    Run runs[kBlock];
    const Shard* place = b.places ? b.places + t : nullptr;
    for (int64_t at = parts[i].begin, n; at < parts[i].end; at += n) {
      n = end_of(place, at, kBlock, parts[i].end) - at;
      float* w = open_weights(b, t, at, n, opened);
      Block block{t, n, w, open_gradient(b, c, t, at, n, l2, w, room), {}};
      const int64_t count = place ? runs_of(*place, at, n, runs) : 0;
      for (int k = 0; k < kStates; k++)
        block.states[k] = b.states[k] ? open_state(b, t, k, at, n, runs, count, states[k]) : nullptr;
      if (b.width == kWhole || !block.states[0]) {
        update(optimizer, block);
      } else {
        const uint32_t key = key_of(*place, *b.steps[t], 0);
        optimizer.with_rule(block, [&](auto rule) {
          if (b.width == kTwoBytes) update_in_bf16(rule, b, at, block, key, runs, count, random);
          else if (b.codes[0] & kIsRandom) update_in_codes<true>(rule, b, at, block, key, runs, count);
          else update_in_codes<false>(rule, b, at, block, key, runs, count);
        });
      }
      if (b.layout == kSplit) split(opened, (uint16_t*)b.weights[t] + at, (int16_t*)b.extras[t] + at, n);
      else if (b.rounds) {
        random_bits(b, t, 1, runs, count, random);
        to_bf16<0>(w, random, (uint16_t*)b.weights[t] + at, n);
      } else if (b.layout != kFull) store_low(b.format, w, b.weights[t], at, n);
    }
  }
}

template <typename Optimizer>
void step(const Tensors& b, const Common& c, const double* numbers) {
  if (*c.found) return;
  if (b.steps)
    for (int64_t t = 0; t < b.tensors; t++) *b.steps[t] += 1;
  for_each_block(b, c, Optimizer(b, c, numbers, 0));
}

}  // namespace

extern "C" {

// Makes one update by the optimizer of this name (optimizers.h), which takes `count` numbers; returns 0, with nothing
// done, where there is none. Nothing changes where `found` is set.
int32_t halfstep_step(const char* name, const Tensors* tensors, const Common* common, const double* numbers,
                      int64_t count) {
  return find_optimizer(name, count, *tensors, [&](auto* optimizer) {
    step<std::remove_pointer_t<decltype(optimizer)>>(*tensors, *common, numbers);
  });
}

}  // extern "C"
