// Causal attention over the paged KV cache, for decodes and prefills alike.
//
// A split is 128 tokens, counted from token 0. A row's result is computed split by split, from the
// first split in its window on: each split has a softmax of its own, which is blended in order into
// the running result. Units (`attention_plan.cpp`) only determine which thread computes a split and
// for how many rows at once. A token thus has the same bits as a decode, in any chunk of its
// prompt, alone, in any batch, with its prefix shared or not, on any number of threads.
//
// Traffic of one unit: K and V of its splits once per run of queries that share their blocks, and
// q and out once.

#include "attention.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "attention_cache.h"
#include "attention_tile.h"

namespace quire {
namespace {

// A thread's workspace. It grows as needed and is freed when the thread ends.
struct Scratch {
  char* bytes = nullptr;
  size_t size = 0;
  ~Scratch() { free(bytes); }
  char* at_least(size_t wanted) {
    if (wanted > size) {
      free(bytes);
      size = (wanted + 4095) / 4096 * 4096;
      bytes = static_cast<char*>(aligned_alloc(4096, size));
    }
    return bytes;
  }
};

// The running softmax of some rows: the maximum of their scores, and the sums relative to it.
struct Rows {
  float* max;     // [rows], read 16 at a time
  float* sum;     // [rows, 16]: partial sums
  float* values;  // [rows, D]
};

// One step of a unit: a split of one head, for queries `first` to `end`, which share its blocks.
struct Step {
  int split, head, first, end;
};

// Computes units. q and out have the type `Element`, the cache has the type `Stored`.
template <class Dot, class Element, class Stored = Element>
class Attention {
 public:
  Attention(const AttendArgs& args, AttendPlan& plan, Scratch& scratch)
      : args_(args),
        plan_(plan),
        cache_(args),
        head_size_(args.head_size),
        group_(args.num_heads / args.num_kv_heads),
        score_scale_(args),
        scratch_(scratch) {}

  void run(const Unit& unit) {
    unit_ = &unit;
    take_scratch();
    pack_queries();
    Tiles tiles[2];
    Tiles *now = &tiles[0], *next = &tiles[1];
    Step step = first_step();
    if (step.split < unit.end_split) {
      find(step, *now);
      cache_.fetch(*now);
    }
    while (step.split < unit.end_split) {
      const Step after = following(step);
      const bool more = after.split < unit.end_split;
      if (more) find(after, *next);
      attend(step, *now, more ? *next : *now);
      if (more) cache_.fetch(*next);
      step = after;
      std::swap(now, next);
    }
    if (unit.merge < 0) return write_out(unit, rows_);
    const Merge& merge = plan_.merges[unit.merge];
    if (plan_.parts_done[unit.merge].fetch_add(1) + 1 < merge.num_parts) return;
    plan_.parts_done[unit.merge].store(0);
    join(merge);
  }

 private:
  static constexpr bool kDirect = CacheReader<Dot, Stored>::kDirect;

  void find(const Step& step, Tiles& tiles) const {
    cache_.find(plan_.queries[step.first].row, step.head, step.split, tiles);
  }

  int num_queries() const { return unit_->end_query - unit_->first_query; }
  int num_rows() const { return num_queries() * (unit_->end_head - unit_->first_head) * group_; }
  int row_of(int head, int query) const {
    return ((head - unit_->first_head) * num_queries() + query - unit_->first_query) * group_;
  }

  void take_scratch() {
    const int64_t rows = num_rows();
    const int64_t work = kMaxRows * kSplitTokens * 8;
    const int64_t state = rows * floats_per_row(head_size_) * 4;
    char* at = scratch_.at_least(rows * kQueryStride + cache_.room() + work + state);
    queries_ = at, at += rows * kQueryStride;
    cache_.use_room(at), at += cache_.room();
    scores_ = reinterpret_cast<float*>(at), at += kMaxRows * kSplitTokens * 4;
    weights_ = at, at += kMaxRows * kSplitTokens * 4;
    rows_ = rows_at(reinterpret_cast<float*>(at));
  }

  void pack_queries() {
    const auto* q = static_cast<const Element*>(args_.q);
    for (int head = unit_->first_head; head < unit_->end_head; ++head)
      for (int query = unit_->first_query; query < unit_->end_query; ++query) {
        const Element* from =
            q + plan_.queries[query].token * args_.q_stride_t + int64_t{head} * group_ * head_size_;
        char* to = queries_ + int64_t{row_of(head, query)} * kQueryStride;
        for (int i = 0; i < group_; ++i, from += head_size_, to += kQueryStride)
          if (Dot::kPack == 4 / sizeof(Element))
            memcpy(to, from, head_size_ * sizeof(Element));
          else
            for (int d = 0; d < head_size_; d += kLanes) store(to + d * 4, load_bf16(from + d));
      }
  }

  Step first_step() const {
    return settled({unit_->first_split, unit_->first_head, unit_->first_query, 0});
  }

  Step following(Step step) const {
    step.first = step.end;
    return settled(step);
  }

