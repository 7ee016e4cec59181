// Samples tokens from logits and computes log-probabilities. Each row is computed by one thread,
// from its logits and parameters alone; `quire.kernels.reference.sampling` defines the results.
//
// A row's token is found without sorting the vocabulary: the greatest logits of its blocks bound
// those of its best tokens from below, so that few tokens have to be examined.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "elements.h"
#include "quire.h"

namespace quire {
namespace {

constexpr int64_t kBlock = 256;
constexpr int64_t kSorted = 256;
constexpr int64_t kNearest = 64;  // blocks whose greatest logits bound the candidates of top_p
constexpr float kNone = -INFINITY;

#if defined(QUIRE_AVX512)
inline Vec whole_of(Vec x) { return _mm512_roundscale_ps(x, 0x09); }
inline bool any_nan(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0; }
inline uint32_t at_least(Vec x, Vec least) { return _mm512_cmp_ps_mask(x, least, _CMP_GE_OQ); }
inline Vec chosen_lanes(uint32_t lanes, Vec x) {
  return _mm512_maskz_mov_ps(static_cast<__mmask16>(lanes), x);
}
inline Vec least_of(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline void store_whole(int32_t* at, Vec x) { _mm512_storeu_si512(at, _mm512_cvttps_epi32(x)); }
#else
inline Vec whole_of(const Vec& x) {
  const Vec small = each([&](int i) -> FloatPart {
    const FloatPart limit = splat_part(8388608);
    return x.part[i] < limit ? x.part[i] : limit;
  });
  return each([&](int i) -> FloatPart {
    const FloatPart whole = __builtin_convertvector(floor_part(small.part[i]), FloatPart);
    return x.part[i] < splat_part(8388608) ? whole : x.part[i];  // greater floats are integers
  });
}
inline uint32_t lanes_of(const IntPart (&is)[kParts]) {
  uint32_t lanes = 0;
  for (int i = 0; i < kLanes; ++i)
    lanes |= static_cast<uint32_t>(is[i / kPart][i % kPart] & 1) << i;
  return lanes;
}
inline bool any_nan(const Vec& a, const Vec& b) {
  IntPart is[kParts];
  for (int i = 0; i < kParts; ++i) is[i] = (a.part[i] != a.part[i]) | (b.part[i] != b.part[i]);
  return lanes_of(is) != 0;
}
inline uint32_t at_least(const Vec& x, const Vec& least) {
  IntPart is[kParts];
  for (int i = 0; i < kParts; ++i) is[i] = x.part[i] >= least.part[i];
  return lanes_of(is);
}
inline Vec least_of(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.part[i] < b.part[i] ? a.part[i] : b.part[i]; });
}
inline void store_whole(int32_t* at, const Vec& x) {
  for (int i = 0; i < kParts; ++i) {
    const IntPart whole = __builtin_convertvector(x.part[i], IntPart);
    memcpy(at + i * kPart, &whole, sizeof whole);
  }
}
inline Vec chosen_lanes(uint32_t lanes, const Vec& x) {
  float values[kLanes];
  store(values, x);
  for (int i = 0; i < kLanes; ++i) values[i] = lanes >> i & 1 ? values[i] : 0;
  return load(values);
}
#endif

// Loads up to 16 logits, and `other` in the lanes past the last.
inline Vec logits_at(const float* x, int64_t left, float other = kNone) {
  if (left >= kLanes) return load(x);
  return first_lanes(read(x, left), static_cast<int>(left), splat(other));
}

// 2^(32 + (x - greatest) * factor). Each operation is rounded, as in the reference, whose
// coefficients are multiplied by 2^32 here.
inline Vec power_of(Vec x, Vec greatest, Vec factor) {
  const Vec exponent = max(mul(sub(x, greatest), factor), splat(-40));
  const Vec nearest = add(exponent, splat(0.5f));
  const Vec f = sub(exponent, whole_of(nearest));
  Vec p = splat(0x1p32f * 1.32647261e-03f);
  for (float coefficient :
       {9.67151299e-03f, 5.55073358e-02f, 2.40222424e-01f, 6.93147004e-01f, 1.0f})
    p = add(mul(p, f), splat(0x1p32f * coefficient));
  return scale_by_floor(p, nearest);
}

// Sums each of the 16 lanes of the added vectors in double.
struct Sums {
#if defined(QUIRE_AVX512)
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();

