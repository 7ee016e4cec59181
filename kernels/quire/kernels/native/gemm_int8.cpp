// Linear layers in int8. In each part of K, weights have a scale per output, inputs one per row.
//
// Layout. A panel has the same columns as in `gemm.cpp`. For each part of K in turn it has 32
// scales, 32 initial values of the sums, and the weights, four successive k in a 32-bit lane. Parts
// are padded with zeros. `quantize_rows` produces the inputs.
//
// Order. Integer sums are exact in any order. A part's sum is converted to float, multiplied by the
// weights' scale, then by the input's. The parts are added as a binary tree. Each part has its own
// scales, so ranks that divide K use those of a single rank, and compute branches of the tree.
#include <array>
#include <utility>
#include <vector>

#include "int8_dot.h"
#include "linear_pieces.h"
#include "linear_store.h"
#include "quantize.h"
#include "quire.h"

namespace quire {
namespace {

#if defined(QUIRE_AVX512)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 2;
#endif
constexpr int kGroup = 4;  // k in a lane
constexpr int64_t kGroupBytes = kGroup * kPanelColumns;
constexpr int64_t kHeaderBytes = 2 * 4 * kPanelColumns;

int64_t part_groups(const LinearWeights& weights) {
  return (weights.num_in / weights.splits + kGroup - 1) / kGroup;
}
int64_t part_bytes(const LinearWeights& weights) {
  return kHeaderBytes + part_groups(weights) * kGroupBytes;
}

template <int R>
struct Sums {
  Vec at[R][2];
};

// Computes the sums of R rows over one part of K. Prefetches as many weights `to_ahead` bytes on.
template <int R>
inline __attribute__((always_inline)) void add_part(Sums<R>& out, const uint8_t* x,
                                                    int64_t x_stride, const float* x_scales,
                                                    int splits, const char* part, int64_t to_ahead,
                                                    int64_t num_groups) {
  const auto* scales = reinterpret_cast<const float*>(part);
  const auto* begin = reinterpret_cast<const int32_t*>(part) + kPanelColumns;
  const auto* w = reinterpret_cast<const int8_t*>(part) + kHeaderBytes;
  Ints sums[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sums[r][0] = load_ints(begin), sums[r][1] = load_ints(begin + kLanes);
  // A pointer for every third row, as in `gemm.cpp`.
  const uint8_t* rows[(R + 2) / 3];
#pragma GCC unroll 4
  for (int i = 0; i < (R + 2) / 3; ++i) rows[i] = x + 3 * i * x_stride;
  for (const int8_t* end = w + num_groups * kGroupBytes; w != end; w += kGroupBytes) {
    const Int8Weights lo(w), hi(w + kGroup * kLanes);
    __builtin_prefetch(w + to_ahead, 0, 2);
    __builtin_prefetch(w + to_ahead + kGroup * kLanes, 0, 2);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t values;
      memcpy(&values, rows[r / 3] + r % 3 * x_stride, sizeof values);
      sums[r][0] = dot(sums[r][0], lo, values);
      sums[r][1] = dot(sums[r][1], hi, values);
    }
#pragma GCC unroll 4
    for (int i = 0; i < (R + 2) / 3; ++i) rows[i] += kGroup;
  }
  const Vec scale[2] = {load(scales), load(scales + kLanes)};
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Vec x_scale = splat(x_scales[r * splits]);
    out.at[r][0] = mul(mul(as_floats(sums[r][0]), scale[0]), x_scale);
    out.at[r][1] = mul(mul(as_floats(sums[r][1]), scale[1]), x_scale);
  }
}

template <int R>
void tile(const LinearArgs& args, int64_t row, int64_t panel, int64_t ahead) {
  const LinearWeights& weights = *args.weights;
  const int splits = weights.splits;
  const int64_t num_groups = part_groups(weights), bytes = part_bytes(weights);
  const char* part = static_cast<const char*>(weights.weight) + panel * splits * bytes;
  const int64_t to_ahead = (ahead - panel) * splits * bytes;
  const uint8_t* x = static_cast<const uint8_t*>(args.x) + row * args.x_stride;
  const float* x_scales = args.x_scales + row * splits;
  Sums<R> sums;
  Sums<R> open[4];  // finished branches without their sibling, as the digits of a binary counter
  int num_open = 0;
  for (int i = 0; i < splits; ++i, part += bytes, x += num_groups * kGroup, ++x_scales) {
    add_part<R>(sums, x, args.x_stride, x_scales, splits, part, to_ahead, num_groups);
    for (int bits = i; bits & 1; bits >>= 1) {
      --num_open;
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < 2; ++v) sums.at[r][v] = add(open[num_open].at[r][v], sums.at[r][v]);
    }
    if (i + 1 < splits) open[num_open++] = sums;
  }
  args.dtype == QUIRE_BF16 ? store_tile<bf16>(args, row, panel, sums.at, R)
                           : store_tile<float>(args, row, panel, sums.at, R);
}

