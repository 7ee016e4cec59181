// Linear layers over packed weights: x [T, K] times W [N, K] transposed.
//
// Layout. A panel is two vectors of output columns (of a gated layer: a vector of gates and the
// vector of their ups) with everything they need for all of K, contiguous. In bfloat16 two
// successive k lie side by side in a 32-bit lane, as vdpbf16ps wants them.
//
// Order. An output element is one chain of multiply-adds over k, or `splits` chains over equal
// parts of K that are added as a binary tree; nothing else shapes it, so a row has the same bits
// among any number of rows. Ranks that share K take the tree's branches.
//
// Speed. A tile of kTileRows x one panel keeps its sums in registers. Rows are taken in chunks
// that stay in level-2 cache while a panel passes, and the first tile of a panel fetches the next
// one from memory: with one row this reads at the speed of DRAM, with many it computes at 1
// vdpbf16ps a cycle.
#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "elements.h"
#include "quire.h"

namespace quire {
namespace {

// Rows x 2 sums, the weights and an input must fit the registers.
#if defined(QUIRE_AVX512)
constexpr int kTileRows = 12;
#elif defined(__AVX2__)
constexpr int kTileRows = 3;
#else
constexpr int kTileRows = 2;
#endif
constexpr int kPanelColumns = 2 * kLanes;
constexpr int kChunkRows = 96;

inline uint32_t load_lane(const void* p) {
  uint32_t lane;
  memcpy(&lane, p, sizeof lane);
  return lane;
}

inline float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// What a lane of 32 bits adds to its sum: one product of floats, two of bfloat16.
template <class T>
struct Lane;

template <>
struct Lane<float> {
  static constexpr int kSteps = 1;
  using Weights = Vec;
  static inline Weights weights(const uint32_t* p) { return load(p); }
  static inline Vec dot(Vec sum, const Weights& w, uint32_t x) {
    return fma(w, splat(as_float(x)), sum);
  }
};

#if defined(__AVX512BF16__)
template <>
struct Lane<bf16> {
  static constexpr int kSteps = 2;
  using Weights = __m512i;
  static inline Weights weights(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static inline Vec dot(Vec sum, const Weights& w, uint32_t x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(static_cast<int>(x)));
  }
};
#else
template <>
struct Lane<bf16> {
  static constexpr int kSteps = 2;
  struct Weights {
    Vec even, odd;
  };
  static inline Weights weights(const uint32_t* p) { return {even_bf16(p), odd_bf16(p)}; }
  static inline Vec dot(Vec sum, const Weights& w, uint32_t x) {
    sum = fma(w.even, splat(as_float(x << 16)), sum);
    return fma(w.odd, splat(as_float(x & 0xffff0000u)), sum);
  }
};
#endif

template <int R>
struct Sums {
  Vec at[R][2];
};

// Sums of R rows over `lanes` lanes of k. Fetches as much of `ahead` as it goes.
template <class T, int R>
inline __attribute__((always_inline)) void add_chain(Sums<R>& out, const uint32_t* x,
                                                     int64_t x_stride, const uint32_t* w,
                                                     const uint32_t* ahead, int64_t lanes) {
  Vec sums[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = zero();
  // A pointer for every third row, as a machine's address reaches base, base + stride and
  // base + 2 stride: a pointer for each row would not fit the registers.
  const uint32_t* rows[(R + 2) / 3];
#pragma GCC unroll 4
  for (int i = 0; i < (R + 2) / 3; ++i) rows[i] = x + 3 * i * x_stride;
  const int64_t fetch = ahead - w;
  for (const uint32_t* end = w + lanes * kPanelColumns; w != end; w += kPanelColumns) {
    const auto lo = Lane<T>::weights(w), hi = Lane<T>::weights(w + kLanes);
    __builtin_prefetch(w + fetch, 0, 2);
    __builtin_prefetch(w + fetch + kLanes, 0, 2);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const uint32_t values = load_lane(rows[r / 3] + r % 3 * x_stride);
      sums[r][0] = Lane<T>::dot(sums[r][0], lo, values);
      sums[r][1] = Lane<T>::dot(sums[r][1], hi, values);
    }
#pragma GCC unroll 4
    for (int i = 0; i < (R + 2) / 3; ++i) ++rows[i];
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) out.at[r][0] = sums[r][0], out.at[r][1] = sums[r][1];
}

template <class T, int R>
void add_tree(Sums<R>& out, const uint32_t* x, int64_t x_stride, const uint32_t* w,
              const uint32_t* ahead, int64_t lanes, int splits) {
  if (splits == 1) return add_chain<T, R>(out, x, x_stride, w, ahead, lanes);
  const int64_t part = lanes / splits;
  Sums<R> open[4];  // finished branches that wait for their sibling, as digits of a counter
  int num_open = 0;
  for (int i = 0; i < splits; ++i) {
    const int64_t k = i * part;
    add_chain<T, R>(out, x + k, x_stride, w + k * kPanelColumns,
                    ahead + k * kPanelColumns, part);
    for (int bits = i; bits & 1; bits >>= 1) {
      --num_open;
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < 2; ++v) out.at[r][v] = add(open[num_open].at[r][v], out.at[r][v]);
    }
    if (i + 1 < splits) open[num_open++] = out;
  }
}

inline Vec silu(Vec x) {
  const Vec log2_e = max(mul(x, splat(1.44269504f)), splat(-126));  // below, 1e-36 and not -0
  return div(x, add(exp2_of<false>(sub(zero(), log2_e)), splat(1)));
}

// Puts the sums of some rows where `kMode` says.
template <class T, int kMode>
void finish(const LinearArgs& args, int64_t row, int64_t panel, const Vec (*sums)[2],
            int num_rows) {
  using Out = std::conditional_t<kMode == QUIRE_STORE_F32, float, T>;
  const LinearWeights& weights = *args.weights;
  const int64_t width = kMode == QUIRE_GATED ? weights.num_out / 2 : weights.num_out;
  const int64_t column = panel * (kMode == QUIRE_GATED ? kLanes : kPanelColumns);
  const int64_t left = width - column;
  Out* out = static_cast<Out*>(args.out) + row * args.out_stride + column;
  Vec bias[2] = {zero(), zero()};
  if (weights.bias)
    for (int v = 0; v < 2; ++v) bias[v] = load(weights.bias + panel * kPanelColumns + v * kLanes);
  for (int r = 0; r < num_rows; ++r, out += args.out_stride) {
    Vec lo = sums[r][0], hi = sums[r][1];
    if (weights.bias) lo = add(lo, bias[0]), hi = add(hi, bias[1]);
    if (kMode == QUIRE_GATED) {
      const Vec gate = rounded<T>(silu(rounded<T>(lo)));
      write(out, mul(gate, rounded<T>(hi)), left);
      continue;
    }
    if (kMode == QUIRE_ADD) lo = add(read(out, left), rounded<T>(lo));
    write(out, lo, left);
    if (left <= kLanes) continue;
    if (kMode == QUIRE_ADD) hi = add(read(out + kLanes, left - kLanes), rounded<T>(hi));
    write(out + kLanes, hi, left - kLanes);
  }
}

template <class T, int R>
void tile(const LinearArgs& args, int64_t row, int64_t panel, const uint32_t* w,
          const uint32_t* ahead) {
  int64_t lanes = args.weights->num_in / Lane<T>::kSteps;
  int64_t x_stride = args.x_stride / Lane<T>::kSteps;
  const uint32_t* x = static_cast<const uint32_t*>(args.x) + row * x_stride;
  int splits = args.weights->splits;
  Sums<R> sums;
  add_tree<T, R>(sums, x, x_stride, w, ahead, lanes, splits);
  switch (args.mode) {
    case QUIRE_STORE: return finish<T, QUIRE_STORE>(args, row, panel, sums.at, R);
    case QUIRE_STORE_F32: return finish<T, QUIRE_STORE_F32>(args, row, panel, sums.at, R);
    case QUIRE_ADD: return finish<T, QUIRE_ADD>(args, row, panel, sums.at, R);
    case QUIRE_GATED: return finish<T, QUIRE_GATED>(args, row, panel, sums.at, R);
  }
}

using Tile = void (*)(const LinearArgs&, int64_t, int64_t, const uint32_t*, const uint32_t*);

template <class T, int... R>
constexpr std::array<Tile, sizeof...(R)> tiles(std::integer_sequence<int, R...>) {
  return {tile<T, R + 1>...};
}
template <class T>
constexpr auto kTiles = tiles<T>(std::make_integer_sequence<int, kTileRows>());

// A piece of work: some panels for one chunk of rows.
struct Pieces {
  int64_t num_panels, panels_each, num_groups, num_chunks;

