// From 64-bit keys to ids of sets, 16 to 31 bytes a key.
//
// A key's top bits choose one of 1,024 segments, which grow one by one: no event waits for more
// than a thousandth of the table to be moved. A segment is an array of buckets of one cache line:
// five keys, five ids, and how many keys that belong here or before lie further on. A search so
// ends at the first bucket that nothing passed, which for most keys is the first it reads.
//
// Where a key belongs in its segment is a share of its length. So the keys keep their order when
// it grows, and it does so in place: from its last bucket to its first, each key moves further on.
//
// A full bucket costs what is sought in it a second read from memory, which nothing asked for in
// time. So segments of a large table grow when five eighths of their places are taken; those of
// one that caches can hold, when four fifths are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "levels.h"

namespace quire {

using Key = uint64_t;
using SetId = uint32_t;  // 0 is no set.

constexpr int kSegmentBits = 10;
constexpr uint32_t kNumSegments = 1u << kSegmentBits;
constexpr uint32_t kPlaces = 5;
constexpr uint32_t kSteps = 2;        // In which a segment's size doubles.
constexpr uint32_t kMovedAhead = 16;  // Buckets ahead for which memory is asked when keys move.

// How many keys a segment of `num_buckets` holds before it grows.
constexpr uint64_t room_of(uint64_t num_buckets) {
  const bool is_large = num_buckets >= 128;  // Of 8 MB and more in all.
  return num_buckets * kPlaces * (is_large ? 25 : 32) / 40;
}

struct alignas(64) Bucket {
  Key keys[kPlaces];  // The first `num_keys` count.
  SetId ids[kPlaces];
  uint32_t num_keys : 3;
  uint32_t num_passed : 29;

  // Where `key` is, or kPlaces. Without branches, for nothing foretells the place.
  uint32_t place_of(Key key) const {
    for (uint32_t i = 0; i < kPlaces; i++)
      if (keys[i] == key && i < num_keys) return i;
    return kPlaces;
  }

  void put(Key key, SetId id) {
    keys[num_keys] = key;
    ids[num_keys] = id;
    num_keys++;
  }

  void take(uint32_t place) {
    num_keys--;
    keys[place] = keys[num_keys];
    ids[place] = ids[num_keys];
  }
};
static_assert(sizeof(Bucket) == 64, "a bucket is a cache line");

class Table {
 public:
  Table() {
    for (uint32_t s = 0; s < kNumSegments; s++) levels_.reach(0);
    note_when_to_prepare();
  }

  uint64_t num_keys() const { return num_keys_; }

  size_t num_bytes() const {
    size_t total = sizeof segments_;
    for (const Segment& segment : segments_) total += segment.num_buckets * sizeof(Bucket);
    return total;
  }

  void prefetch(Key key) const {
    const uint32_t s = segment_of(key);
    __builtin_prefetch(&bucket(s, home(s, key)));
  }

  // Once that has come: asks for the next bucket where a search goes on there. Inline, for GCC
  // takes calls of functions away that do nothing but ask for memory.
  __attribute__((always_inline)) void prefetch_next(Key key) const {
    const uint32_t s = segment_of(key);
    const uint32_t at = home(s, key);
    const Bucket& here = bucket(s, at);
    if (here.num_passed || here.num_keys == kPlaces) __builtin_prefetch(&bucket(s, next(s, at)));
  }

  // Where the id of `key` is, or null. Valid until the table is changed.
  SetId* find(Key key) const {
    const uint32_t s = segment_of(key);
    uint32_t at = home(s, key);
    for (uint32_t step = 0; step < segments_[s].num_buckets; step++) {
      Bucket& here = bucket(s, at);
      const uint32_t place = here.place_of(key);
      if (place < kPlaces) return &here.ids[place];
      if (!here.num_passed) return nullptr;
      at = next(s, at);
    }
    return nullptr;
  }

  // `key` must not be there.
  void insert(Key key, SetId id) {
    const uint32_t s = segment_of(key);
    Segment& segment = segments_[s];
    if (segment.num_keys >= room_of(segment.num_buckets)) resize(s, larger(segment.num_buckets));
    place(s, key, id);
    segment.num_keys++;
    if (++num_keys_ < prepare_at_) return;
    levels_.prepare();
    note_when_to_prepare();
  }

  // `id` is where its id was found.
  void erase(Key key, SetId* id) {
    const uint32_t s = segment_of(key);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(id) & -sizeof(Bucket);
    Bucket* found = reinterpret_cast<Bucket*>(begin);
    for (uint32_t at = home(s, key); &bucket(s, at) != found; at = next(s, at))
      bucket(s, at).num_passed--;
    found->take(id - found->ids);
    segments_[s].num_keys--;
    num_keys_--;
  }

  template <class Visit>  // visit(key, id)
  void each(uint32_t s, Visit visit) const {
    for (uint32_t at = 0; at < segments_[s].num_buckets; at++) {
      const Bucket& here = bucket(s, at);
      for (uint32_t i = 0; i < here.num_keys; i++) visit(here.keys[i], here.ids[i]);
    }
  }