  static bool sees(const Query& query, int split) {
    return query.visible > split * kSplitTokens && query.hidden < (split + 1) * kSplitTokens;
  }
  static int first_split(const Query& query) { return query.hidden / kSplitTokens; }

  // The next run of queries at or after `step.first`: within its head, then in the next head, then
  // in the next split. The split is the first one of all queries in the run or of none of them.
  Step settled(Step step) const {
    const Query* queries = plan_.queries.data();
    for (; step.split < unit_->end_split; ++step.split, step.head = unit_->first_head) {
      for (; step.head < unit_->end_head; ++step.head, step.first = unit_->first_query) {
        while (step.first < unit_->end_query && !sees(queries[step.first], step.split))
          ++step.first;
        if (step.first == unit_->end_query) continue;
        const auto starts = [&](int query) { return first_split(queries[query]) == step.split; };
        step.end = step.first + 1;
        while (step.end < unit_->end_query && queries[step.end].shared > step.split &&
               sees(queries[step.end], step.split) && starts(step.end) == starts(step.first))
          ++step.end;
        return step;
      }
      step.first = unit_->first_query;
    }
    return step;
  }

  // While K is read, this step's V is prefetched; while V is read, the next step's K.
  void attend(const Step& step, const Tiles& tiles, const Tiles& next) {
    const int num_rows = (step.end - step.first) * group_;
    const int num_blocks = (num_rows + kMaxRows - 1) / kMaxRows;
    const bool in_place = kDirect && cache_.part_tokens() == kTileTokens;
    for (int i = 0; i < num_blocks; ++i) {
      const int first = num_rows * i / num_blocks;
      const int count = num_rows * (i + 1) / num_blocks - first;
      attend_block<kMaxRows>(step, tiles, first, count, i == 0 && in_place ? tiles.v_part : tiles.k,
                             i == 0 && kDirect ? next.k_part : tiles.v);
    }
  }

  template <int kRows>
  void attend_block(const Step& step, const Tiles& tiles, int first, int count,
                    const char* const* ahead_of_scores, const char* const* ahead_of_values) {
    if constexpr (kRows > 1)
      if (count < kRows)
        return attend_block<kRows - 1>(step, tiles, first, count, ahead_of_scores, ahead_of_values);
    const int row = row_of(step.head, step.first) + first;
    Seen seen[kRows];
    int least = kSplitTokens, most = 0;
    for (int i = 0; i < kRows; ++i) {
      const Query& query = plan_.queries[step.first + (first + i) / group_];
      seen[i].first = std::max(query.hidden - step.split * kSplitTokens, 0);
      seen[i].end = std::min(query.visible - step.split * kSplitTokens, kSplitTokens);
      least = std::min(least, seen[i].first);
      most = std::max(most, seen[i].end);
    }
    // Tiles before all windows are skipped: their weights would be zeros.
    const int first_tile = least / kTileTokens, first_token = first_tile * kTileTokens;
    for (Seen& each : seen) each.first -= first_token, each.end -= first_token;
    const int num_tiles = (most + kTileTokens - 1) / kTileTokens - first_tile;
    const int first_part = first_tile * (kTileTokens / cache_.part_tokens());
    const int num_lines = int(cache_.tile_bytes() / kLineBytes);
    score_rows<Dot, kRows>(queries_ + int64_t{row} * kQueryStride, num_lines, tiles.k + first_tile,
                           ahead_of_scores + first_tile, num_tiles, scores_);
    Vec sums[kRows];
    const float* k_scales = cache_.kIsInt8 ? tiles.scales.k + first_token : nullptr;
    const float* v_scales = cache_.kIsInt8 ? tiles.scales.v + first_token : nullptr;
    const Vec max = weigh<Dot, kRows>(scores_, weights_, num_tiles, seen, score_scale_, k_scales,
                                      v_scales, sums);
    const bool starts = unit_->merge >= 0 || step.split == first_split(plan_.queries[step.first]);
    const Rows to = unit_->merge < 0 ? rows_ : saved(plan_.merges[unit_->merge], step.split);
    Blend blend;
    if (starts) {
      store_first(to.max + row, kRows, max);
      for (int i = 0; i < kRows; ++i) store(to.sum + (row + i) * kLanes, sums[i]);
    } else {
      join_maxima(max, to.max + row, kRows, blend);
      for (int i = 0; i < kRows; ++i) join_sum(sums[i], to.sum + (row + i) * kLanes, blend, i);
    }
    sum_value_rows<Dot, kRows>(weights_, num_tiles, cache_.part_tokens(), tiles.v + first_part,
                               head_size_, ahead_of_values + first_part, starts ? nullptr : &blend,
                               to.values + int64_t{row} * head_size_);
  }

  // The factor of a row's values if a sink is added to its sum of weights.
  float share_beside(float sink, float max, float sum) const {
    const Vec log2_sink = splat(sink * 1.44269504f);
    const Vec log2_max = splat(max * score_scale_.log2_scale);
    const Vec most = quire::max(log2_sink, log2_max);  // keeps NaN
    const Vec rows = exp2_of<false>(sub(log2_max, most));
    const Vec total = fma(splat(sum), rows, exp2_of<false>(sub(log2_sink, most)));
    return max_of_lanes(div(rows, total));
  }

