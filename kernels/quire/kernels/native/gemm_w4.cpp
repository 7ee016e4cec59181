// Linear layers over 4-bit weights, with a scale for each group of inputs. Inputs keep their type.
//
// Layout. A panel has the same columns as in `gemm.cpp`. For each group in turn it has 32 scales,
// 32 zero points if there are any (a byte each), and a line for every 8 successive k. A line has 32
// bits per column: the low half has the even k, the high half the odd k, so that one shift moves
// two successive k to the bits by which bf16 pairs are looked up.
//
// Order. A group's products of inputs and whole numbers are one chain of multiply-adds over k. The
// group's sum times its scale is added to those of earlier groups. Parts of K are added as a binary
// tree. A row has the same bits among any number of rows; ranks compute branches of the tree.
//
// Speed. Weights are decoded in registers, once for all rows of a tile: one vpermw for 32 weights
// if the CPU has vdpbf16ps, else a vpermps for 16. A single row computes several groups at a time,
// because one chain alone is bound by its latency.
#include <array>
#include <type_traits>
#include <utility>

#include "elements.h"
#include "linear_pieces.h"
#include "linear_store.h"
#include "quire.h"

namespace quire {
namespace {

#if defined(QUIRE_AVX512)
constexpr int kTileRows = 12;
#elif defined(__AVX2__)
constexpr int kTileRows = 3;
#else
constexpr int kTileRows = 2;
#endif
// The number of groups that a tile of `rows` rows computes at a time.
constexpr int groups_at_once(int rows) {
#if defined(QUIRE_AVX512)
  return rows == 1 ? 2 : 1;
#elif defined(__AVX2__)
  return rows == 1 ? 2 : 1;
#else
  return rows > 0;
#endif
}

constexpr int kLine = 8;
constexpr int64_t kLineBytes = 4 * kPanelColumns;

int64_t scales_bytes(const LinearWeights& weights) {
  return kPanelColumns * (weights.wide_scales ? 4 : 2);
}
int64_t header_bytes(const LinearWeights& weights) {
  return scales_bytes(weights) + (weights.has_zeros ? kPanelColumns : 0);
}
int64_t group_bytes(const LinearWeights& weights) {
  return header_bytes(weights) + weights.group / kLine * kLineBytes;
}
int64_t panel_bytes(const LinearWeights& weights) {
  return weights.num_in / weights.group * group_bytes(weights);
}

inline Vec load_scales(const LinearWeights& weights, const char* at, int vector) {
  return weights.wide_scales ? load(at + vector * 4 * kLanes) : load_bf16(at + vector * 2 * kLanes);
}

constexpr int kZero = 8;  // the code of 0 if there are no zero points

#if defined(QUIRE_AVX512)

typedef uint32_t Words __attribute__((vector_size(64)));

inline Words load_words(const void* at) { return (Words)_mm512_loadu_si512(at); }

// Decodes sixteen columns: `at` gives the weights at position `p` of each word as whole numbers.
template <bool kHasZeros>
struct Decoder {
  Vec zero, levels;
  void load(const uint8_t* zeros) {
    levels = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if (kHasZeros)
      zero = _mm512_cvtepi32_ps(
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros))));
    else
      levels = sub(levels, splat(kZero));
  }
  Vec at(Words words, int p) const {
    const Vec level = _mm512_permutexvar_ps((__m512i)(words >> (4 * p)), levels);
    return kHasZeros ? sub(level, zero) : level;
  }
};

#else

using Words = Vec;

inline Words load_words(const void* at) { return load(at); }

template <bool kHasZeros>
struct Decoder {
  Vec zero;
  void load(const uint8_t* zeros) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = kHasZeros ? zeros[i] : kZero;
    zero = quire::load(lanes);
  }
  Vec at(const Words& words, int p) const {
    return each([&](int i) {
      const IntPart code = (IntPart)((BitPart)words.part[i] >> (4 * p) & 15u);
      return __builtin_convertvector(code, FloatPart) - zero.part[i];
    });
  }
};

#endif

// A row's inputs of a line as floats in memory, from which broadcasts load.
struct FloatLine {
  float values[kLine];
  void load(const float* x) { memcpy(values, x, sizeof values); }
  void load(const bf16* x) {
#if defined(__AVX2__)
    const __m256i wide =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), _mm256_slli_epi32(wide, 16));
    // Keeps GCC from shuffling registers instead, on the port that the lookups need.
    asm("" : "+m"(values));
#else
    for (int i = 0; i < kLine; ++i) {
      const uint32_t bits = static_cast<uint32_t>(x[i].bits) << 16;
      memcpy(&values[i], &bits, sizeof bits);
    }
#endif
  }
};

