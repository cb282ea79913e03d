// The update of one block by each optimizer that compiled loops know.
//
// An optimizer is a struct of coefficients, made once per step, and a rule for one element. Its name, and how many numbers
// it takes, stand in the optimizer's row (halfstep/train/optim/laws.py); `find_optimizer` lists it.

#pragma once

#include <type_traits>

#include "codes.h"

#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver pow,pow@GLIBC_2.2.5");  // the same bits; the default of newer ones is not in manylinux_2_28
#endif

namespace {

struct Block {  // of one tensor: full weights, true gradients with their l2 decay, and states, null where there is none
  int64_t tensor, n;
  float* w;
  const float* g;
  float* states[kStates];
};

inline float root_of(float x) { return std::sqrt(x); }

struct Quotient {
  float by;

  template <typename T>
  T operator()(T x) const { return x / by; }
};

// Divides by one number from 2^-60 to 1 with a product and an fma instead: by the two parts of its inverse, as Brisebarre,
// Muller and Raina (2004) do. The first part is rounded down, and the second positive, so that infinity stays what it is.
struct Product {
  float high, low;

  explicit Product(float by) : high(float(1.0 / by)) {
    if (high > 1.0 / by) high = std::nextafter(high, 0.0f);
    low = std::max(float(1.0 / by - high), 0x1p-126f);
  }

  float operator()(float x) const { return std::fma(x, high, x * low); }
#if defined(__AVX512BW__)
  Numbers operator()(Numbers x) const { return _mm512_fmadd_ps(x, _mm512_set1_ps(high), x * _mm512_set1_ps(low)); }
#endif
};

// Tells whether that is the rounded quotient of every x. It is off by less than 2^-22 of a unit in the last place, so that
// only quotients can differ that lie so close to the middle of two numbers. With x = X, the divisor D (both from 2^23 to
// 2^24) and the middle M (odd, to 2^25) as integers, those have X * 2^s = M * D + n with |n| < 8, where s is 24 or 25: one
// M for each n, modulo a power of two.
inline bool divides_exactly(float by) {
  if (!(by >= 0x1p-60f && by <= 1)) return false;
  const Product quotient(by);
  int exponent;
  const uint64_t divisor = uint64_t(std::ldexp(std::frexp(by, &exponent), 24));
  const int zeros = __builtin_ctzll(divisor);
  uint64_t inverse = divisor >> zeros;  // modulo 2^64 by Newton's method, which doubles its right bits
  for (int i = 0; i < 5; i++) inverse *= 2 - (divisor >> zeros) * inverse;
  for (int s = 24; s <= 25; s++)
    for (int64_t n = -7; n < 8; n++) {
      if (n == 0 || __builtin_ctzll(uint64_t(n)) != zeros) continue;
      const uint64_t period = uint64_t(1) << (s - zeros);
      for (uint64_t middle = uint64_t(-(n >> zeros)) * inverse % period; middle >> 25 == 0; middle += period) {
        const uint64_t x = (middle * divisor + uint64_t(n)) >> s;
        if (middle >> 24 && x >> 23 == 1 && quotient(float(x)) != float(x) / by) return false;
      }
    }
  return true;
}

// Updates `n` elements. Not inlined, or the compiler forgets that the pointers do not overlap.
template <typename Rule>
__attribute__((noinline)) void update(const Rule rule, int64_t n, float* __restrict w, const float* __restrict g,
                                      float* __restrict first, float* __restrict second, float* __restrict third) {
  constexpr int kUsed = Rule::kUsed;
  for (int64_t k = 0; k < n; k++) {
    float x = w[k], a = kUsed > 0 ? first[k] : 0, b = kUsed > 1 ? second[k] : 0, c = kUsed > 2 ? third[k] : 0;
    rule(x, g[k], a, b, c);
    w[k] = x;
    if (kUsed > 0) first[k] = a;
    if (kUsed > 1) second[k] = b;
    if (kUsed > 2) third[k] = c;
  }
}

// Adam (Kingma & Ba 2015), and with decoupled weight decay AdamW. States: mean, square, and with amsgrad the peak.
struct Adam {
  static constexpr char kName[] = "adam";
  static constexpr int64_t kNumbers = 3;
  static bool takes(const Tensors& b) { return b.steps && b.states[1]; }

  float beta1, take1, beta2, take2, eps, kept;
  std::vector<float> sizes, roots;  // of each tensor
  std::vector<bool> multiplies;     // whether the root of the correction need not divide

