// The update of one block by each optimizer that compiled loops know.
//
// An optimizer is a struct of coefficients, made once per step, and a call that updates one block. Its name, and how many
// numbers it takes, stand in the optimizer's row (halfstep/train/optim/laws.py); `find_optimizer` lists it. The loops over a
// block are not inlined, or the compiler forgets that the pointers do not overlap.

#pragma once

#include <type_traits>

#include "blocks.h"

namespace {

struct Block {  // of one tensor: full weights, true gradients with their l2 decay, and states, null where there is none
  int64_t tensor, n;
  float* w;
  const float* g;
  float* states[kStates];
};

// Adam (Kingma & Ba 2015), and with decoupled weight decay AdamW. States: mean, square, and with amsgrad the peak.
struct Adam {
  static constexpr char kName[] = "adam";
  static constexpr int64_t kNumbers = 3;
  static bool takes(const Tensors& b) { return b.steps && b.states[1]; }

  float beta1, take1, beta2, take2, eps, kept;
  std::vector<float> sizes, roots;  // of each tensor

  // The update that comes when `ahead` more are counted than now.
  Adam(const Tensors& b, const Common& c, const double* numbers, float ahead)
      : beta1(float(numbers[0])), take1(float(1 - numbers[0])), beta2(float(numbers[1])), take2(float(1 - numbers[1])),
        eps(float(numbers[2])), kept(kept_of(c)) {
    const double lr = rate(c);
    double last = -1;
    for (int64_t t = 0; t < b.tensors; t++) {
      const double step = *b.steps[t] + ahead;
      if (step == last) {
        sizes.push_back(sizes.back());
        roots.push_back(roots.back());
      } else {
        sizes.push_back(float(lr / (1 - std::pow(numbers[0], step))));
        roots.push_back(float(std::sqrt(1 - std::pow(numbers[1], step))));
      }
      last = step;
    }
  }

  void operator()(const Block& x) const {
    const float size = sizes[x.tensor], root = roots[x.tensor];
    if (x.states[2])
      update<true>(x.n, size, root, x.w, x.g, x.states[0], x.states[1], x.states[2]);
    else
      update<false>(x.n, size, root, x.w, x.g, x.states[0], x.states[1], nullptr);
  }

  template <bool kPeaks>
  __attribute__((noinline)) void update(int64_t n, float size, float root, float* __restrict w,
                                        const float* __restrict g, float* __restrict m, float* __restrict v,
                                        float* __restrict peak) const {
    const float beta1 = this->beta1, take1 = this->take1, beta2 = this->beta2, take2 = this->take2;
    const float eps = this->eps, kept = this->kept;
    for (int64_t k = 0; k < n; k++) {
      m[k] = m[k] * beta1 + g[k] * take1;
      v[k] = v[k] * beta2 + (g[k] * take2) * g[k];
      if (kPeaks) peak[k] = v[k] > peak[k] || v[k] != v[k] ? v[k] : peak[k];
      w[k] = w[k] * kept - (m[k] / (std::sqrt(kPeaks ? peak[k] : v[k]) / root + eps)) * size;
    }
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
      : lr(float(rate(c))), momentum(float(numbers[0])), nesterov(numbers[1] != 0) {}

  void operator()(const Block& x) const {
    if (x.states[0])
      update(x.n, x.w, x.g, x.states[0]);
    else
      descend(x.n, x.w, x.g);
  }

  __attribute__((noinline)) void update(int64_t n, float* __restrict w, const float* __restrict g,
                                        float* __restrict buffer) const {
    const float lr = this->lr, momentum = this->momentum;
    const bool nesterov = this->nesterov;
    for (int64_t k = 0; k < n; k++) {
      buffer[k] = buffer[k] * momentum + g[k];
      w[k] = w[k] - (nesterov ? g[k] + buffer[k] * momentum : buffer[k]) * lr;
    }
  }

  __attribute__((noinline)) void descend(int64_t n, float* __restrict w, const float* __restrict g) const {
    const float lr = this->lr;
    for (int64_t k = 0; k < n; k++) w[k] = w[k] - g[k] * lr;
  }
};

// Lion (Chen et al. 2023, algorithm 2). The sign of a zero is +0, and that of a NaN a NaN.
struct Lion {
  static constexpr char kName[] = "lion";
  static constexpr int64_t kNumbers = 2;
  static bool takes(const Tensors& b) { return b.states[0] && !b.states[1]; }

  float lr, kept, beta1, take1, beta2, take2;

  Lion(const Tensors&, const Common& c, const double* numbers, float)
      : lr(float(rate(c))), kept(kept_of(c)), beta1(float(numbers[0])), take1(float(1 - numbers[0])),
        beta2(float(numbers[1])), take2(float(1 - numbers[1])) {}

  void operator()(const Block& x) const { update(x.n, x.w, x.g, x.states[0]); }

  __attribute__((noinline)) void update(int64_t n, float* __restrict w, const float* __restrict g,
                                        float* __restrict m) const {
    const float lr = this->lr, kept = this->kept;
    const float beta1 = this->beta1, take1 = this->take1, beta2 = this->beta2, take2 = this->take2;
    for (int64_t k = 0; k < n; k++) {
      const float mixed = m[k] * beta1 + g[k] * take1;
      const float sign = mixed > 0 ? 1.0f : mixed < 0 ? -1.0f : mixed == 0 ? 0.0f : mixed;
      m[k] = m[k] * beta2 + g[k] * take2;
      w[k] = w[k] * kept - sign * lr;
    }
  }
};

// Calls `use` with a null pointer to the optimizer of this name; false where none has it with so many numbers and these
// tensors.
template <typename Use>
bool find_optimizer(const char* name, int64_t numbers, const Tensors& b, const Use& use) {
  const auto is = [&](auto* found) {
    using Found = std::remove_pointer_t<decltype(found)>;
    if (std::strcmp(name, Found::kName) || numbers != Found::kNumbers || !Found::takes(b)) return false;
    use(found);
    return true;
  };
  return is((Adam*)nullptr) || is((Sgd*)nullptr) || is((Lion*)nullptr);
}

}  // namespace
