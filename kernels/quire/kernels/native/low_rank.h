// LoRA adapters of linear layers (Hu et al. 2021). Each adds B t to its own tokens of a step, where
// t is `scales` times A x. Both products are summed in float, and t is not rounded.
//
// Order. An element of A x is summed as the layer's own sums are: a chain over k, or `splits`
// chains over equal parts added as a binary tree. Tensor-parallel ranks that divide K compute
// branches of the tree, sum them together with the layer's partial sums, behind which they lie, and
// then multiply by `scales`. An element of B t is one chain over the adapter's ranks. A token's
// bits thus depend neither on other tokens nor on the slot.
#pragma once

#include <vector>

#include "quire.h"

namespace quire {

// The tokens of a step, grouped by adapter.
struct AdapterGroups {
  struct Group {
    int32_t slot;
    int64_t first, end;  // indices into `tokens`
  };

  AdapterGroups() = default;
  // `slots` must have been checked.
  AdapterGroups(const int32_t* slots, int64_t num_tokens, int64_t num_slots);

  std::vector<Group> groups;    // without empty ones
  std::vector<int32_t> tokens;  // in ascending order within each group
};

// One layer's adapters in a step.
class LowRankLayer {
 public:
  static constexpr float kNothing = -0.0f;  // adding this to a value changes no bit

  // `adapters` has an entry for each slot. `t` [T, stride] is where t is written.
  LowRankLayer(int32_t dtype, const AdapterGroups& groups, const LowRankWeights* adapters, float* t,
               int64_t stride)
      : dtype_(dtype), groups_(groups), adapters_(adapters), t_(t), stride_(stride) {}

  // Whether one of tokens `begin` to `end` has an adapter that adds to this layer.
  bool has_any(int64_t begin, int64_t end) const;

  // Computes t for all tokens with adapters. With `is_share` it is a partial sum without the
  // scales, and 0 for other tokens. Uses at most two stages, and returns the next one.
  Stage* shrink_part(const void* x, int64_t x_stride, const LinearWeights& layer, bool is_share,
                     int64_t num_tokens, Team team) const;

  // Writes B t of tokens `begin` to `end` for a panel's columns to `out`, [end - begin, panel].
  // Rows of tokens without adapters are not written; callers set them to kNothing. Prefetches panel
  // `ahead`.
  void expand(int64_t begin, int64_t end, int64_t panel, int64_t ahead, float* out) const;

  // Scales t and adds B t to the tokens' rows of `sums` [T, width], which are sums over the ranks.
  void add_rows(int64_t begin, int64_t end, float* sums, int64_t width) const;

 private:
  // The tokens of a group from `begin` to `end`.
  struct Tokens {
    const int32_t* at;
    int64_t count;
  };
  Tokens tokens_of(const AdapterGroups::Group& group, int64_t begin, int64_t end) const;

  template <class T>
  void shrink(const LowRankWeights& weights, Tokens tokens, int64_t vector, const void* x,
              int64_t x_stride, const LinearWeights& layer, bool is_share) const;
  template <class T>
  void expand_vector(const LowRankWeights& weights, Tokens tokens, const int64_t* vector,
                     int64_t begin, float* out) const;

  const int32_t dtype_;
  const AdapterGroups& groups_;
  const LowRankWeights* adapters_;
  float* t_;
  const int64_t stride_;
};

}  // namespace quire
