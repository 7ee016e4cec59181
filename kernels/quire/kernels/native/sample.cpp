// From logits to tokens and their log-probabilities. Each row is computed by one thread, from its
// logits and parameters alone; `quire.kernels.reference_sampling` says what must come out.
//
// A row's token is found without sorting the vocabulary: the greatest logits of its blocks bound
// those of its best tokens from below, so that few tokens need to be looked at.
#include <algorithm>
#include <cmath>
#include <vector>

#include "elements.h"
#include "quire.h"

namespace quire {
namespace {

constexpr int64_t kBlock = 256;
constexpr int kBounds = 8, kRounds = 2;
constexpr int64_t kSorted = 256;
constexpr int64_t kNearest = 64;  // blocks whose greatest logit is at least that of a candidate
constexpr float kNone = -INFINITY;

#if defined(QUIRE_AVX512)
inline Vec whole_of(Vec x) { return _mm512_roundscale_ps(x, 0x09); }
inline bool any_nan(Vec x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
inline uint32_t at_least(Vec x, Vec least) { return _mm512_cmp_ps_mask(x, least, _CMP_GE_OQ); }
inline Vec chosen_lanes(uint32_t lanes, Vec x) {
  return _mm512_maskz_mov_ps(static_cast<__mmask16>(lanes), x);
}
#else
inline Vec whole_of(const Vec& x) {
  const Vec small = each([&](int i) -> FloatPart {
    const FloatPart limit = splat_part(8388608);
    return x.part[i] < limit ? x.part[i] : limit;
  });
  return each([&](int i) -> FloatPart {
    const FloatPart whole = __builtin_convertvector(floor_part(small.part[i]), FloatPart);
    return x.part[i] < splat_part(8388608) ? whole : x.part[i];  // greater ones are whole
  });
}
inline uint32_t lanes_of(const IntPart (&is)[kParts]) {
  uint32_t lanes = 0;
  for (int i = 0; i < kLanes; ++i)
    lanes |= static_cast<uint32_t>(is[i / kPart][i % kPart] & 1) << i;
  return lanes;
}
inline bool any_nan(const Vec& x) {
  IntPart is[kParts];
  for (int i = 0; i < kParts; ++i) is[i] = x.part[i] != x.part[i];
  return lanes_of(is) != 0;
}
inline uint32_t at_least(const Vec& x, const Vec& least) {
  IntPart is[kParts];
  for (int i = 0; i < kParts; ++i) is[i] = x.part[i] >= least.part[i];
  return lanes_of(is);
}
inline Vec chosen_lanes(uint32_t lanes, const Vec& x) {
  float values[kLanes];
  store(values, x);
  for (int i = 0; i < kLanes; ++i) values[i] = lanes >> i & 1 ? values[i] : 0;
  return load(values);
}
#endif

// Up to 16 logits; minus infinity beyond.
inline Vec logits_at(const float* x, int64_t left) {
  if (left >= kLanes) return load(x);
  return first_lanes(read(x, left), static_cast<int>(left), splat(kNone));
}

// 2^(32 + (x - greatest) / divisor), by operations that are rounded one by one, as the reference's.
inline Vec power_of(Vec x, Vec greatest, Vec divisor) {
  const Vec exponent = max(div(sub(x, greatest), divisor), splat(-40));
  const Vec whole = whole_of(add(exponent, splat(0.5f)));
  const Vec f = sub(exponent, whole);
  Vec p = splat(1.5252734e-05f);
  for (float coefficient : {1.5403530e-04f, 1.3333558e-03f, 9.6181291e-03f, 5.5504109e-02f,
                            2.4022651e-01f, 6.9314718e-01f, 1.0f})
    p = add(mul(p, f), splat(coefficient));
  return scale_by_floor(p, add(whole, splat(32)));
}

// Sixteen sums in double, of the lanes of what is added.
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

  bool operator<(const Token& other) const {  // better
    return logit > other.logit || (logit == other.logit && id < other.id);
  }
};

// What a thread needs for a row.
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
  float greatest = kNone;
  Workspace& work;

  Row(const float* x, int64_t size, Workspace& work) : x(x), size(size), work(work) {}

  int64_t num_blocks() const { return (size + kBlock - 1) / kBlock; }
  int64_t end_of(int64_t block) const { return std::min(size, (block + 1) * kBlock); }

  // Finds the greatest logit of each block and of all. Whether that is finite and none is NaN.
  bool scan() {
    work.greatest.resize(num_blocks());
    bool broken = false;
    for (int64_t block = 0; block < num_blocks(); ++block) {
      Vec most = splat(kNone);
      for (int64_t i = block * kBlock; i < end_of(block); i += kLanes) {
        const Vec value = logits_at(x + i, size - i);
        broken |= any_nan(value);
        most = max(value, most);
      }
      work.greatest[block] = max_of_lanes(most);
      greatest = std::max(greatest, work.greatest[block]);
    }
    return !broken && std::isfinite(greatest);
  }