  // Gives memory back where less than half of what a segment could hold is left.
  void shrink(uint32_t s) {
    const auto [num_buckets, num_keys] = segments_[s];
    if (2 * num_keys >= room_of(num_buckets)) return;
    uint32_t wanted = 1;
    while (room_of(wanted) < num_keys + num_keys / 4 + 1) wanted = larger(wanted);
    if (wanted < num_buckets) resize(s, wanted);
  }

 private:
  static constexpr uint32_t kPiece = Levels::kPieceBytes / sizeof(Bucket);
  static_assert(Levels::kNumArrays == kNumSegments, "an array is a segment");

  struct Segment {
    uint32_t num_buckets = 1;
    uint32_t num_keys = 0;
  };

  static uint32_t segment_of(Key key) { return key >> (64 - kSegmentBits); }

  static uint32_t larger(uint32_t num_buckets) {
    const uint32_t step = (1u << (31 - __builtin_clz(num_buckets))) / kSteps;
    return num_buckets + std::max(step, 1u);
  }

  // The segment takes the key's top bits, this its lowest.
  static uint32_t home_of(Key key, uint32_t num_buckets) {
    return uint64_t(uint32_t(key)) * num_buckets >> 32;
  }

  uint32_t home(uint32_t s, Key key) const { return home_of(key, segments_[s].num_buckets); }

  uint32_t next(uint32_t s, uint32_t at) const {
    return at + 1 == segments_[s].num_buckets ? 0 : at + 1;
  }

  Bucket& bucket(uint32_t s, uint32_t at) const {
    return reinterpret_cast<Bucket*>(levels_.piece(s, at / kPiece))[at % kPiece];
  }

  void place(uint32_t s, Key key, SetId id) {
    for (uint32_t at = home(s, key);; at = next(s, at)) {
      Bucket& here = bucket(s, at);
      if (here.num_keys < kPlaces) return here.put(key, id);
      here.num_passed++;
    }
  }

  // Not beyond `end`; false where that is not possible, and nothing has changed.
  bool place_before(uint32_t end, uint32_t s, Key key, SetId id) {
    const uint32_t from = home(s, key);
    uint32_t to = from;
    while (to < end && bucket(s, to).num_keys == kPlaces) to++;
    if (to >= end) return false;
    for (uint32_t at = from; at < to; at++) bucket(s, at).num_passed++;
    bucket(s, to).put(key, id);
    return true;
  }

  // In place. Buckets are read from the end that keys move towards, and what lies behind the
  // one that is read has the new order already. Keys that found no place at home come last, for
  // mostly they are the youngest, and so do those that find no place behind.
  void resize(uint32_t s, uint32_t num_buckets) {
    const uint32_t num_old = segments_[s].num_buckets;
    const bool grows = num_buckets > num_old;
    for (uint32_t level = levels_of(num_old); level < levels_of(num_buckets); level++)
      levels_.reach(level);
    segments_[s].num_buckets = num_buckets;
    std::vector<std::pair<Key, SetId>> others;
    for (uint32_t step = 0; step < num_old; step++) {
      const uint32_t at = grows ? num_old - 1 - step : step;
      const uint32_t end = grows ? num_buckets : std::min(at + 1, num_buckets);
      if (grows && at >= kMovedAhead) {
        const uint64_t ahead = at - kMovedAhead;
        __builtin_prefetch(&bucket(s, ahead));
        __builtin_prefetch(&bucket(s, ahead * num_buckets / num_old), 1);
      }
      const Bucket old = bucket(s, at);
      bucket(s, at) = Bucket();
      for (uint32_t i = 0; i < old.num_keys; i++) {
        const bool is_home = home_of(old.keys[i], num_old) == at;
        if (!is_home || !place_before(end, s, old.keys[i], old.ids[i]))
          others.emplace_back(old.keys[i], old.ids[i]);
      }
    }
    for (auto [key, id] : others) place(s, key, id);
    for (uint32_t level = levels_of(num_buckets); level < levels_of(num_old); level++)
      levels_.leave(level);
    if (!grows) note_when_to_prepare();
  }

  // Segments grow at about one time, and the first to do so reaches all the levels that are
  // new. For an event not to wait for all their pages, these come one by one before.
  void note_when_to_prepare() {
    const uint32_t level = levels_.num_prepared(), least = level * kPiece;
    uint32_t num_buckets = 1;
    while (larger(num_buckets) <= least) num_buckets = larger(num_buckets);
    const double room = room_of(num_buckets);
    const double share = double(least - num_buckets) / (larger(num_buckets) - num_buckets);
    // Hardly one segment in a thousand is ahead of the others by four deviations.
    const double last = room - 4 * std::sqrt(room);
    prepare_at_ = std::max(kNumSegments * last * (0.95 + 0.05 * share), 1.0);
  }

  static uint32_t levels_of(uint32_t num_buckets) { return (num_buckets + kPiece - 1) / kPiece; }

  Levels levels_;
  Segment segments_[kNumSegments];
  uint64_t num_keys_ = 0;
  uint64_t prepare_at_ = 0;  // Keys at which one more level is prepared.
};

}  // namespace quire