  Pieces(const LinearArgs& args, int team_size) {
    const LinearWeights& weights = *args.weights;
    num_panels = linear_panels(weights);
    num_chunks = (args.num_rows + kChunkRows - 1) / kChunkRows;
    // Enough pieces that no thread waits long at the end; enough panels that they stream.
    int64_t wanted = (16 * team_size + num_chunks - 1) / std::max<int64_t>(num_chunks, 1);
    panels_each = std::max<int64_t>(1, num_panels / wanted);
    num_groups = (num_panels + panels_each - 1) / panels_each;
  }
  int64_t count() const { return num_groups * num_chunks; }
};

template <class T>
void run(const LinearArgs& args, Team team) {
  const Pieces pieces(args, team.size);
  const auto* weights = static_cast<const uint32_t*>(args.weights->weight);
  const int64_t panel_size = args.weights->num_in / Lane<T>::kSteps * kPanelColumns;
  auto take = [&] { return static_cast<int64_t>(team.ticket->fetch_add(1)); };
  // One piece is taken in advance, to know what to fetch while the last panel is computed.
  int64_t next = take();
  while (next < pieces.count()) {
    const int64_t piece = next;
    next = take();
    const int64_t group = piece / pieces.num_chunks, chunk = piece % pieces.num_chunks;
    const int64_t first = group * pieces.panels_each;
    const int64_t end = std::min(first + pieces.panels_each, pieces.num_panels);
    const int64_t next_first = next / pieces.num_chunks * pieces.panels_each;
    // Even shares of the rows: two tiles of 10 and one of 11 rather than 12, 12 and 7.
    const int64_t begin = args.num_rows * chunk / pieces.num_chunks;
    const int64_t num_rows = args.num_rows * (chunk + 1) / pieces.num_chunks - begin;
    const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
    for (int64_t panel = first; panel < end; ++panel) {
      int64_t following = panel + 1 < end ? panel + 1 : next_first;
      if (following >= pieces.num_panels) following = panel;
      for (int64_t i = 0; i < num_tiles; ++i) {
        int64_t row = begin + num_rows * i / num_tiles;
        int64_t size = begin + num_rows * (i + 1) / num_tiles - row;
        const int64_t ahead = i == 0 ? following : panel;
        kTiles<T>[size - 1](args, row, panel, weights + panel * panel_size,
                            weights + ahead * panel_size);
      }
    }
  }
}

// The row of W that a column of a panel holds, or -1 beyond the last.
int64_t source_row(const LinearWeights& weights, int64_t panel, int column) {
  if (!weights.gated) {
    int64_t row = panel * kPanelColumns + column;
    return row < weights.num_out ? row : -1;
  }
  int64_t half = weights.num_out / 2, row = panel * kLanes + column % kLanes;
  if (row >= half) return -1;
  return column < kLanes ? row : half + row;
}

template <class T>
void pack_panel(const PackArgs& args, int64_t panel) {
  const LinearWeights& weights = args.weights;
  const int64_t lanes = weights.num_in / Lane<T>::kSteps;
  auto* out = static_cast<uint32_t*>(const_cast<void*>(weights.weight)) +
              panel * lanes * kPanelColumns;
  const T* rows[kPanelColumns];
  for (int column = 0; column < kPanelColumns; ++column) {
    int64_t row = source_row(weights, panel, column);
    rows[column] = row < 0 ? nullptr : static_cast<const T*>(args.source) + row * args.stride;
    if (weights.bias) {
      float value = 0;
      if (row >= 0) value = sum_of_lanes(read(static_cast<const T*>(args.source_bias) + row, 1));
      const_cast<float*>(weights.bias)[panel * kPanelColumns + column] = value;
    }
  }
  for (int64_t k = 0; k < lanes; ++k)
    for (int column = 0; column < kPanelColumns; ++column)
      *out++ = rows[column] ? load_lane(rows[column] + k * Lane<T>::kSteps) : 0;
}

}  // namespace
}  // namespace quire

using namespace quire;

int64_t linear_panels(const LinearWeights& weights) {
  int64_t columns = weights.gated ? weights.num_out / 2 : weights.num_out;
  int64_t each = weights.gated ? kLanes : kPanelColumns;
  return (columns + each - 1) / each;
}

void linear_part(const LinearArgs& args, Team team) {
  args.dtype == QUIRE_BF16 ? run<bf16>(args, team) : run<float>(args, team);
}

void quire_linear(const LinearArgs* args, int32_t num_threads) {
  parallel(num_threads, [=](Team team) { linear_part(*args, team); });
}

int32_t quire_panel_columns() { return kPanelColumns; }

void quire_pack(const PackArgs* args, int32_t num_threads) {
  parallel(num_threads, [=](Team team) {
    const int64_t num_panels = linear_panels(args->weights);
    for (int64_t panel = team.thread; panel < num_panels; panel += team.size)
      args->dtype == QUIRE_BF16 ? pack_panel<bf16>(*args, panel)
                                : pack_panel<float>(*args, panel);
  });
}