// The weights of two successive k in 16 columns.
template <class T, bool kHasZeros>
struct Pair {
  using Decode = Decoder<kHasZeros>;
  using Line = FloatLine;
  Vec even, odd;
  Pair(const Decode& decoder, const Words& words, int pair)
      : even(decoder.at(words, pair)), odd(decoder.at(words, 4 + pair)) {}
  Vec dot(Vec sum, const Line& x, int pair) const {
    sum = fma(even, splat(x.values[2 * pair]), sum);
    return fma(odd, splat(x.values[2 * pair + 1]), sum);
  }
};

#if defined(QUIRE_AVX512) && defined(__AVX512BF16__)

typedef uint16_t Halves __attribute__((vector_size(64)));

// Whole numbers as bf16. Table 0 is indexed by 4-bit code, table 1 by a number's lowest five bits.
struct Levels {
  alignas(64) uint16_t bits[2][32];
  Levels() {
    for (int i = 0; i < 32; ++i) {
      const float levels[2] = {i % 16 - float{kZero}, i < 16 ? i : i - 32.0f};
      for (int v = 0; v < 2; ++v)
        memcpy(&bits[v][i], reinterpret_cast<const char*>(&levels[v]) + 2, 2);
    }
  }
};
const Levels kLevels;

template <bool kHasZeros>
struct PairDecoder {
  __m512i levels;
  Halves zero;
  void load(const uint8_t* zeros) {
    levels = _mm512_load_si512(kLevels.bits[kHasZeros]);
    if (kHasZeros)
      zero = (Halves)_mm512_mullo_epi32(
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros))),
          _mm512_set1_epi32(0x10001));
  }
};

template <bool kHasZeros>
struct Pair<bf16, kHasZeros> {
  using Decode = PairDecoder<kHasZeros>;
  struct Line {
    const bf16* x;
    void load(const bf16* from) { x = from; }
  };
  __m512i values;
  Pair(const Decode& decoder, Words words, int pair) {
    Halves code = (Halves)words >> (4 * pair);
    if (kHasZeros) code = (code & 15) - decoder.zero;
    values = _mm512_permutexvar_epi16((__m512i)code, decoder.levels);
  }
  Vec dot(Vec sum, const Line& line, int pair) const {
    int32_t both;
    memcpy(&both, line.x + 2 * pair, sizeof both);
    return _mm512_dpbf16_ps(sum, (__m512bh)values, (__m512bh)_mm512_set1_epi32(both));
  }
};

#endif

// Adds U successive groups to the sums of R rows. Prefetches the weights `to_ahead` bytes beyond.
template <class T, bool kHasZeros, int R, int U>
inline __attribute__((always_inline)) void add_groups(Vec (&totals)[R][2], const T* x,
                                                      int64_t x_stride,
                                                      const LinearWeights& weights,
                                                      const char* groups, int64_t to_ahead) {
  using P = Pair<T, kHasZeros>;
  const int64_t bytes = group_bytes(weights), group = weights.group;
  const auto* zeros = reinterpret_cast<const uint8_t*>(groups + scales_bytes(weights));
  const char* line = groups + header_bytes(weights);
  typename P::Decode decoders[U][2];
#pragma GCC unroll 4
  for (int u = 0; u < U; ++u)
    for (int v = 0; v < 2; ++v) decoders[u][v].load(zeros + u * bytes + v * kLanes);
  Vec sums[U][R][2];
#pragma GCC unroll 16
  for (int i = 0; i < U * R; ++i) sums[i / R][i % R][0] = sums[i / R][i % R][1] = zero();
  // A pointer for every third row, as in `gemm.cpp`.
  const T* rows[(R + 2) / 3];
#pragma GCC unroll 4
  for (int i = 0; i < (R + 2) / 3; ++i) rows[i] = x + 3 * i * x_stride;
  for (const char* end = line + group / kLine * kLineBytes; line != end; line += kLineBytes) {
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) {
      const char* w = line + u * bytes;
      __builtin_prefetch(w + to_ahead, 0, 2);
      __builtin_prefetch(w + to_ahead + kLineBytes / 2, 0, 2);
      typename P::Line x_line[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) x_line[r].load(rows[r / 3] + r % 3 * x_stride + u * group);
      const Words words[2] = {load_words(w), load_words(w + 4 * kLanes)};
#pragma GCC unroll 4
      for (int pair = 0; pair < kLine / 2; ++pair) {
        const P left(decoders[u][0], words[0], pair), right(decoders[u][1], words[1], pair);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          sums[u][r][0] = left.dot(sums[u][r][0], x_line[r], pair);
          sums[u][r][1] = right.dot(sums[u][r][1], x_line[r], pair);
        }
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < (R + 2) / 3; ++i) rows[i] += kLine;
  }
#pragma GCC unroll 4
  for (int u = 0; u < U; ++u) {
    const Vec scale[2] = {load_scales(weights, groups + u * bytes, 0),
                          load_scales(weights, groups + u * bytes, 1)};
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2; ++v) totals[r][v] = fma(sums[u][r][v], scale[v], totals[r][v]);
  }
}

