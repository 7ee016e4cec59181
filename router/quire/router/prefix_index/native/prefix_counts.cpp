// Counts the requests in flight at each group that have a block: the compiled part of
// `quire.router.in_flight`. Groups are identified by numbers. The table is the directory's, with a
// count for each block and group in place of the id of a set.

#include "holders.h"
#include "table.h"

namespace {

using quire::Key;
using quire::key_at;

struct PrefixCounts {
  quire::Table table;
};

constexpr uint64_t kAhead = 12;  // How many blocks ahead buckets are prefetched.

// A group's mask, which is XORed with keys so that groups' counts of one block have different keys.
Key spread(uint64_t group) {
  Key x = (group + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93;
  return x ^ (x >> 32);
}

}  // namespace

extern "C" {

PrefixCounts* quire_prefix_counts_new() { return new PrefixCounts; }
void quire_prefix_counts_delete(PrefixCounts* counts) { delete counts; }

void quire_prefix_counts_add(PrefixCounts* counts, uint64_t group, const uint8_t* hashes,
                             uint64_t num_hashes) {
  const Key spread_by = spread(group);
  for (uint64_t i = 0; i < num_hashes; i++) {
    if (i + kAhead < num_hashes) counts->table.prefetch(key_at(hashes, i + kAhead) ^ spread_by);
    const Key key = key_at(hashes, i) ^ spread_by;
    if (quire::SetId* count = counts->table.find(key))
      ++*count;
    else
      counts->table.insert(key, 1);
  }
}

// Removes `hashes` that were added before.
void quire_prefix_counts_remove(PrefixCounts* counts, uint64_t group, const uint8_t* hashes,
                                uint64_t num_hashes) {
  const Key spread_by = spread(group);
  for (uint64_t i = 0; i < num_hashes; i++) {
    if (i + kAhead < num_hashes) counts->table.prefetch(key_at(hashes, i + kAhead) ^ spread_by);
    const Key key = key_at(hashes, i) ^ spread_by;
    quire::SetId* count = counts->table.find(key);
    if (!count) continue;
    if (*count > 1)
      --*count;
    else
      counts->table.erase(key, count);
  }
}

// `lengths` has the length of the prefix cached at each of `groups`, in blocks. Extends each by the
// following blocks of `hashes` that are in flight at that group.
void quire_prefix_counts_extend(const PrefixCounts* counts, const uint64_t* groups,
                                int64_t* lengths, uint64_t num_groups, const uint8_t* hashes,
                                uint64_t num_hashes) {
  for (uint64_t g = 0; g < num_groups; g++) {
    const Key spread_by = spread(groups[g]);
    while (uint64_t(lengths[g]) < num_hashes &&
           counts->table.find(key_at(hashes, lengths[g]) ^ spread_by))
      lengths[g]++;
  }
}
}  // extern "C"
