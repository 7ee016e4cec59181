// Mixtures of experts in a forward pass (experts.cpp).
#pragma once

#include <vector>

#include "quire.h"

namespace quire {

// The experts' part of a step, shared by its threads. Works in the buffers of `args`.
class Experts {
 public:
  static constexpr int kStages = 5;

  explicit Experts(const ForwardArgs& args);

  // All threads call it together; see `team.h`. Leaves the results in QUIRE_RESULTS.
  void run(const ExpertsOp& op, Team team);

  // Of tokens `begin` to `end`, whose results are there.
  void mix(const MixOp& op, int64_t begin, int64_t end) const;

 private:
  // Rows of one expert. `kind_first` is the first of all experts', or of the shared one's.
  struct Rows {
    int64_t first;
    int64_t count;
    int64_t kind_first;
  };

  void sort(const ExpertsOp& op);
  void add_layers(const ExpertsOp& op, const LinearWeights& up, const LinearWeights& down,
                  const Rows& rows);
  void gather(const ExpertsOp& op, int64_t begin, int64_t end) const;
  void quantize_inner(const ExpertsOp& op, int64_t begin, int64_t end) const;
  void quantize_row(const LinearWeights& weights, const char* x, int64_t row,
                    int64_t kind_first) const;
  LinearArgs layer(const LinearWeights& weights, const Rows& rows) const;
  float* row_scales(const LinearWeights& weights, int64_t row, int64_t kind_first) const;
  char* inner(const ExpertsOp& op, int64_t row) const;
  int64_t shared_start(const ExpertsOp& op) const { return a_.num_tokens * op.top_k; }

  template <class T>
  T* values(int32_t which) const {
    return static_cast<T*>(a_.buffers[which]);
  }

  const ForwardArgs& a_;
  const int64_t size_;                   // of an element, in bytes
  std::vector<int64_t> starts_;          // [E + 1], of an expert's rows
  std::vector<LinearArgs> ups_, downs_;  // of experts that have rows
};

}  // namespace quire
