// What a layer does between its matrix products: RMS norm, rotary embedding; and the argmax of
// greedy sampling. Rows are shared evenly among the threads; each row is computed alone, in one
// order, so its bits are its own.
#include "quire.h"
#include "vec.h"

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

// Hugging Face's roundings: the normed value is rounded before it meets the weight.
template <class T>
void norm_row(const T* x, const T* weight, T* out, int64_t num_channels, float eps) {
  F sums[4] = {};
  int64_t whole = num_channels / kLanes * kLanes;
  int rest = static_cast<int>(num_channels - whole);
  for (int64_t c = 0; c < whole; c += kLanes) {
    F value = load(x + c);
    F& sum = sums[c / kLanes % 4];
    sum = fma(value, value, sum);
  }
  F tail = load_n(x + whole, rest);
  float squares = sum((sums[0] + sums[1]) + (sums[2] + sums[3]) + tail * tail);
  F scale = splat(1.0f / std::sqrt(squares / static_cast<float>(num_channels) + eps));
  for (int64_t c = 0; c < whole; c += kLanes)
    store(out + c, load(weight + c) * rounded<T>(load(x + c) * scale));
  if (rest)
    store_n(out + whole, load_n(weight + whole, rest) * rounded<T>(tail * scale), rest);
}

template <class T>
void norm_rows(const NormArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    int64_t source = args.rows ? args.rows[row] : row;
    norm_row(static_cast<const T*>(args.x) + source * args.num_channels,
             static_cast<const T*>(args.weight),
             static_cast<T*>(args.out) + row * args.num_channels, args.num_channels, args.eps);
  }
}

template <class T>
void rotate_head(T* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i += kLanes) {
    int n = std::min(kLanes, half - i);
    F c = load_n(cos + i, n), s = load_n(sin + i, n);
    F x1 = load_n(x + i, n), x2 = load_n(x + half + i, n);
    store_n(x + i, x1 * c - x2 * s, n);
    store_n(x + half + i, x2 * c + x1 * s, n);
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

int64_t argmax_row(const float* x, int64_t n) {
  // Four running maxima of whole vectors, then a search for the first that equals the greatest.
  F best[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) {
      F value = load(x + i + j * kLanes);
      best[j] = value > best[j] ? value : best[j];
    }
  float lanes[4 * kLanes], greatest = -INFINITY;
  std::memcpy(lanes, best, sizeof lanes);
  for (float lane : lanes) greatest = std::max(greatest, lane);
  for (; i < n; ++i) greatest = std::max(greatest, x[i]);
  for (i = 0; i < n && x[i] != greatest;) ++i;
  return i < n ? i : 0;
}

}  // namespace

void rms_norm_part(const NormArgs& args, Team team) {
  int64_t begin = args.num_rows * team.thread / team.size;
  int64_t end = args.num_rows * (team.thread + 1) / team.size;
  args.dtype == QUIRE_BF16 ? norm_rows<bf16>(args, begin, end) : norm_rows<float>(args, begin, end);
}

void rotary_part(const RotaryArgs& args, Team team) {
  int64_t begin = args.num_tokens * team.thread / team.size;
  int64_t end = args.num_tokens * (team.thread + 1) / team.size;
  args.dtype == QUIRE_BF16 ? rotate_tokens<bf16>(args, begin, end)
                           : rotate_tokens<float>(args, begin, end);
}

void quire_rms_norm(const NormArgs* args, int32_t num_threads) {
  parallel(num_threads, [=](Team team) { rms_norm_part(*args, team); });
}

void quire_rotary(const RotaryArgs* args, int32_t num_threads) {
  parallel(num_threads, [=](Team team) { rotary_part(*args, team); });
}

void quire_argmax(const ArgmaxArgs* args, int32_t num_threads) {
  parallel(num_threads, [=](Team team) {
    for (int64_t row = team.thread; row < args->num_rows; row += team.size)
      args->out[row] = argmax_row(args->x + row * args->stride, args->num_columns);
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
