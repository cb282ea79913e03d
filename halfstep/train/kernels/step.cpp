// The optimizer step on a CPU: one read of the gradients, one pass over everything else.
//
// Tensors are dense blocks of memory; their elements are brought to fp32 in small blocks that stay in the first-level
// cache, so one loop serves every storage format.

#if defined(__AVX512BW__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("schedule-insns", "no-sched-pressure")  // orders what waits for divisions before registers are given out
#endif

#include "groups.h"
#include "optimizers.h"

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
// halfstep/train/optim/masters.py. Those next to infinity do not come here: arithmetic makes every NaN quiet.
inline uint32_t storable(uint32_t u) {
  const uint32_t magnitude = u & 0x7FFFFFFF, last = 0x7FFF7FFF;
  return magnitude > last ? u - (magnitude - last) : u;
}

// bf16 ties go away from zero, as in halfstep/train/optim/masters.py; fp16 ties to even.
void store_low(int32_t format, const float* __restrict from, void* base, int64_t at, int64_t n) {
  if (format == kBfloat) {
    uint16_t* to = (uint16_t*)base + at;
    for (int64_t i = 0; i < n; i++) to[i] = uint16_t((storable(bits(from[i])) + 0x8000) >> 16);
  } else {
    store_half(from, (uint16_t*)base + at, n);
  }
}