template <class T, bool kHasZeros, int R>
void tile(const LinearArgs& args, int64_t row, int64_t panel, int64_t ahead) {
  constexpr int kAtOnce = groups_at_once(R);
  const LinearWeights& weights = *args.weights;
  const int splits = weights.splits;
  const int64_t bytes = group_bytes(weights), part = weights.num_in / weights.group / splits;
  const char* groups = static_cast<const char*>(weights.weight) + panel * panel_bytes(weights);
  const int64_t to_ahead = (ahead - panel) * panel_bytes(weights);
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  Vec totals[R][2];
  Vec open[4][R][2];  // finished branches without their sibling, as the digits of a binary counter
  int num_open = 0;
  for (int i = 0; i < splits; ++i) {
    for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = zero();
    const int64_t step = weights.group;
    int64_t left = part;
    for (; left >= kAtOnce; left -= kAtOnce, groups += kAtOnce * bytes, x += kAtOnce * step)
      add_groups<T, kHasZeros, R, kAtOnce>(totals, x, args.x_stride, weights, groups, to_ahead);
    if (kAtOnce > 1)
      for (; left > 0; --left, groups += bytes, x += step)
        add_groups<T, kHasZeros, R, 1>(totals, x, args.x_stride, weights, groups, to_ahead);
    for (int bits = i; bits & 1; bits >>= 1) {
      --num_open;
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < 2; ++v) totals[r][v] = add(open[num_open][r][v], totals[r][v]);
    }
    if (i + 1 < splits) memcpy(&open[num_open++], &totals, sizeof totals);
  }
  store_tile<T>(args, row, panel, totals, R);
}

using Tile = void (*)(const LinearArgs&, int64_t, int64_t, int64_t);

template <class T, bool kHasZeros, int... R>
constexpr std::array<Tile, sizeof...(R)> tiles(std::integer_sequence<int, R...>) {
  return {tile<T, kHasZeros, R + 1>...};
}
template <class T, bool kHasZeros>
constexpr auto kTiles = tiles<T, kHasZeros>(std::make_integer_sequence<int, kTileRows>());

template <class T>
void tile_of_rows(const LinearArgs& args, int64_t row, int64_t num_rows, int64_t panel,
                  int64_t ahead) {
  const auto& tiles = args.weights->has_zeros ? kTiles<T, true> : kTiles<T, false>;
  tiles[num_rows - 1](args, row, panel, ahead);
}

void pack_panel(const PackArgs& args, int64_t panel) {
  const LinearWeights& weights = args.weights;
  const int64_t num_groups = weights.num_in / weights.group;
  char* at = static_cast<char*>(const_cast<void*>(weights.weight)) + panel * panel_bytes(weights);
  for (int64_t group = 0; group < num_groups; ++group, at += group_bytes(weights)) {
    memset(at, 0, group_bytes(weights));
    auto* zeros = reinterpret_cast<uint8_t*>(at + scales_bytes(weights));
    for (int column = 0; column < kPanelColumns; ++column) {
      const int64_t row = source_row(weights, panel, column);
      if (row < 0) continue;
      const char* scale = reinterpret_cast<const char*>(args.scales + row * num_groups + group);
      // A bf16 is the upper half of a float.
      if (weights.wide_scales)
        memcpy(at + 4 * column, scale, 4);
      else
        memcpy(at + 2 * column, scale + 2, 2);
      if (weights.has_zeros) zeros[column] = args.zeros[row * num_groups + group];
      const auto* codes =
          static_cast<const uint8_t*>(args.source) + row * args.stride + group * weights.group;
      char* out = at + header_bytes(weights) + 4 * column;
      for (int64_t k = 0; k < weights.group; k += kLine, out += kLineBytes) {
        uint32_t word = 0;
        for (int i = 0; i < kLine; ++i)
          word |= static_cast<uint32_t>(codes[k + i]) << (16 * (i % 2) + 4 * (i / 2));
        memcpy(out, &word, sizeof word);
      }
    }
  }
  args.dtype == QUIRE_BF16 ? pack_bias<bf16>(args, panel) : pack_bias<float>(args, panel);
}

}  // namespace

LinearTiles w4_tiles(const LinearArgs& args) {
  return {args.dtype == QUIRE_BF16 ? tile_of_rows<bf16> : tile_of_rows<float>, kTileRows};
}

}  // namespace quire

using namespace quire;

int64_t quire_w4_bytes(const LinearWeights* weights) {
  return linear_panels(*weights) * panel_bytes(*weights);
}

void quire_pack_w4(const PackArgs* args, int32_t num_threads) {
  parallel(num_threads, [=](Team team) {
    team.share(linear_panels(args->weights), [=](int64_t panel) { pack_panel(*args, panel); });
  });
}
