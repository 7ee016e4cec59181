// Mixtures of experts in a forward pass (experts.cpp).
#pragma once

#include <vector>

#include "low_rank.h"
#include "quire.h"

namespace quire {

// One mixture of experts in a step, shared by its threads. It works in the buffers of `args`.
class Experts {
 public:
  static constexpr int kStages = 8;

  // `args`, `op` and `adapters` must outlive this object.
  Experts(const ForwardArgs& args, const ExpertsOp& op, const AdapterGroups& adapters);

  // All threads call this together; see `team.h`. Leaves the results in QUIRE_RESULTS.
  void run(Team team);

 private:
  // Rows of one expert. `kind_first` is the first row of all experts, or of the shared expert.
  struct Rows {
    int64_t first;
    int64_t count;
    int64_t kind_first;
  };

  void sort();
  void add_layers(const LinearWeights& up, const LinearWeights& down, const Rows& rows);
  void gather(int64_t begin, int64_t end) const;
  void quantize_inner(int64_t begin, int64_t end) const;
  void quantize_row(const LinearWeights& weights, const char* x, int64_t row,
                    int64_t kind_first) const;
  LinearArgs layer(const LinearWeights& weights, const Rows& rows) const;
  float* row_scales(const LinearWeights& weights, int64_t row, int64_t kind_first) const;
  char* inner(int64_t row) const;
  bool adds(const LowRankLayer& layer, const LowRankWeights* adapters) const;
  int64_t shared_start() const { return a_.num_tokens * op_.top_k; }

  template <class T>
  T* values(int32_t which) const {
    return static_cast<T*>(a_.buffers[which]);
  }

  const ForwardArgs& a_;
  const ExpertsOp& op_;
  const int64_t size_;  // of an element, in bytes
  const LowRankLayer shared_up_, shared_down_;
  // The layers of experts that have rows. They are written once, because a late thread may still
  // read them while others are in later operations.
  std::vector<LinearArgs> ups_, downs_;
};

}  // namespace quire