  // The update that comes when `ahead` more are counted than now.
  Adam(const Tensors& b, const Common& c, const double* numbers, float ahead)
      : beta1(float(numbers[0])), take1(float(1 - numbers[0])), beta2(float(numbers[1])), take2(float(1 - numbers[1])),
        eps(float(numbers[2])), kept(kept_of(c)) {
    double last = -1;
    for (int64_t t = 0; t < b.tensors; t++) {
      const double step = *b.steps[t] + ahead;
      if (step == last) {
        sizes.push_back(sizes.back());
        roots.push_back(roots.back());
        multiplies.push_back(multiplies.back());
      } else {
        sizes.push_back(float(c.lr / (1 - std::pow(numbers[0], step))));
        roots.push_back(float(std::sqrt(1 - std::pow(numbers[1], step))));
        multiplies.push_back(divides_exactly(roots.back()));
      }
      last = step;
    }
  }

  template <bool kPeaks, typename Corrected>
  struct Rule {
    static constexpr int kUsed = kPeaks ? 3 : 2;
    float beta1, take1, beta2, take2, eps, kept, size;
    Corrected corrected;

    template <typename T>  // one number, or many where no peak is kept
    void operator()(T& w, T g, T& m, T& v, T& peak) const {
      m = m * beta1 + g * take1;
      v = v * beta2 + (g * take2) * g;
      if constexpr (kPeaks) peak = v > peak || v != v ? v : peak;
      w = w * kept - (m / (corrected(root_of(kPeaks ? peak : v)) + eps)) * size;
    }
  };

  template <typename Use>
  void with_rule(const Block& x, const Use& use) const {
    const float size = sizes[x.tensor], root = roots[x.tensor];
    if (x.states[2])
      use(Rule<true, Quotient>{beta1, take1, beta2, take2, eps, kept, size, {root}});
    else if (multiplies[x.tensor])
      use(Rule<false, Product>{beta1, take1, beta2, take2, eps, kept, size, Product(root)});
    else
      use(Rule<false, Quotient>{beta1, take1, beta2, take2, eps, kept, size, {root}});
  }
};

// SGD as torch has it, without dampening. Without momentum there is no state.
struct Sgd {
  static constexpr char kName[] = "sgd";
  static constexpr int64_t kNumbers = 2;
  static bool takes(const Tensors& b) { return !b.states[1]; }

  float lr, momentum;
  bool nesterov;

  Sgd(const Tensors&, const Common& c, const double* numbers, float)
      : lr(float(c.lr)), momentum(float(numbers[0])), nesterov(numbers[1] != 0) {}

  template <bool kMomentum>
  struct Rule {
    static constexpr int kUsed = kMomentum;
    float lr, momentum;
    bool nesterov;

    void operator()(float& w, float g, float& buffer, float&, float&) const {
      if (kMomentum) buffer = buffer * momentum + g;
      w = w - (!kMomentum ? g : nesterov ? g + buffer * momentum : buffer) * lr;
    }
  };

  template <typename Use>
  void with_rule(const Block& x, const Use& use) const {
    if (x.states[0])
      use(Rule<true>{lr, momentum, nesterov});
    else
      use(Rule<false>{lr, momentum, nesterov});
  }
};

// Lion (Chen et al. 2023, algorithm 2). The sign of a zero is +0, and that of a NaN a NaN.
struct Lion {
  static constexpr char kName[] = "lion";
  static constexpr int64_t kNumbers = 2;
  static bool takes(const Tensors& b) { return b.states[0] && !b.states[1]; }

  struct Rule {
    static constexpr int kUsed = 1;
    float lr, kept, beta1, take1, beta2, take2;

    void operator()(float& w, float g, float& m, float&, float&) const {
      const float mixed = m * beta1 + g * take1;
      const float sign = mixed > 0 ? 1.0f : mixed < 0 ? -1.0f : mixed == 0 ? 0.0f : mixed;
      m = m * beta2 + g * take2;
      w = w * kept - sign * lr;
    }
  };
  Rule rule;

  Lion(const Tensors&, const Common& c, const double* numbers, float)
      : rule{float(c.lr), kept_of(c), float(numbers[0]), float(1 - numbers[0]), float(numbers[1]),
             float(1 - numbers[1])} {}

  template <typename Use>
  void with_rule(const Block&, const Use& use) const {
    use(rule);
  }
};

// Updates a block whose states are given in fp32.
template <typename Optimizer>
void update(const Optimizer& optimizer, const Block& x) {
  optimizer.with_rule(x, [&](auto rule) { update(rule, x.n, x.w, x.g, x.states[0], x.states[1], x.states[2]); });
}

// Calls `use` with a null pointer to the optimizer of this name; false where none has it with so many numbers and these
// tensors.
template <typename Use>
bool find_optimizer(const char* name, int64_t numbers, const Tensors& b, const Use& use) {
  const auto is = [&](auto* found) {
    using Found = std::remove_pointer_t<decltype(found)>;
    if (std::strcmp(name, Found::kName) || numbers != Found::kNumbers || !Found::takes(b) || !codes_are_known(b))
      return false;
    use(found);
    return true;
  };
  return is((Adam*)nullptr) || is((Sgd*)nullptr) || is((Lion*)nullptr);
}

}  // namespace
