// The parts of linear layers that do not depend on the weights' type: which output columns a panel
// has, and how a tile's sums become outputs.
#pragma once

#include <type_traits>

#include "elements.h"
#include "greatest.h"
#include "linear_pieces.h"
#include "quire.h"

namespace quire {

inline int64_t linear_panels(const LinearWeights& weights) {
  int64_t columns = weights.gated ? weights.num_out / 2 : weights.num_out;
  int64_t each = weights.gated ? kLanes : kPanelColumns;
  return (columns + each - 1) / each;
}

// The row of W in a column of a panel, or -1 past the last row.
inline int64_t source_row(const LinearWeights& weights, int64_t panel, int column) {
  if (!weights.gated) {
    int64_t row = panel * kPanelColumns + column;
    return row < weights.num_out ? row : -1;
  }
  int64_t half = weights.num_out / 2, row = panel * kLanes + column % kLanes;
  if (row >= half) return -1;
  return column < kLanes ? row : half + row;
}

// Sets `is_broken` if a weight of the panel is NaN or infinite: its exponent is all ones. Reading
// row by row also brings the panel into the cache, for packing it in another order.
template <class T>
void check_panel(const PackArgs& args, int64_t panel) {
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  constexpr Bits kExponent = sizeof(T) == 2 ? 0x7f80 : 0x7f800000;
  constexpr Bits kLowest = kExponent & (~kExponent + 1);
  Bits seen = 0;
  for (int column = 0; column < kPanelColumns; ++column) {
    const int64_t row = source_row(args.weights, panel, column);
    if (row < 0) continue;
    const Bits* bits =
        reinterpret_cast<const Bits*>(static_cast<const T*>(args.source) + row * args.stride);
    for (int64_t k = 0; k < args.weights.num_in; ++k)
      seen |= static_cast<Bits>((bits[k] & kExponent) + kLowest);  // all ones set the sign bit
  }
  if (seen >> (8 * sizeof(T) - 1)) __atomic_store_n(args.is_broken, 1, __ATOMIC_RELAXED);
}

template <class T>
void pack_bias(const PackArgs& args, int64_t panel) {
  const LinearWeights& weights = args.weights;
  if (!weights.bias) return;
  float* out = const_cast<float*>(weights.bias) + panel * kPanelColumns;
  for (int column = 0; column < kPanelColumns; ++column) {
    const int64_t row = source_row(weights, panel, column);
    const T* bias = static_cast<const T*>(args.source_bias) + row;
    out[column] = row < 0 ? 0 : sum_of_lanes(read(bias, 1));
  }
}

inline Vec silu(Vec x) {
  const Vec log2_e = max(mul(x, splat(1.44269504f)), splat(-126));  // below: 1e-36, not -0
  return div(x, add(exp2_of<false>(sub(zero(), log2_e)), splat(1)));
}

// The tanh approximation of GELU.
inline Vec gelu(const Vec& x) {
  const Vec cubed = mul(mul(x, x), x);
  const Vec inner = mul(splat(0.79788456f), add(x, mul(splat(0.044715f), cubed)));
  return mul(mul(splat(0.5f), x), add(splat(1), tanh_of(inner)));
}

inline Vec at_most(Vec x, float limit) {
  return sub(zero(), max(splat(-limit), sub(zero(), x)));  // keeps NaN
}

// See QUIRE_GATED_CLAMPED.
inline Vec clamped_glu(Vec gate, Vec up, float alpha, float limit) {
  gate = at_most(gate, limit);
  up = max(splat(-limit), at_most(up, limit));
  const Vec log2_e = max(splat(-126), mul(mul(gate, splat(alpha)), splat(1.44269504f)));
  const Vec glu = div(gate, add(exp2_of<false>(sub(zero(), log2_e)), splat(1)));
  return mul(add(up, splat(1)), glu);
}

inline Vec logits(Vec x, float scale, float cap) {
  if (scale != 1) x = mul(x, splat(scale));
  return cap > 0 ? mul(tanh_of(div(x, splat(cap))), splat(cap)) : x;
}

// Turns the sums of some rows of a panel into outputs, as `kMode` says, and stores them.
template <class T, int kMode>
void finish(const LinearArgs& args, int64_t row, int64_t panel, const Vec (*sums)[2],
            int num_rows) {
  constexpr bool kIsFloat = kMode == QUIRE_STORE_F32 || kMode == QUIRE_LOGITS_F32;
  constexpr bool kIsClamped = kMode == QUIRE_GATED_CLAMPED;
  constexpr bool kIsGated = kMode == QUIRE_GATED || kMode == QUIRE_GATED_GELU || kIsClamped;
  using Out = std::conditional_t<kIsFloat, float, T>;
  const LinearWeights& weights = *args.weights;
  const int64_t width = kIsGated ? weights.num_out / 2 : weights.num_out;
  const int64_t column = panel * (kIsGated ? kLanes : kPanelColumns);
  const int64_t left = width - column;
  Out* out = static_cast<Out*>(args.out) + row * args.out_stride + column;
  Vec bias[2] = {zero(), zero()};
  if (weights.bias)
    for (int v = 0; v < 2; ++v) bias[v] = load(weights.bias + panel * kPanelColumns + v * kLanes);
  for (int r = 0; r < num_rows; ++r, out += args.out_stride) {
    Vec lo = sums[r][0], hi = sums[r][1];
    if (args.addend) {
      const float* addend = args.addend + (row + r - args.addend_row) * kPanelColumns;
      lo = add(lo, load(addend)), hi = add(hi, load(addend + kLanes));
    }
    if (weights.bias) lo = add(lo, bias[0]), hi = add(hi, bias[1]);
    if (kIsClamped) {
      write(out, clamped_glu(rounded<T>(lo), rounded<T>(hi), weights.alpha, weights.limit), left);
      continue;
    }
    if (kIsGated) {
      const Vec x = rounded<T>(lo);
      const Vec gate = rounded<T>(kMode == QUIRE_GATED ? silu(x) : gelu(x));
      write(out, mul(gate, rounded<T>(hi)), left);
      continue;
    }
    if (kMode == QUIRE_LOGITS_F32)
      lo = logits(lo, args.scale, args.cap), hi = logits(hi, args.scale, args.cap);
    if (kMode == QUIRE_LOGITS_F32 && row + r >= args.num_rows - args.num_greedy) {
      Greatest& greatest = args.greatest[row + r - (args.num_rows - args.num_greedy)];
      greatest.take(lo, column, left);
      greatest.take(hi, column + kLanes, left - kLanes);
      continue;
    }
    if (kMode == QUIRE_ADD) lo = add(read(out, left), rounded<T>(lo));
    write(out, lo, left);
    if (left <= kLanes) continue;
    if (kMode == QUIRE_ADD) hi = add(read(out + kLanes, left - kLanes), rounded<T>(hi));
    write(out + kLanes, hi, left - kLanes);
  }
}

// Calls `finish` with the mode of `args`.
template <class T>
void store_tile(const LinearArgs& args, int64_t row, int64_t panel, const Vec (*sums)[2],
                int num_rows) {
  switch (args.mode) {
    case QUIRE_STORE: return finish<T, QUIRE_STORE>(args, row, panel, sums, num_rows);
    case QUIRE_STORE_F32: return finish<T, QUIRE_STORE_F32>(args, row, panel, sums, num_rows);
    case QUIRE_ADD: return finish<T, QUIRE_ADD>(args, row, panel, sums, num_rows);
    case QUIRE_GATED: return finish<T, QUIRE_GATED>(args, row, panel, sums, num_rows);
    case QUIRE_LOGITS_F32: return finish<T, QUIRE_LOGITS_F32>(args, row, panel, sums, num_rows);
    case QUIRE_GATED_GELU: return finish<T, QUIRE_GATED_GELU>(args, row, panel, sums, num_rows);
    case QUIRE_GATED_CLAMPED:
      return finish<T, QUIRE_GATED_CLAMPED>(args, row, panel, sums, num_rows);
  }
}

}  // namespace quire
