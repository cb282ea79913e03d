// One read of a tensor: a histogram of binary exponents, counts, sums and the largest magnitude.
//
// A row of results is 264 int64: 256 exponent counts, count, zeros, negatives, infinities, nans, and the bits of three
// doubles: sum, sum of squares, largest magnitude. Rows are added to. Sums are taken in pieces of fixed size, in a
// fixed order, so that they do not depend on the number of threads.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kPiece = 1 << 15;  // elements that one thread takes at a time
constexpr int64_t kParallel = 1 << 18;  // elements, some 100 us: less is not worth waking threads for
constexpr int64_t kBlock = 512;      // elements that stay in registers and the first cache
constexpr int kLanes = 16;
constexpr int kTables = 4;  // neighbours often have one exponent: their increments must not wait for each other
constexpr uint32_t kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u;
enum Column { kCount = 256, kZeros, kNegatives, kInfinities, kNans, kTotal, kSquares, kPeak, kWidth };
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

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The bits of the fp32 value that equals an element. Subnormals of fp16 go through an integer, which a processor that
// flushes subnormal floats to zero leaves alone.
inline uint32_t widened(uint32_t bits) { return bits; }

struct BFloat16 {
  uint16_t bits;
};
inline uint32_t widened(BFloat16 x) { return uint32_t(x.bits) << 16; }

struct Float16 {
  uint16_t bits;
};
inline uint32_t widened(Float16 x) {
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t small = as_bits(float(int32_t(magnitude)) * 0x1p-24f);
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = (magnitude << 13) | kInfinity;
  return sign | (magnitude < 0x0400u ? small : magnitude >= 0x7c00u ? special : normal);
}

// Whole vectors, as compilers do less well with loops over lanes; cut up where the processor has shorter ones.
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
  piece.peak = std::fmax(piece.peak, double(as_float(peak)));
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
  const void* data;
  int64_t size, runs, length;
  int kind;

  int64_t start(int64_t run) const {
    const uint64_t stretch = uint64_t(size / runs), room = stretch - uint64_t(length) + 1;
    const uint64_t golden = (uint64_t(run) * 0x9e3779b97f4a7c15ull) >> 32;
    return int64_t(uint64_t(run) * stretch + ((golden * room) >> 32));
  }
};

void count_elements(const Reading& r, int64_t start, int64_t size, Piece& piece) {
  switch (r.kind) {
    case kFloat32: return count_run(static_cast<const uint32_t*>(r.data) + start, size, piece);
    case kBFloat16: return count_run(static_cast<const BFloat16*>(r.data) + start, size, piece);
    case kFloat16: return count_run(static_cast<const Float16*>(r.data) + start, size, piece);
    default: return count_run(static_cast<const uint64_t*>(r.data) + start, size, piece);
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

}  // namespace

// Adds the statistics of tensor i to the row at rows[i]. `sample` 0 reads everything; else a tensor of more elements is
// read in runs of `length` elements, `sample` elements together.
extern "C" void halfstep_add_stats(int64_t tensors, const void* const* data, const int64_t* sizes, const int32_t* kinds,
                                   int64_t* const* rows, int64_t sample, int64_t length, int32_t threads) {
  std::vector<Reading> readings;
  int64_t elements = 0;
  std::vector<int64_t> owners, firsts;  // of each piece: its tensor, and its first element or run
  for (int64_t i = 0; i < tensors; ++i) {
    const bool whole = sample == 0 || sizes[i] <= sample;
    readings.push_back({data[i], sizes[i], whole ? 0 : sample / length, length, kinds[i]});
    const int64_t units = whole ? sizes[i] : readings.back().runs, step = whole ? kPiece : kPiece / length;
    elements += whole ? sizes[i] : units * length;
    for (int64_t first = 0; first < units; first += step) {
      owners.push_back(i);
      firsts.push_back(first);
    }
  }
  const int64_t pieces = int64_t(owners.size());
  std::vector<Sums> sums(pieces);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (elements >= kParallel)
  for (int64_t k = 0; k < pieces; ++k) {
    const Reading& r = readings[owners[k]];
    Piece piece;
    if (r.runs == 0) {
      const int64_t left = r.size - firsts[k];
      count_elements(r, firsts[k], left < kPiece ? left : kPiece, piece);
    } else {
      const int64_t last = firsts[k] + kPiece / length;
      for (int64_t run = firsts[k]; run < (last < r.runs ? last : r.runs); ++run)
        count_elements(r, r.start(run), length, piece);
    }
    sums[k] = finish(piece, rows[owners[k]]);
  }
  for (int64_t k = 0; k < pieces; ++k) {
    int64_t* row = rows[owners[k]];
    add_double(row + kTotal, sums[k].total);
    add_double(row + kSquares, sums[k].squares);
    raise_double(row + kPeak, sums[k].peak);
  }
}