using Tile = void (*)(const LinearArgs&, int64_t, int64_t, int64_t);

template <int... R>
constexpr std::array<Tile, sizeof...(R)> tiles(std::integer_sequence<int, R...>) {
  return {tile<R + 1>...};
}
constexpr auto kTiles = tiles(std::make_integer_sequence<int, kTileRows>());

template <class T>
void quantize_rows_of(const QuantizeArgs& args, int64_t begin, int64_t end) {
  const int64_t part = args.num_in / args.splits;
  const int64_t padded = (part + kGroup - 1) / kGroup * kGroup;
  for (int64_t row = begin; row < end; ++row)
    for (int i = 0; i < args.splits; ++i) {
      uint8_t* out = static_cast<uint8_t*>(args.out) + row * args.out_stride + i * padded;
      args.scales[row * args.splits + i] = quantize(
          static_cast<const T*>(args.x) + row * args.x_stride + i * part, part, kInputOffset, out);
      memset(out + part, 0, padded - part);
    }
}

template <class T>
void pack_panel(const PackArgs& args, int64_t panel) {
  check_panel<T>(args, panel);
  const LinearWeights& weights = args.weights;
  const int64_t part = weights.num_in / weights.splits, num_groups = part_groups(weights);
  char* at = static_cast<char*>(const_cast<void*>(weights.weight)) +
             panel * weights.splits * part_bytes(weights);
  std::vector<uint8_t> values(num_groups * kGroup);
  for (int i = 0; i < weights.splits; ++i, at += part_bytes(weights)) {
    auto* scales = reinterpret_cast<float*>(at);
    auto* begin = reinterpret_cast<int32_t*>(at) + kPanelColumns;
    for (int column = 0; column < kPanelColumns; ++column) {
      const int64_t row = source_row(weights, panel, column);
      std::fill(values.begin(), values.end(), 0);
      scales[column] = 0;
      if (row >= 0)
        scales[column] = quantize(static_cast<const T*>(args.source) + row * args.stride + i * part,
                                  part, 0, values.data());
      begin[column] = 0;
      for (int64_t k = 0; k < part; ++k)
        begin[column] -= kInputOffset * static_cast<int8_t>(values[k]);
      for (int64_t k = 0; k < num_groups; ++k)
        memcpy(at + kHeaderBytes + k * kGroupBytes + column * kGroup, &values[k * kGroup], kGroup);
    }
  }
  pack_bias<T>(args, panel);
}

void tile_of_rows(const LinearArgs& args, int64_t row, int64_t num_rows, int64_t panel,
                  int64_t ahead) {
  kTiles[num_rows - 1](args, row, panel, ahead);
}

}  // namespace

LinearTiles int8_tiles() { return {tile_of_rows, kTileRows}; }

}  // namespace quire

using namespace quire;

void quantize_rows(const QuantizeArgs& args, int64_t begin, int64_t end) {
  args.dtype == QUIRE_BF16 ? quantize_rows_of<bf16>(args, begin, end)
                           : quantize_rows_of<float>(args, begin, end);
}

void quire_quantize(const QuantizeArgs* args, int32_t num_threads) {
  parallel(num_threads, [=](Team team) {
    team.share_rows(args->num_rows,
                    [=](int64_t begin, int64_t end) { quantize_rows(*args, begin, end); });
  });
}

int64_t quire_int8_bytes(const LinearWeights* weights) {
  return linear_panels(*weights) * weights->splits * part_bytes(*weights);
}

void quire_pack_int8(const PackArgs* args, int32_t num_threads) {
  parallel(num_threads, [=](Team team) {
    team.share(linear_panels(args->weights), [=](int64_t panel) {
      args->dtype == QUIRE_BF16 ? pack_panel<bf16>(*args, panel) : pack_panel<float>(*args, panel);
    });
  });
}
