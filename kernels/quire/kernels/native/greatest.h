// Finds the greatest logit of a row while logits are computed, so that none has to be written.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>

#include "quire.h"
#include "simd.h"

namespace quire {

// The greatest logits among the columns of one row that one thread computes, in any order. Lane i
// has the greatest of the columns that are i modulo 16, the first of equals. NaN and minus infinity
// are never the greatest. The changes of `GreedyEdits` are applied before logits are compared.
class Greatest {
 public:
  float value[kLanes];
  int32_t column[kLanes];

  void clear(const GreedyEdits* edits, int64_t row) {
    for (int i = 0; i < kLanes; ++i) value[i] = -INFINITY, column[i] = INT_MAX;
    edits_ = edits, row_ = row;
    last_ = 0, next_ = edits ? 0 : INT_MAX;
    const int32_t masked = edits ? edits->mask_of[row] : -1;
    mask_ = masked < 0 ? nullptr : edits->masks + masked * edits->num_words;
  }

  // Takes the logits of 16 columns from `first`, a multiple of 16. Only the first `count` exist.
  void take(Vec x, int32_t first, int64_t count) {
    if (next_ < first + kLanes || first < last_) x = edited(x, first);
    last_ = first;
    uint32_t wanted = count < kLanes ? (1u << (count > 0 ? count : 0)) - 1 : 0xffff;
    if (mask_) wanted &= allowed(first + edits_->first_column);
#if defined(QUIRE_AVX512)
    const __mmask16 as_great =
        _mm512_mask_cmp_ps_mask(static_cast<__mmask16>(wanted), x, load(value), _CMP_GE_OQ);
    if (as_great == 0) return;  // the usual case once some columns have been seen
#endif
    float lanes[kLanes];
    store(lanes, x);
    for (int i = 0; i < kLanes; ++i) {
      if (!(wanted >> i & 1) || !(lanes[i] >= value[i]) || lanes[i] == -INFINITY) continue;
      if (lanes[i] == value[i] && first + i >= column[i]) continue;
      value[i] = lanes[i], column[i] = first + i;
    }
  }

 private:
  // The mask's bits of 16 tokens from `token` on.
  uint32_t allowed(int64_t token) const {
    const int64_t word = token / 32, num_words = edits_->num_words;
    uint64_t bits = word < num_words ? mask_[word] : 0;
    if (word + 1 < num_words) bits |= static_cast<uint64_t>(mask_[word + 1]) << 32;
    return bits >> token % 32 & 0xffff;
  }

  // The logits of 16 columns with their edits. Also sets `next_`.
  Vec edited(const Vec& x, int32_t first) {
    const GreedyEdits& e = *edits_;
    const int32_t token = first + e.first_column, end = token + kLanes;
    float lanes[kLanes];
    store(lanes, x);
    const int32_t *biased_end = e.biased_ids + e.biased_starts[row_ + 1],
                  *seen_end = e.seen_ids + e.seen_starts[row_ + 1];
    const int32_t* biased =
        std::lower_bound(e.biased_ids + e.biased_starts[row_], biased_end, token);
    for (; biased < biased_end && *biased < end; ++biased)
      if (*biased >= token) lanes[*biased - token] += e.bias[biased - e.biased_ids];
    const int32_t* seen = std::lower_bound(e.seen_ids + e.seen_starts[row_], seen_end, token);
    for (; seen < seen_end && *seen < end; ++seen) {
      if (*seen < token) continue;
      float& logit = lanes[*seen - token];
      const int32_t count = e.seen_counts[seen - e.seen_ids];
      logit = logit > 0 ? logit / e.repetition[row_] : logit * e.repetition[row_];
      if (count > 0) logit -= e.frequency[row_] * count + e.presence[row_];
    }
    next_ = INT_MAX;
    if (biased < biased_end) next_ = *biased - e.first_column;
    if (seen < seen_end) next_ = std::min(next_, *seen - e.first_column);
    return load(lanes);
  }

  const GreedyEdits* edits_ = nullptr;
  const uint32_t* mask_ = nullptr;
  int64_t row_ = 0;
  int32_t last_ = 0;        // the first of the columns that were taken last
  int32_t next_ = INT_MAX;  // the first column after those that has an edit
};

// Combines the results of `num_threads` threads, each for some columns of one row. A thread's entry
// is `stride` after the previous thread's. Writes the value and its column, or column 0 if none.
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
