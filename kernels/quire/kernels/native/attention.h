// Paged attention for a team of threads: a step is planned once, and the plan serves each layer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "quire.h"

namespace quire {

// One query token, which sees tokens `hidden` to `visible` - 1 of its sequence. Queries are in the
// order of their rows' block tables, so that rows with the same leading blocks are neighbours.
struct Query {
  int32_t row;
  int32_t token;    // its index in q and out
  int32_t visible;  // end of the tokens that it sees
  int32_t hidden;   // number of tokens before its window
  int32_t shared;   // leading splits that it reads from the same blocks as the previous query
};

// A unit of work for one thread: some neighbouring queries with some KV heads, over some splits.
struct Unit {
  int32_t first_query, end_query;
  int32_t first_head, end_head;
  int32_t first_split, end_split;  // splits that at least one of the queries sees
  int32_t merge;  // the entry of `merges` that joins this part with the others, or -1
};

// Work whose splits are divided among several units. Each split's result is kept in the workspace,
// and the thread that completes the last part adds them up in order.
struct Merge {
  Unit whole;
  int32_t num_parts;
  int64_t offset;  // into the workspace, in floats
};

// A step's attention work, without pointers to its tensors. A plan serves every layer with the same
// block tables and window. Only one `attend_part` may use it at a time.
struct AttendPlan {
  int32_t window;
  std::vector<Query> queries;
  std::vector<Unit> units;
  std::vector<Merge> merges;
  std::unique_ptr<std::atomic<int32_t>[]> parts_done;
  std::vector<float> workspace;
};

// Plans a step for `num_threads`, which do not affect the bits of the results. Reads the tables,
// lengths and window of `args`, not its tensors.
AttendPlan plan_attention(const AttendArgs& args, int num_threads);

// Computes one layer's attention; see `team.h`.
void attend_part(const AttendArgs& args, AttendPlan& plan, Team team);

}  // namespace quire
