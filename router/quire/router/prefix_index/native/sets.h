// Interned sets of slots: each distinct set is stored once, while keys refer to it.
//
// A *small* set, of at most `kSmall` members, lists them in order; a larger one is a *row* of bits.
// Most blocks are held by few groups, so most sets do not take more memory the more groups there
// are: ten thousand groups are 1.2 KB of bits.
//
// A set's hash is the XOR of a number per member. The hash of a set with one member more or less is
// thus known before that set is built, and finding the set costs one look-up.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "table.h"

namespace quire {

using Slot = uint32_t;

constexpr uint32_t kSmall = 4;      // The most members of a small set.
constexpr Slot kNoSlot = ~Slot(0);  // Padding of a small set.

class SetTable {
 public:
  SetTable() : sets_(1), interned_(64) {}

  size_t num_words() const { return num_words_; }
  bool is_small(SetId id) const { return sets_[id].num_members <= kSmall; }
  bool is_empty(SetId id) const { return !sets_[id].num_members; }
  uint32_t num_refs(SetId id) const { return sets_[id].num_refs; }

  // The members of a small set, in order, then kNoSlot.
  const std::array<Slot, kSmall>& members(SetId id) const { return sets_[id].members; }

  // The bits of a larger set: `num_words` words of 64.
  const uint64_t* row(SetId id) const { return &rows_[sets_[id].members[0] * num_words_]; }

  // The members from 64 * word to 64 * word + 63, as bits.
  uint64_t word(SetId id, size_t word) const {
    if (!is_small(id)) return row(id)[word];
    uint64_t bits = 0;
    for (Slot member : members(id))
      if (member / 64 == word) bits |= bit_of(member);
    return bits;
  }

  bool has(SetId id, Slot slot) const {
    if (!is_small(id)) return row(id)[slot / 64] & bit_of(slot);
    for (Slot member : members(id))
      if (member == slot) return true;
    return false;
  }

  size_t num_sets() const { return sets_.size() - 1 - free_.size(); }

  size_t num_bytes() const {
    return sizeof(Set) * sets_.capacity() + 8 * rows_.capacity() +
           4 * (interned_.capacity() + free_.capacity() + free_rows_.capacity());
  }

  // Makes room for members up to `slot`.
  void admit(Slot slot) {
    size_t wider = num_words_;
    while (slot >= 64 * wider) wider *= 2;
    if (wider == num_words_) return;
    const size_t num_rows = rows_.size() / num_words_;
    std::vector<uint64_t> rows(num_rows * wider);
    for (size_t i = 0; i < num_rows; i++)
      std::memcpy(&rows[i * wider], &rows_[i * num_words_], 8 * num_words_);
    rows_.swap(rows);
    num_words_ = wider;
  }

  // The set that differs from `id` in `slot` only. Adds no reference; a new set has none.
  SetId toggled(SetId id, Slot slot) {
    const uint64_t hash = sets_[id].hash ^ number_of(slot);
    const uint32_t num_members = sets_[id].num_members + (has(id, slot) ? -1 : 1);
    std::array<Slot, kSmall> wanted;
    if (num_members <= kSmall) wanted = listed(id, slot);
    for (size_t at = place_of(hash); interned_[at]; at = (at + 1) & mask()) {
      const Set& set = sets_[interned_[at]];
      if (set.hash != hash || set.num_members != num_members) continue;
      if (num_members <= kSmall ? set.members == wanted : differs_in(interned_[at], id, slot))
        return interned_[at];
    }
    const SetId made = take_id();
    if (num_members <= kSmall)
      sets_[made].members = wanted;
    else
      fill_row(made, id, slot);
    sets_[made].num_members = num_members;
    sets_[made].hash = hash;
    intern(made);
    return made;
  }

  // The set without its member `slot`, or 0 if that was the only member.
  SetId without(SetId id, Slot slot) { return sets_[id].num_members == 1 ? 0 : toggled(id, slot); }

  void refer(SetId id) { sets_[id].num_refs++; }

  void release(SetId id) {
    if (--sets_[id].num_refs) return;
    forget(id);
    if (!is_small(id)) free_rows_.push_back(sets_[id].members[0]);
    free_.push_back(id);
  }

  // Removes `slot` from every set, in place. Returns the number of references to sets that became
  // empty. Two sets may become equal; one of them then takes no more keys.
  uint64_t clear(Slot slot) {
    uint64_t num_emptied = 0;
    std::fill(interned_.begin(), interned_.end(), 0);
    num_interned_ = 0;
    for (SetId id = 1; id < sets_.size(); id++) {
      Set& set = sets_[id];
      if (!set.num_refs) continue;
      if (has(id, slot)) {
        if (set.num_members <= kSmall + 1) {
          const auto left = listed(id, slot);
          if (!is_small(id)) free_rows_.push_back(set.members[0]);
          set.members = left;
        } else {
          rows_[set.members[0] * num_words_ + slot / 64] ^= bit_of(slot);
        }
        set.hash ^= number_of(slot);
        if (!--set.num_members) num_emptied += set.num_refs;
      }
      if (set.num_members) intern(id);
    }
    return num_emptied;
  }

