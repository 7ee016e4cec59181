#include "check.h"

#include <algorithm>
#include <type_traits>

namespace quire {
namespace {

// Whether one of `values` is outside 0 to `end` - 1; if so, sets `at` to the worst one's position.
// The loop has no branch per value, because it reads every entry of every block table in each step.
template <class T>
bool find_wrong(const T* values, int64_t count, T end, int64_t* at) {
  using Unsigned = std::make_unsigned_t<T>;  // Negative values become greater than any end.
  bool wrong = false;
  for (int64_t i = 0; i < count; ++i)
    wrong |= static_cast<Unsigned>(values[i]) >= static_cast<Unsigned>(end);
  if (!wrong) return false;
  const T* worst = std::min_element(values, values + count);
  if (*worst >= 0) worst = std::max_element(values, values + count);
  *at = worst - values;
  return true;
}

}  // namespace

QuireRefusal check_indices(QuireIndex what, const int64_t* values, int64_t count, int64_t end) {
  int64_t at;
  if (!find_wrong(values, count, end, &at)) return {};
  return {what, at, values[at], 0, end};
}

QuireRefusal check_slots(const int32_t* slots, int64_t count, int64_t num_slots) {
  for (int64_t i = 0; i < count; ++i)
    if (slots[i] < -1 || slots[i] >= num_slots)
      return {QUIRE_ADAPTER_SLOT, i, slots[i], -1, num_slots};
  return {};
}

QuireRefusal check_rows(const AttendArgs& args) {
  const int64_t most_tokens = args.bt_width * args.block_size;
  int64_t start = 0;
  for (int row = 0; row <= args.num_rows; ++row) {
    const int64_t before = start;
    start = args.query_starts[row];
    if (start < before || start > args.num_tokens)
      return {QUIRE_QUERY_START, row, start, before, args.num_tokens + 1};
  }
  for (int row = 0; row < args.num_rows; ++row) {
    const int64_t num_queries = args.query_starts[row + 1] - args.query_starts[row];
    const int64_t num_tokens = args.seq_lens[row];
    const int64_t least = num_queries > 1 ? num_queries : 0;  // A decode of length 0 pads a batch.
    if (num_tokens < least || num_tokens > most_tokens)
      return {QUIRE_SEQUENCE_LENGTH, row, num_tokens, least, most_tokens + 1};
    const int32_t* table = args.block_tables + row * args.bt_stride;
    const int64_t num_blocks = (num_tokens + args.block_size - 1) / args.block_size;
    int64_t at;
    if (find_wrong(table, num_blocks, args.num_blocks, &at))
      return {QUIRE_BLOCK_ID, row, table[at], 0, args.num_blocks};
  }
  return {};
}

}  // namespace quire