  // Joins a split's maxima with the running ones, and sets the factors that blend its sums.
  void join_maxima(Vec split_max, float* running, int count, Blend& blend) const {
    const Vec scale = splat(score_scale_.log2_scale), before = load(running);
    const Vec most = max(before, split_max);
    store_first(running, count, most);
    store(blend.keep, exp2_of<Dot::kShortExp>(mul(sub(before, most), scale)));
    store(blend.take, exp2_of<Dot::kShortExp>(mul(sub(split_max, most), scale)));
  }

  Rows rows_at(float* at) const {
    const int64_t rows = num_rows();
    return {at + rows * kLanes, at, at + rows * (kLanes + 1)};
  }

  // The rows of a split in a merge's workspace.
  Rows saved(const Merge& merge, int split) const {
    return rows_at(plan_.workspace.data() + merge.offset +
                   int64_t{split - merge.whole.first_split} * num_rows() *
                       floats_per_row(head_size_));
  }

  void join(const Merge& merge) {
    const int count = num_rows();
    const Rows sum = saved(merge, merge.whole.first_split);
    for (int split = merge.whole.first_split; split < merge.whole.end_split; ++split) {
      const Rows part = saved(merge, split);
      for (int row = 0; row < count; ++row) {
        const Query& query = plan_.queries[merge.whole.first_query + row / group_ % num_queries()];
        if (!sees(query, split)) continue;
        float* values = sum.values + int64_t{row} * head_size_;
        const float* part_values = part.values + int64_t{row} * head_size_;
        if (split == first_split(query)) {
          if (split == merge.whole.first_split) continue;
          sum.max[row] = part.max[row];
          store(sum.sum + row * kLanes, load(part.sum + row * kLanes));
          memcpy(values, part_values, head_size_ * sizeof(float));
          continue;
        }
        Blend blend;
        join_maxima(splat(part.max[row]), sum.max + row, 1, blend);
        join_sum(load(part.sum + row * kLanes), sum.sum + row * kLanes, blend, 0);
        for (int d = 0; d < head_size_; d += kLanes)
          join_sum(load(part_values + d), values + d, blend, 0);
      }
    }
    write_out(merge.whole, sum);
  }

  void write_out(const Unit& unit, const Rows& rows) const {
    auto* out = static_cast<Element*>(args_.out);
    for (int head = unit.first_head; head < unit.end_head; ++head)
      for (int query = unit.first_query; query < unit.end_query; ++query) {
        Element* to =
            out + (plan_.queries[query].token * int64_t{args_.num_heads} + int64_t{head} * group_) *
                      head_size_;
        const int row = row_of(head, query);
        if (plan_.queries[query].visible == 0) {  // The query saw no split.
          memset(to, 0, group_ * head_size_ * sizeof(Element));
          continue;
        }
        for (int i = row; i < row + group_; ++i) {
          const float sum = sum_of_lanes(load(rows.sum + i * kLanes));
          const Vec inverse = splat(
              args_.sinks ? share_beside(args_.sinks[head * group_ + i - row], rows.max[i], sum)
                          : 1 / sum);
          for (int d = 0; d < head_size_; d += kLanes, to += kLanes) {
            const Vec x = mul(load(rows.values + int64_t{i} * head_size_ + d), inverse);
            sizeof(Element) == 2 ? store_bf16(to, x) : store(to, x);
          }
        }
      }
  }

  const AttendArgs& args_;
  AttendPlan& plan_;
  CacheReader<Dot, Stored> cache_;
  const int head_size_;
  const int group_;
  const ScoreScale score_scale_;
  Scratch& scratch_;
  const Unit* unit_ = nullptr;
  char* queries_ = nullptr;  // [rows], kQueryStride apart
  float* scores_ = nullptr;  // [kMaxRows, kSplitTokens]
  char* weights_ = nullptr;
  Rows rows_{};
};

template <class Kernel>
void run_units(const AttendArgs& args, AttendPlan& plan, Team team) {
  thread_local Scratch scratch;
  Kernel kernel(args, plan, scratch);
  team.share(int64_t(plan.units.size()), [&](int64_t unit) { kernel.run(plan.units[unit]); });
}

}  // namespace

void attend_part(const AttendArgs& args, AttendPlan& plan, Team team) {
  const bool is_bf16 = args.dtype == QUIRE_BF16;
  if (args.cache_is_int8)
    is_bf16 ? run_units<Attention<Bf16Dot, uint16_t, int8_t>>(args, plan, team)
            : run_units<Attention<DotF32, float, int8_t>>(args, plan, team);
  else
    is_bf16 ? run_units<Attention<Bf16Dot, uint16_t>>(args, plan, team)
            : run_units<Attention<DotF32, float>>(args, plan, team);
}

}  // namespace quire
