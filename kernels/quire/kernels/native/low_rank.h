// What adapters add to linear layers (Hu et al. 2021), each to its own tokens of a step: B times
// t, where t is `scales` times A x. Both products are sums in float, and t is not rounded.
//
// Order. An element of A x is summed as the layer's own sums are: a chain over k, or `splits`
// chains over equal parts added as a binary tree. Ranks that share K get the tree's branches, sum
// them behind the layer's shares, and multiply with `scales` then. An element of B t is one chain
// over the adapter's ranks. So a token's bits do not depend on the others, nor on the slot.
#pragma once

#include <vector>

#include "quire.h"

namespace quire {

// The tokens of a step by their adapters.
struct AdapterGroups {
  struct Group {
    int32_t slot;
    int64_t first, end;  // of `tokens`
  };

  AdapterGroups() = default;
  // Slots are checked.
  AdapterGroups(const int32_t* slots, int64_t num_tokens, int64_t num_slots);

  std::vector<Group> groups;    // none is empty
  std::vector<int32_t> tokens;  // of each group; they ascend
};

// One layer's adapters in a step.
class LowRankLayer {
 public:
  static constexpr float kNothing = -0.0f;  // changes no bit of what it is added to

  // `adapters`: of each slot. t goes to `t`, [T, stride].
  LowRankLayer(int32_t dtype, const AdapterGroups& groups, const LowRankWeights* adapters, float* t,
               int64_t stride)
      : dtype_(dtype), groups_(groups), adapters_(adapters), t_(t), stride_(stride) {}

  // Whether one of tokens `begin` to `end` has an adapter that adds to this layer.
  bool has_any(int64_t begin, int64_t end) const;

  // Computes A x of all tokens. Of a share of sums over the ranks it is not multiplied with the
  // scales, and is 0 for the other tokens. Returns the first stage that it has not used, two at
  // most.
  Stage* shrink_part(const void* x, int64_t x_stride, const LinearWeights& layer, bool is_share,
                     int64_t num_tokens, Team team) const;

  // B t of some tokens, of the columns of a panel: [end - begin, panel]. Leaves the rows of other
  // tokens: kNothing is for these. Panel `ahead` is wanted soon.
  void expand(int64_t begin, int64_t end, int64_t panel, int64_t ahead, float* out) const;

  // Adds B t to some tokens' rows of sums over the ranks, of `width` columns.
  void add_rows(int64_t begin, int64_t end, float* sums, int64_t width) const;

 private:
  // Those of a group that are from `begin` to `end`.
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
