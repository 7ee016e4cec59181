// The index of which slots hold which blocks: the compiled part of
// `quire.router.prefix_index.index.HolderIndex`.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <vector>

#include "sets.h"
#include "table.h"

namespace quire {

constexpr int kHashBytes = 32;  // The first 8 bytes, little-endian, are the key.
constexpr int kNumDigests = 256;

inline Key key_at(const uint8_t* hashes, uint64_t index) {
  Key key;
  std::memcpy(&key, hashes + kHashBytes * index, sizeof key);
  return key;
}

inline int bucket_of(Key key) { return key >> 56; }

class HolderIndex {
 public:
  explicit HolderIndex(uint64_t max_blocks) : max_blocks_(max_blocks) {}

  uint64_t num_blocks() const { return table_.num_keys() - num_ownerless_; }
  uint64_t num_refused() const { return num_refused_; }
  uint64_t num_sets() const { return sets_.num_sets(); }
  uint64_t num_bytes() const {
    return table_.num_bytes() + sets_.num_bytes() + slots_.capacity() * sizeof(Held);
  }

  // Makes room for slots up to `slot`.
  void admit(Slot slot);

  void add(Slot slot, const uint8_t* hashes, uint64_t num_hashes);
  void remove(Slot slot, const uint8_t* hashes, uint64_t num_hashes);

  // Removes all blocks of the slot. The cost is one step per set, not per block.
  void clear(Slot slot);

  // Replaces the slot's blocks in the given digest buckets by `hashes`.
  void replace(Slot slot, const uint8_t* buckets, uint64_t num_buckets, const uint8_t* hashes,
               uint64_t num_hashes);

  // Writes the length of the prefix that each slot holds, in blocks, to `lengths`. Writes the slots
  // with a length above 0 to `found`, and returns their number.
  uint32_t look_up(const uint8_t* hashes, uint64_t num_hashes, int32_t* lengths, Slot* found);

  uint64_t num_held(Slot slot) const { return slots_[slot].num_held; }
  const uint64_t* digests(Slot slot) const { return slots_[slot].digests.data(); }
  bool was_refused(Slot slot, int bucket) const { return slots_[slot].refused[bucket]; }

 private:
  struct Held {
    uint64_t num_held = 0;
    std::array<uint64_t, kNumDigests> digests{};  // The XOR of the slot's keys, by bucket.
    std::bitset<kNumDigests> refused;             // Buckets with a block that found no room.
  };

  // The arguments and the state of one look-up.
  struct Search {
    const uint8_t* hashes;
    int32_t* lengths;
    Slot* found;
    uint32_t num_found;
  };

  // Some consecutive blocks of a chain: the indices of the first and the last, and their sets.
  struct Span {
    uint64_t low;
    uint64_t high;
    SetId low_id;
    SetId high_id;
  };

  SetId id_at(Key key) const {
    const SetId* id = table_.find(key);
    return id ? *id : 0;
  }
  bool has_room();
  void sweep(uint32_t num_segments);
  void cut_all(Search& search);
  void consider(Search& search, const Span& span);

  Table table_;
  SetTable sets_;
  std::vector<Held> slots_;
  // State of a look-up, as bits by slot: the slots whose prefix's end is unknown, and those of them
  // that are not assigned to a span of the next round. Then the spans of this round and the next.
  std::vector<uint64_t> searched_, unclaimed_;
  std::vector<Span> spans_, next_spans_;
  uint64_t max_blocks_;
  uint64_t num_ownerless_ = 0;  // Keys whose set became empty when a slot was cleared.
  uint64_t num_refused_ = 0;
  uint32_t swept_ = 0;  // The segment where the next sweep begins.
};

}  // namespace quire
