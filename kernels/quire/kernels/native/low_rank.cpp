#include "low_rank.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "lane.h"
#include "linear_pieces.h"

namespace quire {
namespace {

// Tokens that share a pass over weights: their sums, the weights and an input fit in the registers.
#if defined(QUIRE_AVX512)
constexpr int kTileTokens = 8;
#elif defined(__AVX2__)
constexpr int kTileTokens = 4;
#else
constexpr int kTileTokens = 2;
#endif
constexpr int64_t kPieceTokens = 6 * kTileTokens;
constexpr int64_t kRun = 96;  // tokens whose addends of a panel stay in level-1 cache

template <int R>
struct Sums {
  Vec at[R];
};

template <class T, int R>
inline __attribute__((always_inline)) void add_chain(Sums<R>& out, const uint32_t* const* x,
                                                     int64_t first, int64_t lanes,
                                                     const uint32_t* a, int64_t ahead) {
  Vec sums[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sums[r] = zero();
  const uint32_t* rows[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) rows[r] = x[r] + first;
  a += first * kLanes;
  for (int64_t k = 0; k < lanes; ++k, a += kLanes) {
    const auto weights = Lane<T>::weights(a);
    __builtin_prefetch(a + ahead, 0, 2);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r] = Lane<T>::dot(sums[r], weights, load_lane(rows[r] + k));
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) out.at[r] = sums[r];
}

// Computes a vector of A x for R tokens. Prefetches the memory behind it: the next vector, or B.
template <class T, int R>
void shrink_tile(const uint32_t* const* x, int64_t lanes, int splits, const uint32_t* a,
                 float* out) {
  Sums<R> sums;
  Sums<R> open[4];  // finished branches without their sibling, as the digits of a binary counter
  int num_open = 0;
  const int64_t part = lanes / splits;
  for (int i = 0; i < splits; ++i) {
    add_chain<T, R>(sums, x, i * part, part, a, lanes * kLanes);
    for (int bits = i; bits & 1; bits >>= 1) {
      --num_open;
      for (int r = 0; r < R; ++r) sums.at[r] = add(open[num_open].at[r], sums.at[r]);
    }
    if (i + 1 < splits) open[num_open++] = sums;
  }
  for (int r = 0; r < R; ++r) store(out + r * kLanes, sums.at[r]);
}

// Computes a vector of B t for R tokens.
template <class T, int R>
void expand_tile(const float* const* t, int64_t count, const uint32_t* b, float* const* out) {
  Vec sums[R];
  const float* rows[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sums[r] = splat(LowRankLayer::kNothing), rows[r] = t[r];
  for (int64_t i = 0; i < count; i += 2) {
    Vec first, second;
    if constexpr (sizeof(T) == 2) {
      first = even_bf16(b), second = odd_bf16(b);
      b += kLanes;
    } else {
      first = load(b), second = load(b + kLanes);
      b += 2 * kLanes;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      sums[r] = fma(first, splat(rows[r][i]), sums[r]);
      sums[r] = fma(second, splat(rows[r][i + 1]), sums[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(out[r], sums[r]);
}

using ShrinkTile = void (*)(const uint32_t* const*, int64_t, int, const uint32_t*, float*);
using ExpandTile = void (*)(const float* const*, int64_t, const uint32_t*, float* const*);

template <class T, int... R>
constexpr std::array<ShrinkTile, sizeof...(R)> shrink_tiles(std::integer_sequence<int, R...>) {
  return {shrink_tile<T, R + 1>...};
}
template <class T, int... R>
constexpr std::array<ExpandTile, sizeof...(R)> expand_tiles(std::integer_sequence<int, R...>) {
  return {expand_tile<T, R + 1>...};
}
template <class T>
constexpr auto kShrink = shrink_tiles<T>(std::make_integer_sequence<int, kTileTokens>());
template <class T>
constexpr auto kExpand = expand_tiles<T>(std::make_integer_sequence<int, kTileTokens>());

}  // namespace

AdapterGroups::AdapterGroups(const int32_t* slots, int64_t num_tokens, int64_t num_slots) {
  std::vector<int64_t> ends(num_slots + 1, 0);  // of slot - 1, before this slot's tokens are placed
  for (int64_t token = 0; token < num_tokens; ++token)
    if (slots[token] >= 0) ++ends[slots[token] + 1];
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    const int64_t first = ends[slot], count = ends[slot + 1];
    ends[slot + 1] += first;
    if (count) groups.push_back({static_cast<int32_t>(slot), first, first + count});
  }
  tokens.resize(ends[num_slots]);
  for (int64_t token = 0; token < num_tokens; ++token)
    if (slots[token] >= 0) tokens[ends[slots[token]]++] = static_cast<int32_t>(token);
}

bool LowRankLayer::has_any(int64_t begin, int64_t end) const {
  return std::any_of(groups_.groups.begin(), groups_.groups.end(), [&](const auto& group) {
    return adapters_[group.slot].a && tokens_of(group, begin, end).count;
  });
}

LowRankLayer::Tokens LowRankLayer::tokens_of(const AdapterGroups::Group& group, int64_t begin,
                                             int64_t end) const {
  const int32_t* all = groups_.tokens.data();
  const int32_t* first = std::lower_bound(all + group.first, all + group.end, begin);
  return {first, std::lower_bound(first, all + group.end, end) - first};
}

Stage* LowRankLayer::shrink_part(const void* x, int64_t x_stride, const LinearWeights& layer,
                                 bool is_share, int64_t num_tokens, Team team) const {
  if (is_share) {
    team.share_rows(num_tokens, [&](int64_t begin, int64_t end) {
      std::fill(t_ + begin * stride_, t_ + end * stride_, 0.0f);
    });
    ++team.stage;
  }
  // A piece is a vector of an adapter's ranks, for some of its tokens.
  int64_t before = 0, piece = team.stage->take();
  for (const AdapterGroups::Group& group : groups_.groups) {
    const LowRankWeights& weights = adapters_[group.slot];
    if (!weights.a) continue;
    const int64_t num_vectors = weights.rank / kLanes;
    const int64_t count = group.end - group.first;
    const int64_t end = before + (count + kPieceTokens - 1) / kPieceTokens * num_vectors;
    for (; piece < end; piece = team.stage->take()) {
      const int64_t first = (piece - before) / num_vectors * kPieceTokens;
      const Tokens tokens = {groups_.tokens.data() + group.first + first,
                             std::min(kPieceTokens, count - first)};
      const int64_t vector = (piece - before) % num_vectors;
      dtype_ == QUIRE_BF16 ? shrink<bf16>(weights, tokens, vector, x, x_stride, layer, is_share)
                           : shrink<float>(weights, tokens, vector, x, x_stride, layer, is_share);
      team.stage->finish();
    }
    before = end;
  }
  team.stage->wait(before);
  return team.stage + 1;
}

template <class T>
void LowRankLayer::shrink(const LowRankWeights& weights, Tokens tokens, int64_t vector,
                          const void* x, int64_t x_stride, const LinearWeights& layer,
                          bool is_share) const {
  const int64_t lanes = layer.num_in / Lane<T>::kSteps;
  const auto* a = static_cast<const uint32_t*>(weights.a) + vector * lanes * kLanes;
  const Vec scales = load(weights.scales + vector * kLanes);
  for (int64_t done = 0; done < tokens.count; done += kTileTokens) {
    const int count = static_cast<int>(std::min<int64_t>(kTileTokens, tokens.count - done));
    const uint32_t* rows[kTileTokens];
    for (int r = 0; r < count; ++r)
      rows[r] = static_cast<const uint32_t*>(x) + tokens.at[done + r] * x_stride / Lane<T>::kSteps;
    float sums[kTileTokens * kLanes];
    kShrink<T>[count - 1](rows, lanes, layer.splits, a, sums);
    for (int r = 0; r < count; ++r) {
      const Vec sum = load(sums + r * kLanes);
      store(t_ + tokens.at[done + r] * stride_ + vector * kLanes,
            is_share ? sum : mul(sum, scales));
    }
  }
}

void LowRankLayer::expand(int64_t begin, int64_t end, int64_t panel, int64_t ahead,
                          float* out) const {
  for (const AdapterGroups::Group& group : groups_.groups) {
    const LowRankWeights& weights = adapters_[group.slot];
    if (!weights.a) continue;
    const Tokens tokens = tokens_of(group, begin, end);
    if (!tokens.count) continue;
    for (int v = 0; v < 2; ++v) {
      // The hardware prefetcher does not predict these few lines of each of many adapters.
      const int64_t* later = weights.vectors + (ahead * 2 + v) * 3;
      const auto* b = static_cast<const uint32_t*>(weights.b) + later[0] * kLanes;
      const int64_t lanes = later[2] / (dtype_ == QUIRE_BF16 ? 2 : 1);
      for (int64_t i = 0; i < lanes; ++i) __builtin_prefetch(b + i * kLanes, 0, 2);
      const int64_t* vector = weights.vectors + (panel * 2 + v) * 3;
      dtype_ == QUIRE_BF16 ? expand_vector<bf16>(weights, tokens, vector, begin, out + v * kLanes)
                           : expand_vector<float>(weights, tokens, vector, begin, out + v * kLanes);
    }
  }
}

template <class T>
void LowRankLayer::expand_vector(const LowRankWeights& weights, Tokens tokens,
                                 const int64_t* vector, int64_t begin, float* out) const {
  const auto* b = static_cast<const uint32_t*>(weights.b) + vector[0] * kLanes;
  for (int64_t done = 0; done < tokens.count; done += kTileTokens) {
    const int count = static_cast<int>(std::min<int64_t>(kTileTokens, tokens.count - done));
    const float* t[kTileTokens];
    float* to[kTileTokens];
    for (int r = 0; r < count; ++r) {
      t[r] = t_ + tokens.at[done + r] * stride_ + vector[1];
      to[r] = out + (tokens.at[done + r] - begin) * kPanelColumns;
    }
    kExpand<T>[count - 1](t, vector[2], b, to);
  }
}

void LowRankLayer::add_rows(int64_t begin, int64_t end, float* sums, int64_t width) const {
  for (const AdapterGroups::Group& group : groups_.groups) {
    const LowRankWeights& weights = adapters_[group.slot];
    if (!weights.a) continue;
    const Tokens tokens = tokens_of(group, begin, end);
    for (int64_t i = 0; i < tokens.count; ++i) {
      float* t = t_ + tokens.at[i] * stride_;
      for (int64_t r = 0; r < weights.rank; r += kLanes)
        store(t + r, mul(load(t + r), load(weights.scales + r)));
    }
  }
  alignas(64) float addend[kRun * kPanelColumns];
  for (int64_t first = begin; first < end; first += kRun) {
    const int64_t last = std::min(first + kRun, end);
    if (!has_any(first, last)) continue;
    std::fill(std::begin(addend), std::end(addend), kNothing);
    for (int64_t column = 0; column < width; column += kPanelColumns) {
      const int64_t panel = column / kPanelColumns;
      expand(first, last, panel, std::min(panel + 1, (width - 1) / kPanelColumns), addend);
      for (int64_t token = first; token < last; ++token)
        for (int64_t i = column; i < std::min(column + kPanelColumns, width); i += kLanes) {
          float* sum = sums + token * width + i;
          const float* more = addend + (token - first) * kPanelColumns + i - column;
          write(sum, add(read(sum, width - i), load(more)), width - i);
        }
    }
  }
}

}  // namespace quire