 private:
  struct Set {
    uint64_t hash = 0;
    uint32_t num_refs = 0;
    uint32_t num_members = 0;
    // In a larger set, members[0] is the index of its row.
    std::array<Slot, kSmall> members = {kNoSlot, kNoSlot, kNoSlot, kNoSlot};
  };

  static uint64_t bit_of(Slot slot) { return uint64_t(1) << (slot % 64); }

  static uint64_t number_of(Slot slot) {  // splitmix64
    uint64_t x = (slot + 1) * 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  size_t mask() const { return interned_.size() - 1; }
  size_t place_of(uint64_t hash) const { return hash & mask(); }

  // The members of the small set that differs from `id` in `slot` only.
  std::array<Slot, kSmall> listed(SetId id, Slot slot) const {
    std::array<Slot, kSmall> members;
    uint32_t num_members = 0;
    if (!has(id, slot)) members[num_members++] = slot;
    if (is_small(id)) {
      for (Slot member : sets_[id].members)
        if (member != slot && member != kNoSlot) members[num_members++] = member;
    } else {
      const uint64_t* bits = row(id);
      for (size_t i = 0; i < num_words_; i++)
        for (uint64_t left = bits[i]; left; left &= left - 1) {
          const Slot member = 64 * i + __builtin_ctzll(left);
          if (member != slot) members[num_members++] = member;
        }
    }
    std::sort(members.begin(), members.begin() + num_members);
    std::fill(members.begin() + num_members, members.end(), kNoSlot);
    return members;
  }

  // Whether `larger`, which has a row, differs from `id` in `slot` only.
  bool differs_in(SetId larger, SetId id, Slot slot) const {
    for (size_t i = 0; i < num_words_; i++)
      if (row(larger)[i] != (word(id, i) ^ (i == slot / 64 ? bit_of(slot) : 0))) return false;
    return true;
  }

  void fill_row(SetId id, SetId from, Slot slot) {
    uint32_t row = rows_.size() / num_words_;
    if (free_rows_.empty()) {
      rows_.resize(rows_.size() + num_words_);
    } else {
      row = free_rows_.back();
      free_rows_.pop_back();
    }
    uint64_t* to = &rows_[row * num_words_];
    for (size_t i = 0; i < num_words_; i++) to[i] = word(from, i);
    to[slot / 64] ^= bit_of(slot);
    sets_[id].members[0] = row;
  }

  SetId take_id() {
    if (free_.empty()) {
      sets_.emplace_back();
      return sets_.size() - 1;
    }
    const SetId id = free_.back();
    free_.pop_back();
    return id;
  }

  void intern(SetId id) {
    if (2 * ++num_interned_ > interned_.size()) {
      std::vector<SetId> old(2 * interned_.size());
      old.swap(interned_);
      for (SetId other : old)
        if (other) interned_[vacancy(sets_[other].hash)] = other;
    }
    interned_[vacancy(sets_[id].hash)] = id;
  }

  size_t vacancy(uint64_t hash) const {
    size_t at = place_of(hash);
    while (interned_[at]) at = (at + 1) & mask();
    return at;
  }

  // Linear probing without tombstones: an entry that would no longer be found moves into the hole.
  void forget(SetId id) {
    size_t hole = place_of(sets_[id].hash);
    for (; interned_[hole] != id; hole = (hole + 1) & mask())
      if (!interned_[hole]) return;  // Not interned: empty, or equal to another.
    num_interned_--;
    for (size_t at = (hole + 1) & mask(); interned_[at]; at = (at + 1) & mask()) {
      const size_t home = place_of(sets_[interned_[at]].hash);
      if (((at - home) & mask()) >= ((at - hole) & mask())) {
        interned_[hole] = interned_[at];
        hole = at;
      }
    }
    interned_[hole] = 0;
  }

  size_t num_words_ = 1;
  std::vector<Set> sets_;        // Set 0 is empty, and no key refers to it.
  std::vector<uint64_t> rows_;   // num_words_ words for each larger set.
  std::vector<SetId> interned_;  // Open addressing by hash; its size is a power of two.
  size_t num_interned_ = 0;
  std::vector<SetId> free_;
  std::vector<uint32_t> free_rows_;
};

}  // namespace quire
