// Paged attention for a team of threads: plan a step once, then attend in each layer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "quire.h"

namespace quire {

// One token that asks. Queries stand in the order of their rows' block tables, so that rows with
// the same leading blocks are neighbours.
struct Query {
  int32_t row;
  int32_t token;    // its index in q and out
  int32_t visible;  // it sees the tokens before this one,
  int32_t hidden;   // from this one on: the first of its window
  int32_t shared;   // leading splits that it reads from the same blocks as the query before it
};

// What one thread does in one go: some neighbouring queries with some KV heads, over some splits.
struct Unit {
  int32_t first_query, end_query;
  int32_t first_head, end_head;
  int32_t first_split, end_split;  // that one of the queries sees
  int32_t merge;  // the entry of `merges` that joins this part with the others, or -1
};

// Queries whose splits several units share: each split's result waits in the workspace, and
// whoever brings the last part adds them in order.
struct Merge {
  Unit whole;
  int32_t num_parts;
  int64_t offset;  // in floats
};

// A step's work. It holds no pointers into the step's tensors but the block tables, and serves
// every layer that has these tables and this window. One `attend_part` at a time uses it.
struct AttendPlan {
  int32_t window;
  std::vector<Query> queries;
  std::vector<Unit> units;
  std::vector<Merge> merges;
  std::unique_ptr<std::atomic<int32_t>[]> parts_done;
  std::vector<float> workspace;
};

// Plans for `num_threads`; the bits of the results do not depend on it. Reads the tables, lengths
// and window of `args`, not its tensors.
AttendPlan plan_attention(const AttendArgs& args, int num_threads);

// See `team.h`.
void attend_part(const AttendArgs& args, AttendPlan& plan, Team team);

}  // namespace quire