  void take(Vec x) {
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
  }
  void take(uint32_t lanes, Vec x) {
    const auto low_lanes = static_cast<__mmask8>(lanes),
               high_lanes = static_cast<__mmask8>(lanes >> 8);
    low = _mm512_mask_add_pd(low, low_lanes, low, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    high =
        _mm512_mask_add_pd(high, high_lanes, high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
  }
  void lanes(double* out) const {
    _mm512_storeu_pd(out, low);
    _mm512_storeu_pd(out + 8, high);
  }
#else
  double sums[kLanes] = {};

  void take(const Vec& x) {
    float values[kLanes];
    store(values, x);
    for (int i = 0; i < kLanes; ++i) sums[i] += values[i];
  }
  void take(uint32_t lanes, const Vec& x) { take(chosen_lanes(lanes, x)); }
  void lanes(double* out) const { std::copy(sums, sums + kLanes, out); }
#endif

  double total() const {
    double lane[kLanes];
    lanes(lane);
    for (int width = kLanes / 2; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
  }
};

struct Token {
  float logit;
  int64_t id;

  bool operator<(const Token& other) const {  // the better token is the lesser one
    return logit > other.logit || (logit == other.logit && id < other.id);
  }
};

// A histogram of amounts by ranges of logits. Range 0 has the logits below `low`.
struct Ranges {
  static constexpr int kNumber = 512, kCopies = 4;  // copies, so that additions are independent
  float low, factor;
  double amounts[kCopies][kNumber + 1] = {};

  Ranges(float low, float high) : low(low), factor(0) {
    if (high > low) factor = std::min(kNumber / (high - low), std::numeric_limits<float>::max());
  }

  // The range of each logit, plus a fraction.
  Vec place_of(Vec x) const {
    const Vec place = add(mul(sub(x, splat(low)), splat(factor)), splat(1));
    return least_of(max(place, zero()), splat(kNumber));
  }
  int32_t of(float logit) const {
    return static_cast<int32_t>(
        std::min(std::max((logit - low) * factor + 1, 0.0f), static_cast<float>(kNumber)));
  }

  // The range in which the running sum of amounts from the top reaches `wanted`, or 0 if none does.
  // Adds the amounts above that range to `above`.
  int32_t last(double wanted, double* above) const {
    for (int32_t range = kNumber; range > 0; --range) {
      double amount = 0;
      for (int copy = 0; copy < kCopies; ++copy) amount += amounts[copy][range];
      if (*above + amount >= wanted) return range;
      *above += amount;
    }
    return 0;
  }
};

// A thread's workspace for one row.
struct Workspace {
  std::vector<float> greatest;  // of each block
  std::vector<float> ordered;
  std::vector<Token> tokens;
  std::vector<float> weights;  // of the tokens
  std::vector<float> row_weights;
  std::vector<double> sums;
};

struct Row {
  const float* x;
  int64_t size;
  float greatest = kNone, lowest = INFINITY;
  Workspace& work;

  Row(const float* x, int64_t size, Workspace& work) : x(x), size(size), work(work) {}

  int64_t num_blocks() const { return (size + kBlock - 1) / kBlock; }
  int64_t end_of(int64_t block) const { return std::min(size, (block + 1) * kBlock); }

  // Finds the greatest logit of each block and of the row. Returns whether the row's is finite and
  // none is NaN. Calls `see(begin, end)` for each block while it is in the nearest cache.
  template <class See>
  bool scan(See see) {
    work.greatest.resize(num_blocks());
    bool broken = false;
    Vec least = splat(INFINITY);
    for (int64_t block = 0; block < num_blocks(); ++block) {
      const int64_t end = end_of(block);
      Vec most = splat(kNone), others = splat(kNone);
      int64_t i = block * kBlock;
      for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
        const Vec a = load(x + i), b = load(x + i + kLanes);
        broken |= any_nan(a, b);
        most = max(a, most), others = max(b, others);
        least = least_of(least_of(a, b), least);
      }
      for (; i < end; i += kLanes) {
        const Vec a = logits_at(x + i, size - i);
        broken |= any_nan(a, a);
        most = max(a, most);
        least = least_of(logits_at(x + i, size - i, INFINITY), least);
      }
      work.greatest[block] = max_of_lanes(max(most, others));
      see(block * kBlock, end);
      greatest = std::max(greatest, work.greatest[block]);
    }
    lowest = -max_of_lanes(sub(zero(), least));
    return !broken && std::isfinite(greatest);
  }

  // A lower bound of the logits of the best `count` tokens.
  float bound_of_best(int64_t count) const {
    if (count > num_blocks()) return kNone;
    std::vector<float>& ordered = work.ordered;
    ordered = work.greatest;
    std::nth_element(ordered.begin(), ordered.begin() + (count - 1), ordered.end(),
                     std::greater<float>());
    return ordered[count - 1];
  }

  // Collects the tokens whose logits are at least `least`, in the order of their ids.
  void collect(float least) const {
    work.tokens.clear();
    const Vec least_v = splat(least);
    for (int64_t block = 0; block < num_blocks(); ++block) {
      if (work.greatest[block] < least) continue;
      for (int64_t i = block * kBlock; i < end_of(block); i += kLanes) {
        uint32_t lanes = at_least(logits_at(x + i, size - i), least_v);
        if (size - i < kLanes) lanes &= (1u << (size - i)) - 1;
        for (; lanes; lanes &= lanes - 1) {
          const int lane = __builtin_ctz(lanes);
          work.tokens.push_back({x[i + lane], i + lane});
        }
      }
    }
  }

  // Collects the tokens of one range.
  void collect(const Ranges& ranges, int32_t range) const {
    work.tokens.clear();
    const Vec first = splat(range), next = splat(range + 1);
    for (int64_t block = 0; block < num_blocks(); ++block) {
      if (work.greatest[block] < ranges.low) continue;
      for (int64_t i = block * kBlock; i < end_of(block); i += kLanes) {
        const Vec place = ranges.place_of(logits_at(x + i, size - i));
        uint32_t lanes = at_least(place, first) & ~at_least(place, next);
        for (; lanes; lanes &= lanes - 1) {
          const int lane = __builtin_ctz(lanes);
          work.tokens.push_back({x[i + lane], i + lane});
        }
      }
    }
  }

  // Reduces the collected tokens to the best `count`, best first.
  void keep_best(int64_t count) const {
    std::vector<Token>& tokens = work.tokens;
    count = std::min<int64_t>(count, tokens.size());
    if (count < static_cast<int64_t>(tokens.size()))
      std::nth_element(tokens.begin(), tokens.begin() + count, tokens.end());
    tokens.resize(count);
    std::sort(tokens.begin(), tokens.end());
  }
};

// The tokens that may be drawn: those with a logit above `least`, or equal to it and an id up to
// `last`.
struct Kept {
  float least = kNone;
  int64_t last = INT64_MAX;
};

struct Draw {
  Row& row;
  float scale;  // a logit that is lower by this has half the weight
  Vec greatest, factor;
  Kept kept;
  bool is_weighed = false;  // the workspace has the weights of all tokens

  Draw(Row& row, float temperature)
      : row(row),
        scale(temperature * 0.69314718055994530942f),
        greatest(splat(row.greatest)),
        factor(splat(std::min(1 / scale, std::numeric_limits<float>::max()))) {}

  // Stores the weights of all tokens in the workspace. Returns the sum over the kept tokens.
  double weigh() {
    row.work.row_weights.resize(row.num_blocks() * kBlock);
    Sums weights;
    for (int64_t i = 0; i < row.size; i += kLanes) {
      const Vec weight = whole_of(power_of(logits_at(row.x + i, row.size - i), greatest, factor));
      store(&row.work.row_weights[i], weight);
      weights.take(weight);
    }
    is_weighed = true;
    return kept.least == kNone ? weights.total() : sum_blocks();
  }

  bool keeps(const Token& token) const {
    return token.logit > kept.least || (token.logit == kept.least && token.id <= kept.last);
  }

  // The weights of 16 tokens; 0 for those that are not kept.
  Vec weights_at(int64_t i) const {
    const Vec x = logits_at(row.x + i, row.size - i);
    const Vec weight =
        is_weighed ? load(&row.work.row_weights[i]) : whole_of(power_of(x, greatest, factor));
    if (kept.least == kNone) return weight;
    uint32_t lanes = at_least(x, splat(kept.least));
    if (kept.last < i + kLanes) {
      const uint32_t greater = at_least(x, splat(std::nextafter(kept.least, INFINITY)));
      const int64_t num_before = std::max<int64_t>(kept.last + 1 - i, 0);
      lanes &= greater | ((1u << num_before) - 1);
    }
    return chosen_lanes(lanes, weight);
  }

  // Sums the weights of the kept tokens by block, and returns their total.
  double sum_blocks() const {
    std::vector<double>& sums = row.work.sums;
    sums.resize(row.num_blocks());
    double total = 0;
    for (int64_t block = 0; block < row.num_blocks(); ++block) {
      sums[block] = 0;
      if (row.work.greatest[block] < kept.least) continue;
      Sums weights;
      for (int64_t i = block * kBlock; i < row.end_of(block); i += kLanes)
        weights.take(weights_at(i));
      sums[block] = weights.total();
      total += sums[block];
    }
    return total;
  }

  // The first token, by id, at which the running sum of weights exceeds `uniform` of the total.
  int64_t pick(double uniform) const {
    const double total = sum_blocks();
    const double target = std::min(std::floor(uniform * total), total - 1);
    double before = 0;
    int64_t block = 0;
    while (before + row.work.sums[block] <= target) before += row.work.sums[block++];
    for (int64_t i = block * kBlock;; i += kLanes) {
      float weights[kLanes];
      store(weights, weights_at(i));
      for (int lane = 0; lane < kLanes; ++lane)
        if ((before += weights[lane]) > target) return i + lane;
    }
  }

  // As `pick`, among the collected tokens only, all of which are kept.
  int64_t pick_collected(double uniform) const {
    std::vector<Token>& tokens = row.work.tokens;
    std::sort(tokens.begin(), tokens.end(),
              [](const Token& a, const Token& b) { return a.id < b.id; });
    weigh_collected();
    const std::vector<float>& weights = row.work.weights;
    double total = 0, before = 0;
    for (size_t i = 0; i < tokens.size(); ++i) total += weights[i];
    const double target = std::min(std::floor(uniform * total), total - 1);
    size_t i = 0;
    while ((before += weights[i]) <= target) ++i;
    return tokens[i].id;
  }

  void weigh_collected() const {
    const std::vector<Token>& tokens = row.work.tokens;
    row.work.weights.resize((tokens.size() + kLanes - 1) / kLanes * kLanes);
    for (size_t first = 0; first < tokens.size(); first += kLanes) {
      float values[kLanes];
      for (size_t i = 0; i < kLanes; ++i)
        values[i] = first + i < tokens.size() ? tokens[first + i].logit : kNone;
      store(&row.work.weights[first], whole_of(power_of(load(values), greatest, factor)));
    }
  }

  // Reduces the collected and weighed tokens, best first, to the fewest best whose weights add up
  // to `wanted`. Returns false if all together do not reach it; then all are left.
  bool keep_mass(double wanted) const {
    double before = 0;
    for (size_t i = 0; i < row.work.tokens.size(); ++i) {
      if (before >= wanted) {
        row.work.tokens.resize(i);
        return true;
      }
      before += row.work.weights[i];
    }
    return before >= wanted;
  }

  // Adds the weights of the kept tokens, or their number, to the ranges of their logits.
  void add_all(Ranges* ranges, bool by_weight) const {
    for (int64_t block = 0; block < row.num_blocks(); ++block) {
      if (row.work.greatest[block] < ranges->low) continue;
      for (int64_t i = block * kBlock; i < row.end_of(block); i += kLanes) {
        int32_t places[kLanes];
        float amounts[kLanes];
        store_whole(places, ranges->place_of(logits_at(row.x + i, row.size - i)));
        store(amounts, by_weight ? weights_at(i) : splat(1));
        for (int lane = 0; lane < kLanes; ++lane)
          ranges->amounts[lane % Ranges::kCopies][places[lane]] += amounts[lane];
      }
    }
  }

  // Reduces the kept tokens to the fewest best whose weights, or number, add up to `wanted`.
  // Amounts are counted by ranges of logits, and the last kept token's range is divided again.
  void keep_fewest(double wanted, bool by_weight) {
    std::vector<Token>& tokens = row.work.tokens;
    const std::vector<float>& weights = row.work.row_weights;
    const auto amount_of = [&](int64_t id) { return by_weight ? weights[id] : 1.0f; };
    // Tokens below `low` have no weight.
    const float low = std::max({kept.least, row.lowest, row.greatest - 34 * scale});
    double above = 0;
    {
      Ranges ranges(low, row.greatest);
      add_all(&ranges, by_weight);
      const int32_t last = ranges.last(wanted, &above);
      if (last == 0) return;  // All tokens together do not reach `wanted`.
      row.collect(ranges, last);
    }
    const auto leave = [&](const auto& wants) {
      tokens.erase(std::remove_if(tokens.begin(), tokens.end(),
                                  [&](const Token& token) { return !wants(token); }),
                   tokens.end());
    };
    leave([&](const Token& token) { return keeps(token); });
    for (size_t before = 0; tokens.size() > kSorted && tokens.size() != before;) {
      before = tokens.size();
      const auto [least, most] =
          std::minmax_element(tokens.begin(), tokens.end(),
                              [](const Token& a, const Token& b) { return a.logit < b.logit; });
      Ranges ranges(least->logit, most->logit);
      for (const Token& token : tokens)
        ranges.amounts[0][ranges.of(token.logit)] += amount_of(token.id);
      const int32_t last = ranges.last(wanted, &above);
      leave([&](const Token& token) { return ranges.of(token.logit) == last; });
    }
    std::sort(tokens.begin(), tokens.end());
    for (const Token& token : tokens) {
      above += amount_of(token.id);
      if (above < wanted) continue;
      kept = {token.logit, token.id};
      return;
    }
  }
};

int64_t sample_row(const SampleArgs& args, int64_t index, Workspace& work) {
  Row row(args.logits + args.rows[index] * args.stride, args.num_columns, work);
  if (!row.scan([](int64_t, int64_t) {})) return -1;
  const float temperature = args.temperature[index];
  const double uniform = args.uniform[index], top_p = args.top_p[index];
  const int64_t top_k = args.top_k[index];
  Draw draw(row, temperature);
  if (args.log_min_p[index] > -INFINITY) {
    const double floor = row.greatest + temperature * args.log_min_p[index];
    draw.kept.least = static_cast<float>(floor);
    if (draw.kept.least < floor) draw.kept.least = std::nextafter(draw.kept.least, INFINITY);
  }
  const bool limits_number = top_k > 0 && top_k < row.size;
  if (!limits_number && !(top_p < 1)) return draw.pick(uniform);
  const int64_t count = limits_number ? top_k : kNearest;
  double total = limits_number ? 0 : draw.weigh();
  if (count <= row.num_blocks()) {
    row.collect(std::max(draw.kept.least, row.bound_of_best(count)));
    row.keep_best(limits_number ? count : work.tokens.size());
    bool is_settled = true;
    if (top_p < 1) {
      draw.weigh_collected();
      if (limits_number)
        for (size_t i = 0; i < work.tokens.size(); ++i) total += work.weights[i];
      is_settled = draw.keep_mass(top_p * total) || limits_number;
    }
    if (is_settled) return draw.pick_collected(uniform);
  }
  if (limits_number) {
    draw.keep_fewest(static_cast<double>(top_k), false);
    total = draw.weigh();
  }
  if (top_p < 1) draw.keep_fewest(top_p * total, true);
  return draw.pick(uniform);
}

typedef float Floats8 __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));

constexpr double kLog2E = 1.4426950408889634;
// Coefficients of a polynomial for 2^x from -1/2 to 1/2, highest power first; relative error 2e-14.
constexpr double kExp2[] = {0x1.b3de0fbddfd08p-24, 0x1.63e6985790645p-20,
                            0x1.ffce2fe3b467bp-17, 0x1.430897f190e55p-13,
                            0x1.5d87fd937fe30p-10, 0x1.3b2ab724130edp-7,
                            0x1.c6b08d70c87f7p-5,  0x1.ebfbdff81bdfcp-3,
                            0x1.62e42fefa37d2p-1,  1.0};

// e^(x - base), at least e^-693.
inline Doubles exp_of(Floats8 x, double base) {
#if defined(QUIRE_AVX512)
  __m512d power = _mm512_sub_pd(_mm512_cvtps_pd(reinterpret_cast<__m256>(x)), _mm512_set1_pd(base));
  power = _mm512_max_pd(_mm512_mul_pd(power, _mm512_set1_pd(kLog2E)), _mm512_set1_pd(-1000));
  const __m512d whole = _mm512_roundscale_pd(power, 0x08), f = _mm512_sub_pd(power, whole);
  __m512d p = _mm512_set1_pd(kExp2[0]);
#pragma GCC unroll 9
  for (int i = 1; i < 10; ++i) p = _mm512_fmadd_pd(p, f, _mm512_set1_pd(kExp2[i]));
  return reinterpret_cast<Doubles>(_mm512_scalef_pd(p, whole));
#else
  Doubles power = (__builtin_convertvector(x, Doubles) - base) * kLog2E;
  power = power < -1000.0 ? Doubles{} - 1000.0 : power;
  const Doubles shifted = power + 0x1.8p52;  // rounds to a whole number
  const Doubles f = power - (shifted - 0x1.8p52);
  Doubles p = Doubles{} + kExp2[0];
  for (int i = 1; i < 10; ++i) p = p * f + kExp2[i];
  return reinterpret_cast<Doubles>(reinterpret_cast<Longs>(p) +
                                   (reinterpret_cast<Longs>(shifted) << 52));
#endif
}

// Adds e^(x - base) of some columns to `sums`.
inline void add_exponentials(const Row& row, int64_t begin, int64_t end, double base,
                             Doubles* sums) {
  int64_t i = begin;
  for (; i + 8 <= end; i += 8) {
    Floats8 x;
    memcpy(&x, row.x + i, sizeof x);
    *sums += exp_of(x, base);
  }
  if (i == end) return;
  Floats8 x = Floats8{} - INFINITY;
  memcpy(&x, row.x + i, (end - i) * sizeof(float));
  *sums += exp_of(x, base);
}

// Scans the row. Returns the logarithm of the sum of its exponentials, or NaN if `scan` fails.
double log_total_of(Row& row, float own) {
  Doubles sums = {};
  double base = own;
  if (!row.scan(
          [&](int64_t begin, int64_t end) { add_exponentials(row, begin, end, base, &sums); }))
    return NAN;
  if (!(row.greatest - base < 600)) {  // `own` is too far below the greatest logit to be the base.
    sums = Doubles{}, base = row.greatest;
    add_exponentials(row, 0, row.size, base, &sums);
  }
  for (int width = 4; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  return base + std::log(sums[0]);
}

void score_row(const ScoreArgs& args, int64_t index, Workspace& work) {
  Row row(args.logits + args.rows[index] * args.stride, args.num_columns, work);
  const float own = row.x[args.token_ids[index]];
  const double log_total = log_total_of(row, own);
  args.log_totals[index] = log_total;
  args.logprobs[index] = own - log_total;
  int64_t num_greater = 0;
  const Vec own_v = splat(std::nextafter(own, INFINITY));
  for (int64_t block = 0; block < row.num_blocks(); ++block) {
    if (work.greatest[block] <= own) continue;
    for (int64_t i = block * kBlock; i < row.end_of(block); i += kLanes)
      num_greater += __builtin_popcount(at_least(logits_at(row.x + i, row.size - i), own_v));
  }
  args.ranks[index] = 1 + num_greater;
  const int64_t num_top = std::min(args.num_top[index], row.size);
  if (num_top <= 0) return;
  row.collect(row.bound_of_best(num_top));
  row.keep_best(num_top);
  for (size_t i = 0; i < work.tokens.size(); ++i) {
    args.top_ids[index * args.max_top + i] = work.tokens[i].id;
    args.top_logprobs[index * args.max_top + i] = work.tokens[i].logit - log_total;
  }
}

void mask_row(float* x, int64_t size, const uint32_t* words, int64_t num_words) {
  for (int64_t begin = 0; begin < size; begin += 32) {
    const uint32_t word = begin / 32 < num_words ? words[begin / 32] : 0;
    const int64_t end = std::min(size, begin + 32);
    if (word == 0)
      std::fill(x + begin, x + end, kNone);
    else if (word != UINT32_MAX)
      for (int64_t i = begin; i < end; ++i) x[i] = word >> (i - begin) & 1 ? x[i] : kNone;
  }
}

}  // namespace
}  // namespace quire

using namespace quire;

void quire_sample(const SampleArgs* args, int32_t num_threads) {
  parallel(num_threads, [=](Team team) {
    Workspace work;
    team.share(args->num_rows,
               [&](int64_t index) { args->out[index] = sample_row(*args, index, work); });
  });
}

void quire_mask(const MaskArgs* args, int32_t num_threads) {
  parallel(num_threads, [=](Team team) {
    team.share(args->num_rows, [&](int64_t index) {
      mask_row(args->logits + args->rows[index] * args->stride, args->num_columns,
               args->masks + index * args->num_words, args->num_words);
    });
  });
}

void quire_score(const ScoreArgs* args, int32_t num_threads) {
  parallel(num_threads, [=](Team team) {
    Workspace work;
    team.share(args->num_rows, [&](int64_t index) { score_row(*args, index, work); });
  });
}
