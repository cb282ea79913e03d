// One read of a tensor: a histogram of binary exponents, counts, sums and the largest magnitude.
//
// A row of results is 264 int64: 256 exponent counts, count, zeros, negatives, infinities, nans, and the bits of three
// doubles: sum, sum of squares, largest magnitude. Rows are added to. Sums are taken in pieces of fixed size, in a
// fixed order, so that they do not depend on the number of threads (in their last place they do on the processor).
// Updates of weights are counted as they are computed, by the code that the step runs (optimizers.h).

#include "codes.h"
#include "optimizers.h"

namespace {

constexpr int64_t kPiece = 1 << 15;  // elements that one thread takes at a time
constexpr int64_t kParallel = 1 << 18;  // elements, some 100 us: less is not worth waking threads for
constexpr int64_t kBlock = 512;      // elements that stay in registers and the first cache
#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 4;  // more do not fit in the registers of AVX2 with all that is summed: three times as slow
#endif
constexpr int kTables = 4;  // neighbours often have one exponent: their increments must not wait for each other
constexpr uint32_t kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u;
// The columns behind the histogram, in the order of the fields of TensorStats (records.py).
enum Column { kLastBin = 255, kCount, kZeros, kNegatives, kInfinities, kNans, kTotal, kSquares, kAmax };
enum Kind { kFloat32, kBFloat16, kFloat16, kFloat64 };

struct Piece {
  uint32_t tables[kTables][256] = {};
  int64_t count = 0, zeros = 0, negatives = 0, infinities = 0, nans = 0;
  double totals[kLanes] = {}, squares[kLanes] = {};
  double peak = 0;
};

struct Sums {
  double total, squares, peak;
};

// Whole vectors, as compilers do less well with loops over lanes; cut up where they are longer than registers.
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef double Doubles __attribute__((vector_size(8 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

void count_exponents(const uint8_t* exponents, int64_t size, Piece& piece) {
  for (int64_t i = 0; i + kTables <= size; i += kTables)
    for (int table = 0; table < kTables; ++table) ++piece.tables[table][exponents[i + table]];
  for (int64_t i = size / kTables * kTables; i < size; ++i) ++piece.tables[0][exponents[i]];
}

// Counts `size` elements, at most kBlock. `bits` is filled up with zeros to whole lanes, which the caller takes off.
void count_block(const uint32_t* bits, int64_t size, Piece& piece) {
  uint8_t exponents[kBlock];
  Words zeros = {}, negatives = {}, infinities = {}, nans = {}, peaks = {};
  Doubles totals = {}, squares = {};
  const int64_t padded = (size + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = 0; i < padded; i += kLanes) {
    Words b;
    std::memcpy(&b, bits + i, sizeof b);
    const Words magnitude = b & kMagnitude;
    const Words is_finite = (Words)(magnitude < kInfinity);
    const Words finite = magnitude & is_finite;
    const Doubles value = __builtin_convertvector((Floats)(b & is_finite), Doubles);
    zeros -= (Words)(magnitude == 0);
    nans -= (Words)(magnitude > kInfinity);
    infinities -= (Words)(magnitude == kInfinity);
    negatives -= (Words)(b > 0x80000000u) & (Words)(magnitude <= kInfinity);
    peaks = finite > peaks ? finite : peaks;
    totals += value;
    squares += value * value;
    const Bytes e = __builtin_convertvector(magnitude >> 23, Bytes);
    std::memcpy(exponents + i, &e, sizeof e);
  }
  count_exponents(exponents, size, piece);
  piece.zeros -= padded - size;
  uint32_t peak = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    piece.zeros += zeros[lane];
    piece.negatives += negatives[lane];
    piece.infinities += infinities[lane];
    piece.nans += nans[lane];
    piece.totals[lane] += totals[lane];
    piece.squares[lane] += squares[lane];
    peak = peaks[lane] > peak ? peaks[lane] : peak;
  }
  piece.count += size;
  piece.peak = std::fmax(piece.peak, double(number(peak)));
}

template <class Element>
void count_run(const Element* data, int64_t size, Piece& piece) {
  alignas(64) uint32_t bits[kBlock];
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t part = size - start < kBlock ? size - start : kBlock;
    for (int64_t i = 0; i < part; ++i) bits[i] = widened(data[start + i]);
    for (int64_t i = part; i % kLanes; ++i) bits[i] = 0;
    count_block(bits, part, piece);
  }
}

void count_run(const uint32_t* data, int64_t size, Piece& piece) {
  const int64_t whole = size / kBlock * kBlock;
  for (int64_t start = 0; start < whole; start += kBlock) count_block(data + start, kBlock, piece);
  count_run<uint32_t>(data + whole, size - whole, piece);
}

typedef uint64_t Longs __attribute__((vector_size(8 * kLanes)));

// fp64 beyond fp32's exponents: below 2^-126 is entry 0, from 2^128 on entry 255.
void count_wide_block(const uint64_t* bits, int64_t size, Piece& piece) {
  constexpr uint64_t magnitudes = 0x7fffffffffffffffull, infinity = 0x7ff0000000000000ull;
  uint8_t exponents[kBlock];
  Longs zeros = {}, negatives = {}, infinities = {}, nans = {}, peaks = {};
  Doubles totals = {}, squares = {};
  const int64_t padded = (size + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = 0; i < padded; i += kLanes) {
    Longs b;
    std::memcpy(&b, bits + i, sizeof b);
    const Longs magnitude = b & magnitudes;
    const Longs is_finite = (Longs)(magnitude < infinity);
    const Longs finite = magnitude & is_finite;
    const Doubles value = (Doubles)(b & is_finite);
    zeros -= (Longs)(magnitude == 0);
    infinities -= (Longs)(magnitude == infinity);
    nans -= (Longs)(magnitude > infinity);
    negatives -= (Longs)(b > 0x8000000000000000ull) & (Longs)(magnitude <= infinity);
    peaks = finite > peaks ? finite : peaks;
    totals += value;
    squares += value * value;
    const Longs biased = magnitude >> 52, low = biased > 1023 - 127 ? biased - (1023 - 127) : Longs{};
    const Bytes e = __builtin_convertvector(low < 255 ? low : Longs{} + 255, Bytes);
    std::memcpy(exponents + i, &e, sizeof e);
  }
  count_exponents(exponents, size, piece);
  piece.zeros -= padded - size;
  for (int lane = 0; lane < kLanes; ++lane) {
    double peak;
    const uint64_t peak_bits = peaks[lane];
    std::memcpy(&peak, &peak_bits, sizeof peak);
    piece.zeros += zeros[lane];
    piece.negatives += negatives[lane];
    piece.infinities += infinities[lane];
    piece.nans += nans[lane];
    piece.totals[lane] += totals[lane];
    piece.squares[lane] += squares[lane];
    piece.peak = std::fmax(piece.peak, peak);
  }
  piece.count += size;
}

void count_run(const uint64_t* data, int64_t size, Piece& piece) {
  const int64_t whole = size / kBlock * kBlock, rest = size - whole;
  for (int64_t start = 0; start < whole; start += kBlock) count_wide_block(data + start, kBlock, piece);
  if (rest == 0) return;
  uint64_t bits[kBlock] = {};
  std::memcpy(bits, data + whole, size_t(rest) * sizeof *bits);
  count_wide_block(bits, rest, piece);
}

// The elements of a tensor that are read: all of them, or `runs` runs of `length`, one in each of `runs` equal
// stretches, at a place in it that follows the golden ratio: even spacing would fall on the same columns of each row.
struct Reading {
  int64_t size, runs, length;

  Reading(int64_t size, int64_t sample, int64_t length)
      : size(size), runs(sample == 0 || size <= sample ? 0 : sample / length), length(length) {}

  int64_t units() const { return runs ? runs : size; }
  int64_t step() const { return runs ? kPiece / length : kPiece; }  // units of a piece
  int64_t elements() const { return runs ? runs * length : size; }

  int64_t start(int64_t run) const {
    const uint64_t stretch = uint64_t(size / runs), room = stretch - uint64_t(length) + 1;
    const uint64_t golden = (uint64_t(run) * 0x9e3779b97f4a7c15ull) >> 32;
    return int64_t(uint64_t(run) * stretch + ((golden * room) >> 32));
  }
};

void count_elements(int32_t kind, const void* data, int64_t start, int64_t size, Piece& piece) {
  switch (kind) {
    case kFloat32: return count_run(static_cast<const uint32_t*>(data) + start, size, piece);
    case kBFloat16: return count_run(static_cast<const BFloat16*>(data) + start, size, piece);
    case kFloat16: return count_run(static_cast<const Float16*>(data) + start, size, piece);
    default: return count_run(static_cast<const uint64_t*>(data) + start, size, piece);
  }
}

void add(int64_t* row, int64_t value) {
  if (value == 0) return;
#pragma omp atomic
  *row += value;
}

Sums finish(const Piece& piece, int64_t* row) {
  int64_t counts[256];
  for (int e = 0; e < 256; ++e) {
    counts[e] = 0;
    for (int table = 0; table < kTables; ++table) counts[e] += piece.tables[table][e];
  }
  counts[0] -= piece.zeros;
  counts[255] -= piece.infinities + piece.nans;
  for (int e = 0; e < 256; ++e) add(row + e, counts[e]);
  add(row + kCount, piece.count);
  add(row + kZeros, piece.zeros);
  add(row + kNegatives, piece.negatives);
  add(row + kInfinities, piece.infinities);
  add(row + kNans, piece.nans);
  Sums sums = {0, 0, piece.peak};
  for (int lane = 0; lane < kLanes; ++lane) {
    sums.total += piece.totals[lane];
    sums.squares += piece.squares[lane];
  }
  return sums;
}

void add_double(int64_t* place, double value) {
  double held;
  std::memcpy(&held, place, sizeof held);
  held += value;
  std::memcpy(place, &held, sizeof held);
}

void raise_double(int64_t* place, double value) {
  double held;
  std::memcpy(&held, place, sizeof held);
  held = std::fmax(held, value);
  std::memcpy(place, &held, sizeof held);
}

// Adds to the row of each tensor what `count(tensor, start, size, piece)` counts of the elements that are read of it.
template <typename Count>
void add_pieces(const std::vector<Reading>& readings, int64_t* const* rows, int32_t threads, const Count& count) {
  int64_t elements = 0;
  std::vector<int64_t> owners, firsts;  // of each piece: its tensor, and its first element or run
  for (size_t i = 0; i < readings.size(); ++i) {
    elements += readings[i].elements();
    for (int64_t first = 0; first < readings[i].units(); first += readings[i].step()) {
      owners.push_back(int64_t(i));
      firsts.push_back(first);
    }
  }
  const int64_t pieces = int64_t(owners.size());
  std::vector<Sums> sums(pieces);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (elements >= kParallel)
  for (int64_t k = 0; k < pieces; ++k) {
    const Reading& r = readings[owners[k]];
    const int64_t end = firsts[k] + r.step() < r.units() ? firsts[k] + r.step() : r.units();
    Piece piece;
    if (r.runs == 0)
      count(owners[k], firsts[k], end - firsts[k], piece);
    else
      for (int64_t run = firsts[k]; run < end; ++run) count(owners[k], r.start(run), r.length, piece);
    sums[k] = finish(piece, rows[owners[k]]);
  }
  for (int64_t k = 0; k < pieces; ++k) {
    int64_t* row = rows[owners[k]];
    add_double(row + kTotal, sums[k].total);
    add_double(row + kSquares, sums[k].squares);
    raise_double(row + kAmax, sums[k].peak);
  }
}

// ---- updates ----------------------------------------------------------------------------------------------------

// What a change, in fp32, and a decay, in double, add to full weights, in units of the last place of the weights as
// they are stored: the bits of doubles. The unit of |w| is 2^(its exponent - fraction), the exponent at least that of
// the smallest normal value; the product with its inverse is exact. As in_last_places in update_stats.py.
template <bool kDecays>
__attribute__((noinline)) void in_last_places(int64_t n, uint64_t fraction, uint32_t smallest, double decay,
                                              const float* __restrict stored, const float* __restrict weight,
                                              const float* __restrict change, uint64_t* __restrict found) {
  for (int64_t k = 0; k < n; ++k) {
    const uint32_t field = bits(stored[k]) >> 23 & 255;
    const uint64_t exponent = field == 255 ? 2047 : (field > smallest ? field : smallest) + (1023 - 127);
    const uint64_t inverse = (2046 + fraction - exponent) << 52;
    double unit, added = change[k];
    std::memcpy(&unit, &inverse, sizeof unit);
    if (kDecays) added = added - double(weight[k]) * decay;
    added = added * unit;
    std::memcpy(found + k, &added, sizeof added);
  }
}

// Counts what `optimizer` makes of zeros, in which an update of some weights is not rounded to what they can hold.
template <typename Optimizer>
void count_updates(const Tensors& b, const Common& c, int64_t t, int64_t start, int64_t size,
                   const Optimizer& optimizer, Piece& piece) {
  const uint64_t fraction = b.format == kFloat ? 23 : b.format == kBfloat ? 7 : 10;
  const uint32_t smallest = b.format == kHalf ? 127 - 14 : 1;
  const float l2 = l2_of(c);
  const double decay = c.decoupled ? c.lr * c.weight_decay : 0;
  alignas(64) float opened[kBlock], kept[kBlock], room[kBlock], change[kBlock], states[kStates][kBlock];
  alignas(64) uint64_t found[kBlock];
  Run runs[kBlock];
  for (int64_t at = start; at < start + size; at += kBlock) {
    const int64_t n = at + kBlock < start + size ? kBlock : start + size - at;
    const float *weight = open_weights(b, t, at, n, opened), *stored = weight;
    if (b.layout == kCopy || b.layout == kSplit) load(b.format, b.weights[t], at, kept, n), stored = kept;
    std::memset(change, 0, sizeof change);
    const int64_t count = b.places ? runs_of(b.places[t], at, n, runs) : 0;
    Block block{t, n, change, open_gradient(b, c, t, at, n, l2, weight, room), {}};
    for (int k = 0; k < kStates; ++k) {
      if (!b.states[k]) continue;
      block.states[k] = states[k];
      const float* held = open_state(b, t, k, at, n, runs, count, states[k]);
      if (held != states[k]) std::memcpy(states[k], held, n * sizeof(float));
    }
    update(optimizer, block);
    if (decay != 0)
      in_last_places<true>(n, fraction, smallest, decay, stored, weight, change, found);
    else
      in_last_places<false>(n, fraction, smallest, decay, stored, weight, change, found);
    for (int64_t k = n; k % kLanes; ++k) found[k] = 0;
    count_wide_block(found, n, piece);
  }
}

// A tensor without a row is passed over; of a step that is skipped every element is a zero.
template <typename Optimizer>
void add_updates(const Tensors& b, const Common& c, const Optimizer& optimizer, int64_t* const* rows, int64_t sample,
                 int64_t length) {
  std::vector<Reading> readings;
  for (int64_t t = 0; t < b.tensors; ++t) {
    readings.push_back({rows[t] ? b.numels[t] : 0, sample, length});
    if (!*c.found || !rows[t]) continue;
    rows[t][kCount] += readings[t].elements();
    rows[t][kZeros] += readings[t].elements();
  }
  if (*c.found) return;
  add_pieces(readings, rows, b.threads, [&](int64_t t, int64_t start, int64_t size, Piece& piece) {
    count_updates(b, c, t, start, size, optimizer, piece);
  });
}

}  // namespace

extern "C" {

// Adds the statistics of tensor i to the row at rows[i]. `sample` 0 reads everything; else a tensor of more elements is
// read in runs of `length` elements, `sample` elements together.
void halfstep_add_stats(int64_t tensors, const void* const* data, const int64_t* sizes, const int32_t* kinds,
                        int64_t* const* rows, int64_t sample, int64_t length, int32_t threads) {
  std::vector<Reading> readings;
  for (int64_t i = 0; i < tensors; ++i) readings.push_back({sizes[i], sample, length});
  add_pieces(readings, rows, threads, [&](int64_t i, int64_t start, int64_t size, Piece& piece) {
    count_elements(kinds[i], data[i], start, size, piece);
  });
}

// Adds the statistics of what the next update adds to each weight. For the optimizer see halfstep_step, for the rest
// halfstep_add_stats.
int32_t halfstep_add_updates(const char* name, const Tensors* tensors, const Common* common, const double* numbers,
                             int64_t count, int64_t* const* rows, int64_t sample, int64_t length) {
  return find_optimizer(name, count, *tensors, [&](auto* optimizer) {
    using Optimizer = std::remove_pointer_t<decltype(optimizer)>;
    add_updates(*tensors, *common, Optimizer(*tensors, *common, numbers, 1), rows, sample, length);
  });
}

}  // extern "C"
