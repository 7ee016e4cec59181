// The inner loops of attention: a few query rows against a split of one KV head.
//
// K and V are in tiles of 16 tokens. A tile consists of lines of 64 bytes, each multiplied by one
// broadcast word of the other operand:
//
//     bf16   K [D/2][16 tokens][2 channels]   V [8 token pairs][D][2 tokens]   word: 2 values
//     f32    K [D][16 tokens]                 V [16 tokens][D]                 word: 1 value
//
// Each score, and each channel of each row's weighted sum over the split, is one chain of dot
// products in order of channel or token. Its bits thus depend neither on how many rows share the
// loop nor on how many tiles the loop takes at once.
#pragma once

#include <type_traits>

#include "quire.h"
#include "simd.h"

namespace quire {

constexpr int kTileTokens = 16;
constexpr int kSplitTokens = 128;
constexpr int kSplitTiles = kSplitTokens / kTileTokens;
constexpr int kMaxParts = kSplitTokens / 4;  // of the smallest blocks
constexpr int kMaxHeadSize = 256;
constexpr int kLineBytes = 64;
constexpr int kQueryStride = kMaxHeadSize * 4;  // bytes of a packed query row

// Rows and tiles of one loop, so that its accumulators fill the register file.
#if defined(QUIRE_AVX512)
constexpr int kMaxRows = 6, kMaxTiles = 4;
#elif defined(__AVX2__)
constexpr int kMaxRows = 6, kMaxTiles = 1;
#else
constexpr int kMaxRows = 3, kMaxTiles = 1;
#endif

// Size of a row's running result: its values, 16 partial sums of weights, and its maximum.
constexpr int floats_per_row(int head_size) { return head_size + kLanes + 1; }

struct DotF32 {
  static constexpr int kPack = 1;
  static constexpr bool kShortExp = false;
  using Line = Vec;
  static Line line(const char* at) { return load(at); }
  static Line word(const char* at) {
    float x;
    memcpy(&x, at, sizeof x);
    return splat(x);
  }
  static Vec dot(const Vec& sum, const Line& a, const Line& b) { return fma(a, b, sum); }
  static void store_weights(char* at, const Vec& x) { store(at, x); }
};

#if defined(QUIRE_AVX512) && defined(__AVX512BF16__)
#define QUIRE_BF16_DOT 1
struct DotBf16 {
  static constexpr int kPack = 2;
  static constexpr bool kShortExp = true;
  using Line = __m512i;
  static Line line(const char* at) { return _mm512_loadu_si512(at); }
  static Line word(const char* at) {
    int32_t x;
    memcpy(&x, at, sizeof x);
    return _mm512_set1_epi32(x);
  }
  static Vec dot(Vec sum, Line a, Line b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static void store_weights(char* at, Vec x) { store_bf16(at, x); }
};
#endif

// The dot product of q and K in bf16.
#if defined(QUIRE_BF16_DOT)
using Bf16Dot = DotBf16;
#else
using Bf16Dot = DotF32;
#endif

// The scales of an int8 split's K and V, one per token; zeros past its last token.
struct TokenScales {
  float k[kSplitTokens], v[kSplitTokens];
};

// Bytes of a row's weights of one split. A broadcast word has 4 bytes in both types.
template <class Dot>
constexpr int kWeightStride = kSplitTokens * 4 / Dot::kPack;

template <int kCount>
using Count = std::integral_constant<int, kCount>;

// scores[row][tile * 16 + lane] = q[row] . k[tile][lane], for `kRows` rows and `kTiles` tiles.
// `ahead` are tiles of the same size to prefetch.
template <class Dot, int kRows, int kTiles>
inline void score_tiles(const char* q, int num_lines, const char* const* k,
                        const char* const* ahead, float* scores) {
  Vec sum[kRows][kTiles];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int tile = 0; tile < kTiles; ++tile) sum[row][tile] = zero();
  const char* at[kTiles];
  const char* next[kTiles];
#pragma GCC unroll 4
  for (int tile = 0; tile < kTiles; ++tile) at[tile] = k[tile], next[tile] = ahead[tile];
  for (int64_t line = 0; line < num_lines; ++line) {
    typename Dot::Line keys[kTiles];
#pragma GCC unroll 4
    for (int tile = 0; tile < kTiles; ++tile) {
      keys[tile] = Dot::line(at[tile] + line * kLineBytes);
      __builtin_prefetch(next[tile] + line * kLineBytes);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const typename Dot::Line word = Dot::word(q + row * kQueryStride + line * 4);
#pragma GCC unroll 4
      for (int tile = 0; tile < kTiles; ++tile)
        sum[row][tile] = Dot::dot(sum[row][tile], word, keys[tile]);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int tile = 0; tile < kTiles; ++tile)
      store(scores + row * kSplitTokens + tile * kTileTokens, sum[row][tile]);
}

template <class Dot, int kRows>
inline void score_rows(const char* q, int num_lines, const char* const* k, const char* const* ahead,
                       int num_tiles, float* scores) {
  const auto score = [&](auto tiles, int tile) {
    score_tiles<Dot, kRows, tiles>(q, num_lines, k + tile, ahead + tile,
                                   scores + tile * kTileTokens);
  };
  int tile = 0;
  for (; tile + kMaxTiles <= num_tiles; tile += kMaxTiles) score(Count<kMaxTiles>(), tile);
  if constexpr (kMaxTiles > 1) switch (num_tiles - tile) {
      case 1: return score(Count<1>(), tile);
      case 2: return score(Count<2>(), tile);
      case 3: return score(Count<3>(), tile);
    }
}

// How scores become weights: `exp2(score * log2_scale)`, where a cap first makes the score
// `tanh(score * to_cap)`.
struct ScoreScale {
  explicit ScoreScale(const AttendArgs& args)
      : log2_scale((args.soft_cap > 0 ? args.soft_cap : args.scale) * 1.44269504f),
        to_cap(args.soft_cap > 0 ? args.scale / args.soft_cap : 0) {}
  const float log2_scale;
  const float to_cap;  // 0: no cap
};

// The tokens of some tiles that a row sees, `first` to `end` - 1: at least one.
struct Seen {
  int first, end;
};

// Turns each row's `num_tiles * 16` scores of a split into softmax weights, relative to the row's
// maximum among them. Tokens that a row does not see get a weight of zero. Lane i of the result is
// row i's maximum. Lane j of sums[i] is the sum of the weights of tokens that are j modulo 16. An
// int8 split's scales are multiplied into the scores and the weights, not into the sums.
template <class Dot, int kRows>
inline Vec weigh(float* scores, char* weights, int num_tiles, const Seen (&seen)[kRows],
                 const ScoreScale& score_scale, const float* k_scales, const float* v_scales,
                 Vec (&sums)[kRows]) {
  constexpr int kTileBytes = kTileTokens * 4 / Dot::kPack;
  const Vec hidden = splat(-__builtin_inff());
  Vec most[kRows];
  for (int row = 0; row < kRows; ++row) {
    float* at = scores + row * kSplitTokens;
    if (k_scales)
      for (int i = 0; i < num_tiles * kTileTokens; i += kTileTokens)
        store(at + i, mul(load(at + i), load(k_scales + i)));
    if (score_scale.to_cap > 0)
      for (int i = 0; i < num_tiles * kTileTokens; i += kTileTokens)
        store(at + i, tanh_of(mul(load(at + i), splat(score_scale.to_cap))));
    for (int tile = 0; tile * kTileTokens < seen[row].first; ++tile) {
      const int count = seen[row].first - tile * kTileTokens;
      float* cut = at + tile * kTileTokens;
      store(cut, count < kTileTokens ? first_lanes(hidden, count, load(cut)) : hidden);
    }
    for (int tile = seen[row].end / kTileTokens; tile < num_tiles; ++tile) {
      const int count = seen[row].end - tile * kTileTokens;
      float* cut = at + tile * kTileTokens;
      store(cut, count > 0 ? first_lanes(load(cut), count, hidden) : hidden);
    }
    most[row] = load(at);
    for (int tile = 1; tile < num_tiles; ++tile)
      most[row] = max(most[row], load(at + tile * kTileTokens));
  }
  const Vec max_scores = max_of_each(most);
  // If all scores are -inf, weights must be 2^-inf, not 2^(-inf + inf).
  const Vec finite = max(max_scores, splat(-1e30f));
  float offsets[kLanes];
  store(offsets, mul(finite, splat(-score_scale.log2_scale)));
  const Vec scale = splat(score_scale.log2_scale);
  for (int row = 0; row < kRows; ++row) {
    const Vec offset = splat(offsets[row]);
    const float* at = scores + row * kSplitTokens;
    char* to = weights + row * kWeightStride<Dot>;
    Vec sum = zero();
    for (int tile = 0; tile < num_tiles; ++tile) {
      const Vec weight = exp2_of<Dot::kShortExp>(fma(load(at + tile * kTileTokens), scale, offset));
      sum = add(sum, weight);
      Dot::store_weights(to + tile * kTileBytes,
                         v_scales ? mul(weight, load(v_scales + tile * kTileTokens)) : weight);
    }
    sums[row] = sum;
  }
  return max_scores;
}

// Factors that add a split's result to a row's running result:
// `result = result * keep + split * take`.
struct Blend {
  float keep[kLanes];
  float take[kLanes];
};

inline void join_sum(const Vec& split, float* running, const Blend& blend, int row) {
  store(running, fma(load(running), splat(blend.keep[row]), mul(split, splat(blend.take[row]))));
}

// Blends the sum over tokens of weight[row][token] * v[token] into result[row][0:16 kCols], or
// stores it if `blend` is null. V is in parts of `num_lines` rows of words; a tile has one or more.
template <class Dot, int kRows, int kCols>
inline void sum_values(const char* weights, int num_parts, int num_lines, const char* const* v,
                       int64_t row_bytes, int64_t col_bytes, const char* const* ahead,
                       const Blend* blend, float* result, int64_t result_stride) {
  Vec sum[kRows][kCols];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int col = 0; col < kCols; ++col) sum[row][col] = zero();
  for (int part = 0; part < num_parts; ++part) {
    const char* at = v[part] + col_bytes;
    const char* next = ahead[part] + col_bytes;
    for (int line = 0; line < num_lines; ++line, at += row_bytes, next += row_bytes, weights += 4) {
      typename Dot::Line values[kCols];
#pragma GCC unroll 4
      for (int col = 0; col < kCols; ++col) {
        values[col] = Dot::line(at + col * kLineBytes);
        __builtin_prefetch(next + col * kLineBytes);
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const typename Dot::Line word = Dot::word(weights + row * kWeightStride<Dot>);
#pragma GCC unroll 4
        for (int col = 0; col < kCols; ++col)
          sum[row][col] = Dot::dot(sum[row][col], word, values[col]);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int col = 0; col < kCols; ++col) {
      float* to = result + row * result_stride + col * kLanes;
      blend ? join_sum(sum[row][col], to, *blend, row) : store(to, sum[row][col]);
    }
}

template <class Dot, int kRows>
inline void sum_value_rows(const char* weights, int num_tiles, int part_tokens,
                           const char* const* v, int head_size, const char* const* ahead,
                           const Blend* blend, float* result) {
  const int num_cols = head_size / kLanes;
  const int num_parts = num_tiles * (kTileTokens / part_tokens);
  const int num_lines = part_tokens / Dot::kPack;
  const int64_t row_bytes = int64_t{num_cols} * kLineBytes;
  const auto sum = [&](auto cols, int col) {
    sum_values<Dot, kRows, cols>(weights, num_parts, num_lines, v, row_bytes,
                                 int64_t{col} * kLineBytes, ahead, blend, result + col * kLanes,
                                 head_size);
  };
  int col = 0;
  for (; col + kMaxTiles <= num_cols; col += kMaxTiles) sum(Count<kMaxTiles>(), col);
  if constexpr (kMaxTiles > 1) switch (num_cols - col) {
      case 1: return sum(Count<1>(), col);
      case 2: return sum(Count<2>(), col);
      case 3: return sum(Count<3>(), col);
    }
}

}  // namespace quire
