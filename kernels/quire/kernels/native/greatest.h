// The greatest of a row's outputs, found while they are computed, so that none is written.
#pragma once

#include <climits>
#include <cmath>

#include "simd.h"

namespace quire {

// Of the columns of one row that one thread computes, in any order: lane i has the greatest of
// those that are i modulo 16, and of equals the first. NaN is never greater, nor is a banned
// column.
struct Greatest {
  float value[kLanes];
  int32_t column[kLanes];
  const int32_t* banned = nullptr;
  int64_t num_banned = 0;

  void clear(const int32_t* columns, int64_t num_columns) {
    for (int i = 0; i < kLanes; ++i) value[i] = -INFINITY, column[i] = INT_MAX;
    banned = columns, num_banned = num_columns;
  }

  bool is_banned(int32_t one) const {
    for (int64_t i = 0; i < num_banned; ++i)
      if (banned[i] == one) return true;
    return false;
  }

  // Column `first` and the next ones.
  void take(const Vec& x, int32_t first, int64_t count) {
#if defined(QUIRE_AVX512)
    const uint32_t wanted = count < kLanes ? (1u << (count > 0 ? count : 0)) - 1 : 0xffff;
    const __mmask16 as_great =
        _mm512_mask_cmp_ps_mask(static_cast<__mmask16>(wanted), x, load(value), _CMP_GE_OQ);
    if (as_great == 0) return;  // as nearly always, once some columns have been seen
#endif
    float lanes[kLanes];
    store(lanes, x);
    for (int i = 0; i < kLanes && i < count; ++i) {
      if (!(lanes[i] >= value[i])) continue;
      if (lanes[i] == value[i] && first + i >= column[i]) continue;
      if (is_banned(first + i)) continue;
      value[i] = lanes[i], column[i] = first + i;
    }
  }
};

// Of a row of which each of `num_threads` threads has seen some columns; `stride` rows from one
// thread's to the next one's. Writes the value and the column: 0 where all are NaN.
inline void write_greatest(const Greatest* seen, int num_threads, int64_t stride, float* out) {
  float value = -INFINITY;
  int32_t column = INT_MAX;
  for (int thread = 0; thread < num_threads; ++thread, seen += stride)
    for (int i = 0; i < kLanes; ++i) {
      if (seen->value[i] < value) continue;
      if (seen->value[i] == value && seen->column[i] >= column) continue;
      value = seen->value[i], column = seen->column[i];
    }
  out[0] = value;
  out[1] = static_cast<float>(column == INT_MAX ? 0 : column);
}

}  // namespace quire