  // Not greater than the logits of the best `count` tokens.
  float bound_of_best(int64_t count) const {
    if (count > num_blocks()) return kNone;
    std::vector<float>& ordered = work.ordered;
    ordered = work.greatest;
    std::nth_element(ordered.begin(), ordered.begin() + (count - 1), ordered.end(),
                     std::greater<float>());
    return ordered[count - 1];
  }

  // The tokens of at least this logit, by their ids.
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

  // Leaves the best `count` of the collected tokens, best first.
  void keep_best(int64_t count) const {
    std::vector<Token>& tokens = work.tokens;
    count = std::min<int64_t>(count, tokens.size());
    if (count < static_cast<int64_t>(tokens.size()))
      std::nth_element(tokens.begin(), tokens.begin() + count, tokens.end());
    tokens.resize(count);
    std::sort(tokens.begin(), tokens.end());
  }
};

// The tokens that may be drawn: those of a logit above `least`, and of this logit those up to
// `last`.
struct Kept {
  float least = kNone;
  int64_t last = INT64_MAX;
};

struct Draw {
  Row& row;
  float scale;  // a logit that is lower by this weighs half as much
  Vec greatest, divisor;
  Kept kept;
  bool is_weighed = false;  // The workspace has the weights of all tokens.

  Draw(Row& row, float temperature)
      : row(row),
        scale(temperature * 0.69314718055994530942f),
        greatest(splat(row.greatest)),
        divisor(splat(scale)) {}

  void weigh() {
    row.work.row_weights.resize(row.num_blocks() * kBlock);
    for (int64_t i = 0; i < row.size; i += kLanes)
      store(&row.work.row_weights[i],
            whole_of(power_of(logits_at(row.x + i, row.size - i), greatest, divisor)));
    is_weighed = true;
  }

  bool keeps(const Token& token) const {
    return token.logit > kept.least || (token.logit == kept.least && token.id <= kept.last);
  }

  // Of 16 tokens; 0 for those that are not kept.
  Vec weights_at(int64_t i) const {
    const Vec x = logits_at(row.x + i, row.size - i);
    const Vec weight =
        is_weighed ? load(&row.work.row_weights[i]) : whole_of(power_of(x, greatest, divisor));
    if (kept.least == kNone) return weight;
    uint32_t lanes = at_least(x, splat(kept.least));
    if (kept.last < i + kLanes) {
      for (uint32_t equal = lanes; equal; equal &= equal - 1) {
        const int lane = __builtin_ctz(equal);
        const bool is_out = i + lane > kept.last;
        if (i + lane < row.size && is_out && row.x[i + lane] == kept.least) lanes &= ~(1u << lane);
      }
    }
    return chosen_lanes(lanes, weight);
  }

  // The weights of the kept tokens by block, and their sum.
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

  // The first token at which the running sum of weights, in the order of ids, is above
  // `uniform` of them all.
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

