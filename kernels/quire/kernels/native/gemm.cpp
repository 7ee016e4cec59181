// Linear layers over packed weights: x [T, K] times W [N, K] transposed.
//
// Layout. A panel is two vectors of output columns (in a gated layer, a vector of gates and the
// vector of their ups) with all their weights over K, contiguous. In bfloat16 two successive k are
// adjacent in a 32-bit lane, as vdpbf16ps requires.
//
// Order. An output element is one chain of multiply-adds over k, or `splits` chains over equal
// parts of K that are added as a binary tree. Nothing else affects it, so a row has the same bits
// among any number of rows. Ranks that divide K compute branches of the tree.
//
// Speed. A tile of kTileRows x one panel keeps its sums in registers. Rows are processed in chunks
// that stay in level-2 cache while a panel passes, and the first tile of a panel prefetches the
// next panel. One row thus reads at the speed of DRAM, and many rows compute one vdpbf16ps a cycle.
#include <array>
#include <utility>

#include "elements.h"
#include "lane.h"
#include "linear_pieces.h"
#include "linear_store.h"
#include "quire.h"

namespace quire {
namespace {

// The sums (rows x 2), the weights and an input must fit in the registers.
#if defined(QUIRE_AVX512)
constexpr int kTileRows = 12;
#elif defined(__AVX2__)
constexpr int kTileRows = 3;
#else
constexpr int kTileRows = 2;
#endif

template <int R>
struct Sums {
  Vec at[R][2];
};

// Computes the sums of R rows over `lanes` lanes of k. Prefetches as many weights from `ahead`.
template <class T, int R>
inline __attribute__((always_inline)) void add_chain(Sums<R>& out, const uint32_t* x,
                                                     int64_t x_stride, const uint32_t* w,
                                                     const uint32_t* ahead, int64_t lanes) {
  Vec sums[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = zero();
  // A pointer for every third row: x86 addresses reach base, base + stride and base + 2 stride, and
  // a pointer for each row would not fit in the registers.
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
  Sums<R> open[4];  // finished branches without their sibling, as the digits of a binary counter
  int num_open = 0;
  for (int i = 0; i < splits; ++i) {
    const int64_t k = i * part;
    add_chain<T, R>(out, x + k, x_stride, w + k * kPanelColumns, ahead + k * kPanelColumns, part);
    for (int bits = i; bits & 1; bits >>= 1) {
      --num_open;
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < 2; ++v) out.at[r][v] = add(open[num_open].at[r][v], out.at[r][v]);
    }
    if (i + 1 < splits) open[num_open++] = out;
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
  store_tile<T>(args, row, panel, sums.at, R);
}

using Tile = void (*)(const LinearArgs&, int64_t, int64_t, const uint32_t*, const uint32_t*);

template <class T, int... R>
constexpr std::array<Tile, sizeof...(R)> tiles(std::integer_sequence<int, R...>) {
  return {tile<T, R + 1>...};
}
template <class T>
constexpr auto kTiles = tiles<T>(std::make_integer_sequence<int, kTileRows>());

template <class T>
void tile_of_rows(const LinearArgs& args, int64_t row, int64_t num_rows, int64_t panel,
                  int64_t ahead) {
  const auto* weights = static_cast<const uint32_t*>(args.weights->weight);
  const int64_t panel_size = args.weights->num_in / Lane<T>::kSteps * kPanelColumns;
  const Tile tile = kTiles<T>[num_rows - 1];
  tile(args, row, panel, weights + panel * panel_size, weights + ahead * panel_size);
}

template <class T>
void pack_panel(const PackArgs& args, int64_t panel) {
  const LinearWeights& weights = args.weights;
  const int64_t lanes = weights.num_in / Lane<T>::kSteps;
  auto* out =
      static_cast<uint32_t*>(const_cast<void*>(weights.weight)) + panel * lanes * kPanelColumns;
  const T* rows[kPanelColumns];
  for (int column = 0; column < kPanelColumns; ++column) {
    int64_t row = source_row(weights, panel, column);
    rows[column] = row < 0 ? nullptr : static_cast<const T*>(args.source) + row * args.stride;
  }
  check_panel<T>(args, panel);
  pack_bias<T>(args, panel);
  for (int64_t k = 0; k < lanes; ++k)
    for (int column = 0; column < kPanelColumns; ++column)
      *out++ = rows[column] ? load_lane(rows[column] + k * Lane<T>::kSteps) : 0;
}

}  // namespace

LinearTiles plain_tiles(const LinearArgs& args) {
  return {args.dtype == QUIRE_BF16 ? tile_of_rows<bf16> : tile_of_rows<float>, kTileRows};
}

}  // namespace quire

using namespace quire;

int32_t quire_panel_columns() { return kPanelColumns; }

void quire_pack(const PackArgs* args, int32_t num_threads) {
  parallel(num_threads, [=](Team team) {
    team.share(linear_panels(args->weights), [=](int64_t panel) {
      args->dtype == QUIRE_BF16 ? pack_panel<bf16>(*args, panel) : pack_panel<float>(*args, panel);
    });
  });
}