template <bool kApart = false>
__attribute__((always_inline)) inline void split(const float* __restrict from, uint16_t* __restrict high,
                                                 int16_t* __restrict low, int64_t n) {
  int64_t i = 0;
#if defined(__AVX2__)
  for (; i + kWords <= n; i += kWords) split_words<kApart>(from + i, high + i, low + i);
#endif
  for (; i < n; i++) {
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

struct Kept {  // the states of neighbouring groups, and the index of their first element in the whole tensor
  uint8_t* states[2];
  int16_t* bases[2];
  uint32_t index;
};

inline Kept kept_at(const Tensors& b, int64_t t, int64_t at, int64_t group, uint32_t index) {
  Kept x{{}, {}, index};
  for (int k = 0; k < 2 && b.states[k]; k++) {
    x.states[k] = (uint8_t*)b.states[k][t] + at * (b.width == kWhole ? 4 : b.width == kTwoBytes ? 2 : 1);
    if (b.width == kOneByte) x.bases[k] = b.bases[k][t] + group;
  }
  return x;
}

// Copies a group of fp32 numbers, which stand apart or in order, to where they stand apart or in order.
template <bool kFrom, bool kTo>
__attribute__((always_inline)) inline void copy_group(const float* from, float* to) {
#if defined(__AVX512BW__)
  if constexpr (kFrom != kTo) {
    for (int k = 0; k < kGroup; k += kWords) put<kTo>(take<kFrom>(from + k), to + k);
    return;
  }
#endif
  std::memcpy(to, from, kGroup * sizeof *to);
}

template <bool kApart>
inline void open_grads(const float* from, float factor, float* to) {
  copy_group<false, kApart>(from, to);
  for (int k = 0; k < kGroup; k++) to[k] *= factor;
}
template <bool kApart>
inline void open_grads(const BFloat16* from, float factor, float* to) { load<kApart>(from, factor, to, kGroup); }

template <bool kApart>
inline void open_group(const float* w, const int16_t*, float* to) { copy_group<false, kApart>(w, to); }
template <bool kApart>
inline void close_group(const float* from, float* w, int16_t*) { copy_group<kApart, false>(from, w); }
template <bool kApart>
inline void open_group(const uint16_t* w, const int16_t* rest, float* to) { join<kApart>(w, rest, to, kGroup); }
template <bool kApart>
inline void close_group(const float* from, uint16_t* w, int16_t* rest) { split<kApart>(from, w, rest, kGroup); }

template <Width kWidth, int kState>
__attribute__((always_inline)) inline void open_states(const Kept& x, int64_t group, float* to) {
  if (kWidth == kWhole)
    std::memcpy(to, (const float*)x.states[kState] + group * kGroup, kGroup * sizeof *to);
  else if (kWidth == kTwoBytes)
    load<kGroupsApart>((const BFloat16*)x.states[kState] + group * kGroup, 1, to, kGroup);
  else
    decode_group<kState == 0>(x.states[kState] + group * kGroup, x.bases[kState][group], to);
}

template <Width kWidth, int kState, bool kRandom>
__attribute__((always_inline)) inline void close_states(const float* from, const uint32_t* random, const Kept& x,
                                                        int64_t group) {
  if (kWidth == kWhole)
    std::memcpy((float*)x.states[kState] + group * kGroup, from, kGroup * sizeof *from);
  else if (kWidth == kTwoBytes)
    round_group<kState>(from, random, (uint16_t*)x.states[kState] + group * kGroup);
  else
    x.bases[kState][group] = encode_group<kState, kState == 0, kRandom>(from, random, x.states[kState] + group * kGroup);
}

// Where `kEarly`, with AVX-512, divisions stand before the codes, which are made while they run: compilers would put them last.
template <bool kEarly, typename Rule>
__attribute__((always_inline)) inline void update_group(const Rule& rule, float* w, const float* g, float* first,
                                                        float* second) {
#if defined(__AVX512BW__)
  if constexpr (kEarly && Rule::kUsed == 2) {
    for (int k = 0; k < kGroup; k += 16) {
      Numbers x = _mm512_load_ps(w + k), m = _mm512_load_ps(first + k), v = _mm512_load_ps(second + k), none{};
      rule(x, _mm512_load_ps(g + k), m, v, none);
      asm volatile("" : "+v"(x));
      _mm512_store_ps(w + k, x), _mm512_store_ps(first + k, m), _mm512_store_ps(second + k, v);
    }
    return;
  }
#endif
  float none = 0;
  for (int k = 0; k < kGroup; k++) rule(w[k], g[k], first[k], Rule::kUsed == 2 ? second[k] : none, none);
}

// Updates whole groups, of weights in fp32 or split with `rest`, and keeps their states. With AVX-512 what is opened stays
// in registers.
template <Width kWidth, bool kRandom, typename Rule, typename Weight, typename Grad>
__attribute__((noinline)) void update_groups(const Rule rule, int64_t groups, Weight* __restrict weights,
                                             int16_t* __restrict rest, const Grad* __restrict grads, float factor,
                                             const Kept x, uint32_t key) {
  constexpr bool kTwo = Rule::kUsed > 1, kApart = kGroupsApart && kWidth != kWhole;
  using State = std::conditional_t<kWidth == kWhole, float, std::conditional_t<kWidth == kTwoBytes, uint16_t, uint8_t>>;
  for (int64_t i = 0, at = 0; i < groups; i++, at += kGroup) {
    alignas(64) float w[kGroup], g[kGroup], first[kGroup], second[kGroup];
    alignas(64) uint32_t random[kGroup];
    if (kWidth != kWhole) random_group((x.index + uint32_t(at)) * kSpread + key, random);
    open_states<kWidth, 0>(x, i, first);
    if (kTwo) open_states<kWidth, 1>(x, i, second);
    open_grads<kApart>(grads + at, factor, g);
    open_group<kApart>(weights + at, rest + at, w);
    update_group<kWidth == kOneByte>(rule, w, g, first, second);
    close_states<kWidth, 0, kRandom>(first, random, x, i);
    if (kTwo) close_states<kWidth, 1, true>(second, random, x, i);
    close_group<kApart>(w, weights + at, rest + at);
    ask_for(weights + at);
    if (rest) ask_for(rest + at);
    ask_for(grads + at), ask_for((const State*)x.states[0] + at);
    if (kTwo) ask_for((const State*)x.states[1] + at);
  }
}

// The same for 8 bits, from codes. The block holds whole groups; those that a row ends early are filled up with zeros.
template <bool kRandom, typename Rule>
void update_in_codes(const Rule& rule, const Tensors& b, int64_t at, const Block& x, uint32_t key, const Run* runs,
                     int64_t count) {
  for (const Run* run = runs; run < runs + count; run++) {
    const Kept held = kept_at(b, x.tensor, at + run->from, run->group, run->index);
    if (run->length == kGroup) {
      update_groups<kOneByte, kRandom>(rule, 1, x.w + run->from, nullptr, x.g + run->from, 1, held, key);
      continue;
    }
    Kept filled = held;
    float some[2][kGroup] = {};
    uint8_t codes[2][kGroup] = {};
    std::memcpy(some[0], x.w + run->from, run->length * sizeof(float));
    std::memcpy(some[1], x.g + run->from, run->length * sizeof(float));
    for (int k = 0; k < 2 && held.states[k]; k++)
      filled.states[k] = (uint8_t*)std::memcpy(codes[k], held.states[k], run->length);
    update_groups<kOneByte, kRandom>(rule, 1, some[0], nullptr, some[1], 1, filled, key);
    std::memcpy(x.w + run->from, some[0], run->length * sizeof(float));
    for (int k = 0; k < 2 && held.states[k]; k++) std::memcpy(held.states[k], codes[k], run->length);
  }
}

// The same without blocks, of rows of whole groups, or of full states: weights and gradients are fp32, or split and bf16.
// Returns where less than a group is left.
template <Width kWidth, bool kRandom, typename Rule>
__attribute__((noinline)) int64_t update_rows(const Rule& rule, const Tensors& b, const Common& c, const Part& part) {
  const int64_t t = part.tensor;
  const Shard none{}, &p = b.places ? b.places[t] : none;
  const uint32_t key = kWidth == kWhole ? 0 : key_of(p, *b.steps[t]);
  int64_t at = part.begin;
  for (int64_t n; (n = (part.end - at) / kGroup * kGroup); at += n) {
    const int64_t slice = p.row == p.stride ? 0 : at / p.row, column = at - slice * p.row;
    if (p.row != p.stride) n = std::min(n, p.row - column);
    const Kept x = kept_at(b, t, at, at / kGroup, uint32_t(p.first + slice * p.stride + column));
    if (b.layout == kSplit)
      update_groups<kWidth, kRandom>(rule, n / kGroup, (uint16_t*)b.weights[t] + at, (int16_t*)b.extras[t] + at,
                                     (const BFloat16*)b.grads[t] + at, factor_of(c), x, key);
    else
      update_groups<kWidth, kRandom>(rule, n / kGroup, (float*)b.weights[t] + at, nullptr, (const float*)b.grads[t] + at,
                                     factor_of(c), x, key);
  }
  return at;
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
    const bool coded = b.width == kOneByte;
    int64_t at = parts[i].begin;
    const bool fits = b.grad_formats[t] == kFloat ? b.layout == kFull : b.grad_formats[t] == kBfloat && b.layout == kSplit;
    const bool whole = b.width == kWhole;
    if (b.states[0] && !b.states[2] && fits && l2 == 0 && (whole || place->row % kGroup == 0))
      optimizer.with_rule(Block{t, 0, nullptr, nullptr, {(float*)b.states[0][t]}}, [&](auto rule) {
        if (whole) at = update_rows<kWhole, false>(rule, b, c, parts[i]);
        else if (!coded) at = update_rows<kTwoBytes, true>(rule, b, c, parts[i]);
        else if (b.codes[0] & kIsRandom) at = update_rows<kOneByte, true>(rule, b, c, parts[i]);
        else at = update_rows<kOneByte, false>(rule, b, c, parts[i]);
      });
    for (int64_t n; at < parts[i].end; at += n) {
      n = end_of(place, at, kBlock, parts[i].end) - at;
      float* w = open_weights(b, t, at, n, opened);
      Block block{t, n, w, open_gradient(b, c, t, at, n, l2, w, room), {}};
      const int64_t count = place ? runs_of(*place, at, n, runs) : 0;
      for (int k = 0; k < kStates; k++)
        block.states[k] = !b.states[k] ? nullptr : coded ? states[k] : open_state(b, t, k, at, n, runs, count, states[k]);
      if (b.width != kOneByte || !block.states[0]) {
        update(optimizer, block);
      } else {
        const uint32_t key = key_of(*place, *b.steps[t]);
        optimizer.with_rule(block, [&](auto rule) {
          if (b.codes[0] & kIsRandom) update_in_codes<true>(rule, b, at, block, key, runs, count);
          else update_in_codes<false>(rule, b, at, block, key, runs, count);
        });
      }
      const bool rounded = b.width == kTwoBytes && block.states[0];
      if (rounded || b.rounds) random_bits(b, t, runs, count, random);
      if (rounded) to_bf16<0>(block.states[0], random, (uint16_t*)b.states[0][t] + at, n);
      if (rounded && block.states[1]) to_bf16<1>(block.states[1], random, (uint16_t*)b.states[1][t] + at, n);
      if (b.layout == kSplit) split(opened, (uint16_t*)b.weights[t] + at, (int16_t*)b.extras[t] + at, n);
      else if (b.rounds) to_bf16<2>(w, random, (uint16_t*)b.weights[t] + at, n);
      else if (b.layout != kFull) store_low(b.format, w, b.weights[t], at, n);
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
