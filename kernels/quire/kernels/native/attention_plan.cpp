// Divides a step's attention into units of work. This decides how prefixes are shared and how
// threads are balanced; the bits of the results are the same for any division.

#include <algorithm>
#include <climits>
#include <numeric>

#include "attention.h"
#include "attention_tile.h"

namespace quire {
namespace {

constexpr int kMaxUnitRows = 96;    // query rows of a unit: enough to make reading tiles negligible
constexpr int kUnitsPerThread = 4;  // of roughly the same size, for balance
constexpr int kTileCost = 8;  // cost of reading a token's K and V, relative to computing one row

struct Planner {
  const AttendArgs& args;
  const int num_threads;
  const int group = args.num_heads / args.num_kv_heads;
  AttendPlan plan{};

  int num_queries(int row) const { return args.query_starts[row + 1] - args.query_starts[row]; }
  const int32_t* table(int row) const { return args.block_tables + row * args.bt_stride; }

  // Number of leading blocks that two rows have in common. Only full blocks count.
  int shared_blocks(int a, int b) const {
    const int most = std::min(args.seq_lens[a], args.seq_lens[b]) / args.block_size;
    return std::mismatch(table(a), table(a) + most, table(b)).first - table(a);
  }

  void order_queries() {
    std::vector<int32_t> rows;
    int total = 0;
    for (int row = 0; row < args.num_rows; ++row)
      if (num_queries(row) > 0) rows.push_back(row), total += num_queries(row);
    std::stable_sort(rows.begin(), rows.end(), [&](int a, int b) {
      const int same = shared_blocks(a, b);
      const int blocks_a = args.seq_lens[a] / args.block_size;
      const int blocks_b = args.seq_lens[b] / args.block_size;
      if (same == blocks_a || same == blocks_b) return blocks_a < blocks_b;
      return table(a)[same] < table(b)[same];
    });
    plan.queries.reserve(total);
    for (size_t i = 0; i < rows.size(); ++i) {
      const int row = rows[i], start = args.query_starts[row], count = num_queries(row);
      int shared = 0;
      if (i > 0)
        shared = int(int64_t{shared_blocks(rows[i - 1], row)} * args.block_size / kSplitTokens);
      for (int query = 0; query < count; ++query) {
        const int own = args.seq_lens[row] - count + query + 1;
        const int visible = std::min(args.seq_lens[row], own + args.lookahead);
        const int hidden = args.window ? std::max(0, own - args.window) : 0;
        plan.queries.push_back(
            {row, start + query, visible, hidden, query == 0 ? shared : INT_MAX});
      }
    }
  }

  int64_t cost_of_query(int i) const {
    const Query& query = plan.queries[i];
    const int read_before =
        std::max(std::min(query.shared, query.visible / kSplitTokens), query.hidden / kSplitTokens);
    const int64_t own_splits = (query.visible + kSplitTokens - 1) / kSplitTokens - read_before;
    return (query.visible - query.hidden) * int64_t{group} + own_splits * kSplitTokens * kTileCost;
  }

  // Queries that share blocks form units of one head each, so that a head's tiles are read from a
  // near cache. Any other query is a unit with all heads: their parts of a block adjoin in DRAM.
  void cut_units() {
    const int num_queries = int(plan.queries.size());
    int64_t total_cost = 0;
    for (int i = 0; i < num_queries; ++i) total_cost += cost_of_query(i);
    const int64_t fair = total_cost * args.num_kv_heads / (kUnitsPerThread * num_threads) + 1;
    const int most = std::max(1, kMaxUnitRows / group);
    std::vector<Unit> alone;
    for (int first = 0, end; first < num_queries; first = end) {
      for (end = first + 1; end < num_queries && plan.queries[end].shared > 0;) ++end;
      if (end == first + 1) {
        alone.push_back({first, end, 0, args.num_kv_heads, 0, 0, -1});
        continue;
      }
      for (int head = 0; head < args.num_kv_heads; ++head)
        for (int last = end; last > first; last -= most)  // the longest first
          add_unit({std::max(first, last - most), last, head, head + 1, 0, 0, -1}, fair);
    }
    for (const Unit& unit : alone) add_unit(unit, fair);
  }

  // Adds a unit. One that costs more than `fair` is divided, first by head, then by split.
  void add_unit(Unit unit, int64_t fair) {
    int longest = 0, hidden = INT_MAX;
    int64_t cost = 0;
    for (int i = unit.first_query; i < unit.end_query; ++i) {
      longest = std::max(longest, plan.queries[i].visible);
      hidden = std::min(hidden, plan.queries[i].hidden);
      cost += cost_of_query(i);
    }
    unit.first_split = hidden / kSplitTokens;
    unit.end_split = (longest + kSplitTokens - 1) / kSplitTokens;
    const int num_splits = unit.end_split - unit.first_split;
    const int num_heads = unit.end_head - unit.first_head;
    const int64_t num_pieces = num_threads == 1 ? 1 : (cost * num_heads + fair - 1) / fair;
    if (num_pieces <= 1) return plan.units.push_back(unit);
    const int head_pieces = int(std::min<int64_t>(num_pieces, num_heads));
    const int split_pieces =
        int(std::min<int64_t>((num_pieces + head_pieces - 1) / head_pieces, num_splits));
    for (int i = 0; i < head_pieces; ++i) {
      Unit part = unit;
      part.first_head = unit.first_head + num_heads * i / head_pieces;
      part.end_head = unit.first_head + num_heads * (i + 1) / head_pieces;
      if (split_pieces > 1) part.merge = add_merge(part, split_pieces);
      for (int j = 0; j < split_pieces; ++j) {
        part.first_split = unit.first_split + num_splits * j / split_pieces;
        part.end_split = unit.first_split + num_splits * (j + 1) / split_pieces;
        plan.units.push_back(part);
      }
    }
  }

  int add_merge(const Unit& whole, int num_parts) {
    const int64_t offset = int64_t(plan.workspace.size());
    const int64_t num_splits = whole.end_split - whole.first_split;
    const int64_t num_rows =
        int64_t{whole.end_query - whole.first_query} * (whole.end_head - whole.first_head) * group;
    plan.merges.push_back({whole, num_parts, offset});
    plan.workspace.resize(offset + num_splits * num_rows * floats_per_row(args.head_size));
    return int(plan.merges.size()) - 1;
  }
};

}  // namespace

AttendPlan plan_attention(const AttendArgs& args, int num_threads) {
  Planner planner{args, num_threads};
  planner.plan.window = args.window;
  planner.order_queries();
  planner.cut_units();
  AttendPlan plan = std::move(planner.plan);
  plan.parts_done.reset(new std::atomic<int32_t>[plan.merges.size()]());
  return plan;
}

}  // namespace quire
