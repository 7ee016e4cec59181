// A hash table from 64-bit keys to ids of sets, with 16 to 31 bytes per key.
//
// A key's top bits choose one of 1,024 segments, which grow one by one, so that no event waits for
// more than a thousandth of the table to be moved. A segment is an array of buckets of one cache
// line each: five keys, five ids, and the number of keys that passed the bucket on their way from
// their home bucket. A search ends at the first bucket that no key passed, mostly the first read.
//
// A key's home bucket is a fraction of the segment's length. Keys thus keep their order when a
// segment grows, and it can grow in place: from the last bucket to the first, each key moves on.
//
// A key whose home bucket is full costs a second read from memory, which was not prefetched in
// time. Segments of a large table therefore grow when five eighths of their places are taken; those
// of a table that fits in caches, when four fifths are.
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
constexpr uint32_t kSteps = 2;        // The steps in which a segment's size doubles.
constexpr uint32_t kMovedAhead = 16;  // How many buckets ahead `resize` prefetches.

// The number of keys that a segment of `num_buckets` holds before it grows.
constexpr uint64_t room_of(uint64_t num_buckets) {
  const bool is_large = num_buckets >= 128;  // The table has 8 MB or more.
  return num_buckets * kPlaces * (is_large ? 25 : 32) / 40;
}

struct alignas(64) Bucket {
  Key keys[kPlaces];  // The first `num_keys` are valid.
  SetId ids[kPlaces];
  uint32_t num_keys : 3;
  uint32_t num_passed : 29;

  // The place of `key`, or kPlaces. Without branches, because the place is not predictable.
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

  // To be called when the first bucket has arrived: prefetches the next bucket if a search will
  // read it. Always inline, because GCC removes calls to functions that only prefetch.
  __attribute__((always_inline)) void prefetch_next(Key key) const {
    const uint32_t s = segment_of(key);
    const uint32_t at = home(s, key);
    const Bucket& here = bucket(s, at);
    if (here.num_passed || here.num_keys == kPlaces) __builtin_prefetch(&bucket(s, next(s, at)));
  }

  // A pointer to the id of `key`, or null. It is valid until the table changes.
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

  // `key` must not be in the table.
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

  // `id` is what `find` returned for `key`.
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

  // Shrinks a segment that has less than half of the keys that it can hold, and frees memory.
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

  // The bucket is chosen by the key's low bits, the segment by its top bits.
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

  // Places a key in a bucket before `end`. Returns false, with nothing changed, if all are full.
  bool place_before(uint32_t end, uint32_t s, Key key, SetId id) {
    const uint32_t from = home(s, key);
    uint32_t to = from;
    while (to < end && bucket(s, to).num_keys == kPlaces) to++;
    if (to >= end) return false;
    for (uint32_t at = from; at < to; at++) bucket(s, at).num_passed++;
    bucket(s, to).put(key, id);
    return true;
  }

  // Resizes a segment in place. Buckets are read from the end that keys move towards, so the
  // buckets behind the current one are in the new order already. Keys that are not in their home
  // bucket are placed last, as most are the youngest, and so are keys that find no place behind.
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

  // Segments grow at about the same time, and the first one to grow reaches all new levels. These
  // are prepared one by one before, so that no event waits for all their pages.
  void note_when_to_prepare() {
    const uint32_t level = levels_.num_prepared(), least = level * kPiece;
    uint32_t num_buckets = 1;
    while (larger(num_buckets) <= least) num_buckets = larger(num_buckets);
    const double room = room_of(num_buckets);
    const double share = double(least - num_buckets) / (larger(num_buckets) - num_buckets);
    // Hardly one segment in a thousand is ahead of the others by four standard deviations.
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