  // The same among the tokens that are collected, best first, all of which are kept.
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
      store(&row.work.weights[first], whole_of(power_of(load(values), greatest, divisor)));
    }
  }

  // Leaves the fewest best of the collected tokens, best first, whose weights add up to `wanted`.
  // Whether they do; else it leaves all.
  bool keep_mass(double wanted) const {
    weigh_collected();
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

  // Keeps the fewest best of all kept tokens whose weights, or numbers, add up to `wanted`. Bounds
  // of the last one's logit are narrowed until few tokens are left between them, which are sorted.
  void keep_fewest(double wanted, bool by_weight) {
    const std::vector<float>& weights = row.work.row_weights;
    Vec negated = splat(-row.greatest);
    for (int64_t i = 0; i + kLanes <= row.size; i += kLanes)
      negated = max(sub(zero(), load(row.x + i)), negated);
    float lowest = -max_of_lanes(negated);
    for (int64_t i = row.size & -kLanes; i < row.size; ++i) lowest = std::min(lowest, row.x[i]);
    // Below `low` nothing has a weight, `high` and above are `above`, less than is wanted.
    float low = std::max({kept.least, lowest, row.greatest - 34 * scale}), high = INFINITY;
    double above = 0;
    for (int round = 0; round < kRounds; ++round) {
      float bounds[kBounds];
      const float top = std::min(high, row.greatest);
      for (int k = 0; k < kBounds; ++k) bounds[k] = low + (top - low) * k / kBounds;
      Sums amounts[kBounds];
      for (int64_t block = 0; block < row.num_blocks(); ++block) {
        if (row.work.greatest[block] < low) continue;
        for (int64_t i = block * kBlock; i < row.end_of(block); i += kLanes) {
          const Vec x = logits_at(row.x + i, row.size - i);
          const Vec amount = by_weight ? weights_at(i) : splat(1);
          for (int k = 0; k < kBounds; ++k) amounts[k].take(at_least(x, splat(bounds[k])), amount);
        }
      }
      int at = kBounds - 1;
      while (at >= 0 && amounts[at].total() < wanted) --at;
      if (at < 0) return;  // Even all are fewer.
      if (at + 1 < kBounds) high = bounds[at + 1], above = amounts[at + 1].total();
      if (bounds[at] == low && at + 1 == kBounds) break;
      low = bounds[at];
    }
    row.collect(low);
    std::vector<Token>& tokens = row.work.tokens;
    tokens.erase(
        std::remove_if(tokens.begin(), tokens.end(),
                       [&](const Token& token) { return token.logit >= high || !keeps(token); }),
        tokens.end());
    const auto amount_of = [&](const Token& token) { return by_weight ? weights[token.id] : 1.0f; };
    auto begin = tokens.begin(), end = tokens.end();
    while (end - begin > kSorted) {
      const auto middle = begin + (end - begin) / 2;
      std::nth_element(begin, middle, end);
      double sum = above;
      for (auto token = begin; token < middle; ++token) sum += amount_of(*token);
      if (sum >= wanted)
        end = middle;
      else
        above = sum, begin = middle;
    }
    std::sort(begin, end);
    for (auto token = begin; token < end; ++token) {
      above += amount_of(*token);
      if (above < wanted) continue;
      kept = {token->logit, token->id};
      return;
    }
  }
};

int64_t sample_row(const SampleArgs& args, int64_t index, Workspace& work) {
  Row row(args.logits + args.rows[index] * args.stride, args.num_columns, work);
  if (!row.scan()) return -1;
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
  if (count <= row.num_blocks()) {
    row.collect(std::max(draw.kept.least, row.bound_of_best(count)));
    row.keep_best(limits_number ? count : work.tokens.size());
    bool is_settled = true;
    if (top_p < 1) {
      double total = 0;
      if (limits_number) {
        draw.weigh_collected();
        for (size_t i = 0; i < work.tokens.size(); ++i) total += work.weights[i];
      } else {
        draw.weigh();
        total = draw.sum_blocks();
      }
      is_settled = draw.keep_mass(top_p * total) || limits_number;
    }
    if (is_settled) return draw.pick_collected(uniform);
  }
  if (!draw.is_weighed) draw.weigh();
  if (limits_number) draw.keep_fewest(static_cast<double>(top_k), false);
  if (top_p < 1) draw.keep_fewest(top_p * draw.sum_blocks(), true);
  return draw.pick(uniform);
}

typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Bits __attribute__((vector_size(64)));

// e^x for x <= 0, wrong by 1e-15 of it at most.
inline Doubles exp_of(Doubles x) {
  x = x < -700.0 ? Doubles{} - 700.0 : x;
  const Doubles shifted = x * 1.4426950408889634 + 0x1.8p52;  // rounds to a whole number
  const Doubles whole = shifted - 0x1.8p52;
  const Doubles r = (x - whole * 0x1.62e42fee00000p-1) - whole * 0x1.a39ef35793c76p-33;
  Doubles p = Doubles{} + 1 / 479001600.0;
  for (double factorial :
       {39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0})
    p = p * r + 1 / factorial;
  return reinterpret_cast<Doubles>(reinterpret_cast<Bits>(p) +
                                   (reinterpret_cast<Bits>(shifted) << 52));
}

// The logarithm of the sum of exponentials.
double log_total_of(const Row& row) {
  Doubles sums = {};
  for (int64_t i = 0; i < row.size; i += 8) {
    Doubles x;
    for (int lane = 0; lane < 8; ++lane)
      x[lane] =
          i + lane < row.size ? row.x[i + lane] - static_cast<double>(row.greatest) : -INFINITY;
    const Doubles powers = exp_of(x);
    sums += x < -700.0 ? Doubles{} : powers;
  }
  for (int width = 4; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  return row.greatest + std::log(sums[0]);
}

void score_row(const ScoreArgs& args, int64_t index, Workspace& work) {
  Row row(args.logits + args.rows[index] * args.stride, args.num_columns, work);
  const float own = row.x[args.token_ids[index]];
  const double log_total = row.scan() ? log_total_of(row) : NAN;
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
