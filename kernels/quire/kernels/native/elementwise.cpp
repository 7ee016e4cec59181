// The operations of a layer between its matrix products (norms, rotary embedding), and the argmax
// of greedy sampling. Each row is computed alone and in one order: no other row affects its bits.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cmath>

#include "elements.h"
#include "quire.h"

namespace quire {
namespace {

// Rounds as Hugging Face does: the normed value is rounded before it is multiplied by the weight.
template <class T>
void rms_norm_row(const T* x, const T* weight, T* out, int64_t num_channels, float eps) {
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  for (int64_t c = 0; c < num_channels; c += kLanes) {
    const Vec value = read(x + c, num_channels - c);
    sums[c / kLanes % 4] = fma(value, value, sums[c / kLanes % 4]);
  }
  const float squares = sum_of_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  const Vec scale = splat(1 / std::sqrt(squares / static_cast<float>(num_channels) + eps));
  for (int64_t c = 0; c < num_channels; c += kLanes) {
    const int64_t left = num_channels - c;
    const Vec normed = rounded<T>(mul(read(x + c, left), scale));
    write(out + c, mul(read(weight + c, left), normed), left);
  }
}

template <class T>
void wide_norm_row(const T* x, const NormArgs& args, T* out) {
  const int64_t num_channels = args.num_channels;
  const float count = static_cast<float>(num_channels);
  const float* weight = static_cast<const float*>(args.weight);
  Vec mean = zero();
  if (args.kind == QUIRE_LAYER_NORM) {
    for (int64_t c = 0; c < num_channels; c += kLanes)
      mean = add(mean, read(x + c, num_channels - c));
    mean = splat(sum_of_lanes(mean) / count);
  }
  Vec squares = zero();
  for (int64_t c = 0; c < num_channels; c += kLanes) {
    const int64_t left = num_channels - c;
    Vec value = sub(read(x + c, left), mean);
    if (left < kLanes) value = first_lanes(value, static_cast<int>(left), zero());
    squares = fma(value, value, squares);
  }
  const Vec scale = splat(1 / std::sqrt(sum_of_lanes(squares) / count + args.eps));
  for (int64_t c = 0; c < num_channels; c += kLanes) {
    const int64_t left = num_channels - c;
    const Vec normed = mul(sub(read(x + c, left), mean), scale);
    const Vec value = mul(normed, read(weight + c, left));
    write(out + c, args.bias ? add(value, read(args.bias + c, left)) : value, left);
  }
}

template <class T>
void norm_rows_of(const NormArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    int64_t source = args.rows ? args.rows[row] : row;
    const T* x = static_cast<const T*>(args.x) + source * args.num_channels;
    T* out = static_cast<T*>(args.out) + row * args.num_channels;
    if (args.kind == QUIRE_RMS_NORM)
      rms_norm_row(x, static_cast<const T*>(args.weight), out, args.num_channels, args.eps);
    else
      wide_norm_row(x, args, out);
  }
}

template <class T>
void rotate_head(T* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const Vec c = read(cos + i, left), s = read(sin + i, left);
    const Vec x1 = read(x + i, left), x2 = read(x + half + i, left);
    write(x + i, sub(mul(x1, c), mul(x2, s)), left);
    write(x + half + i, add(mul(x2, c), mul(x1, s)), left);
  }
}

template <class T>
void rotate_tokens(const RotaryArgs& args, int64_t begin, int64_t end) {
  int half = args.rotary_size / 2;
  for (int64_t token = begin; token < end; ++token) {
    T* x = static_cast<T*>(args.x) + token * args.x_stride_t;
    int64_t row = args.positions[token] * half;
    for (int head = 0; head < args.num_heads; ++head)
      rotate_head(x + head * args.head_size, args.cos + row, args.sin + row, half);
  }
}

// Finds the greatest value, then the first column that equals it. NaN is never the greatest.
int64_t argmax_row(const float* x, int64_t size) {
  const Vec lowest = splat(-INFINITY);
  Vec best[4] = {lowest, lowest, lowest, lowest};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) best[j] = max(load(x + i + j * kLanes), best[j]);
  float greatest = max_of_lanes(max(max(best[0], best[1]), max(best[2], best[3])));
  for (; i < size; ++i) greatest = std::max(greatest, x[i]);
  const int64_t at = std::find(x, x + size, greatest) - x;
  return at < size ? at : 0;
}

}  // namespace
}  // namespace quire

using namespace quire;

void norm_rows(const NormArgs& args, int64_t begin, int64_t end) {
  args.dtype == QUIRE_BF16 ? norm_rows_of<bf16>(args, begin, end)
                           : norm_rows_of<float>(args, begin, end);
}

void rotary_rows(const RotaryArgs& args, int64_t begin, int64_t end) {
  args.dtype == QUIRE_BF16 ? rotate_tokens<bf16>(args, begin, end)
                           : rotate_tokens<float>(args, begin, end);
}

void quire_norm(const NormArgs* args, int32_t num_threads) {
  parallel(num_threads, [=](Team team) {
    team.share_rows(args->num_rows,
                    [=](int64_t begin, int64_t end) { norm_rows(*args, begin, end); });
  });
}

void quire_rotary(const RotaryArgs* args, int32_t num_threads) {
  parallel(num_threads, [=](Team team) {
    team.share_rows(args->num_tokens,
                    [=](int64_t begin, int64_t end) { rotary_rows(*args, begin, end); });
  });
}

void quire_argmax(const ArgmaxArgs* args, int32_t num_threads) {
  parallel(num_threads, [=](Team team) {
    team.share(args->num_rows, [=](int64_t row) {
      args->out[row] = argmax_row(args->x + row * args->stride, args->num_columns);
    });
  });
}

void quire_huge_pages(void* start, int64_t size) {
#if defined(__linux__)
  constexpr uintptr_t kHuge = 2 << 20;
  uintptr_t first = (reinterpret_cast<uintptr_t>(start) + kHuge - 1) & ~(kHuge - 1);
  uintptr_t end = (reinterpret_cast<uintptr_t>(start) + size) & ~(kHuge - 1);
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
}
