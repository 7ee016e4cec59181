#include "holders.h"

#include <algorithm>

namespace quire {

namespace {

// How many keys ahead the first bucket is prefetched: more reads than a core can have in flight.
constexpr uint64_t kAhead = 24;
// How many keys ahead that bucket has arrived and shows whether a second one will be read.
constexpr uint64_t kNear = 10;

// The number of reads in one round of a look-up, over all spans, and the least number of pieces of
// a span. A round takes the time of one read from memory, and a fifth of that for each further one.
constexpr uint64_t kReads = 8;
constexpr uint64_t kLeastWays = 4;

// The places where a span is cut into pieces of about the same length.
struct Cuts {
  Cuts(uint64_t low, uint64_t high, uint64_t num_spans)
      : low(low),
        num(std::min(std::max(1 + kReads / num_spans, kLeastWays), high - low)),
        piece(((high - low) << kFraction) / num + 1) {}

  uint64_t at(uint64_t way) const { return low + (piece * way >> kFraction); }

  static constexpr int kFraction = 16;
  uint64_t low;
  uint64_t num;
  uint64_t piece;  // A piece's length, fixed point: a division per cut costs as much as a hit.
};

}  // namespace

void HolderIndex::admit(Slot slot) {
  if (slot < slots_.size()) return;
  slots_.resize(slot + 1);
  sets_.admit(slot);
  searched_.resize(sets_.num_words());
}

void HolderIndex::add(Slot slot, const uint8_t* hashes, uint64_t num_hashes) {
  Held& held = slots_[slot];
  // Most blocks of a chain have the same holders, so the last set (`from`) and its successor (`to`)
  // are remembered. They stay valid in this call: no key leaves a set that has the slot.
  SetId from = 0, to = sets_.toggled(0, slot);
  sets_.refer(to);
  const SetId alone = to;
  for (uint64_t i = 0; i < num_hashes; i++) {
    if (i + kAhead < num_hashes) table_.prefetch(key_at(hashes, i + kAhead));
    if (i + kNear < num_hashes) table_.prefetch_next(key_at(hashes, i + kNear));
    const Key key = key_at(hashes, i);
    SetId* id = table_.find(key);
    if (!id) {
      if (!has_room()) {
        num_refused_++;
        held.refused[bucket_of(key)] = true;
        continue;
      }
      sets_.refer(alone);
      table_.insert(key, alone);
    } else {
      if (sets_.has(*id, slot)) continue;
      if (from != *id) {
        from = *id;
        to = sets_.toggled(from, slot);
      }
      if (sets_.is_empty(from)) num_ownerless_--;
      const SetId old = *id;
      *id = to;
      sets_.refer(to);
      sets_.release(old);
      if (!sets_.num_refs(old)) from = 0;  // The id may be reused for another set.
    }
    held.num_held++;
    held.digests[bucket_of(key)] ^= key;
  }
  sets_.release(alone);
  if (num_ownerless_) sweep(1 + num_hashes / 1024);
}

void HolderIndex::remove(Slot slot, const uint8_t* hashes, uint64_t num_hashes) {
  Held& held = slots_[slot];
  SetId from = 0, to = 0;  // As in `add`, but `to` lacks the slot.
  for (uint64_t i = 0; i < num_hashes; i++) {
    if (i + kAhead < num_hashes) table_.prefetch(key_at(hashes, i + kAhead));
    const Key key = key_at(hashes, i);
    SetId* id = table_.find(key);
    if (!id || !sets_.has(*id, slot)) continue;
    const SetId old = *id;
    if (from != old) {
      from = old;
      to = sets_.without(old, slot);
    }
    if (to) {
      *id = to;
      sets_.refer(to);
    } else {
      table_.erase(key, id);
    }
    sets_.release(old);
    if (!sets_.num_refs(old)) from = 0;
    held.num_held--;
    held.digests[bucket_of(key)] ^= key;
  }
}

void HolderIndex::clear(Slot slot) {
  if (slots_[slot].num_held) num_ownerless_ += sets_.clear(slot);
  slots_[slot] = Held();
}

void HolderIndex::replace(Slot slot, const uint8_t* buckets, uint64_t num_buckets,
                          const uint8_t* hashes, uint64_t num_hashes) {
  std::vector<Key> wanted(num_hashes);
  for (uint64_t i = 0; i < num_hashes; i++) wanted[i] = key_at(hashes, i);
  std::sort(wanted.begin(), wanted.end());
  std::vector<std::array<uint8_t, kHashBytes>> excess;
  constexpr uint32_t kSegments = kNumSegments / kNumDigests;  // Both are chosen by top bits.
  for (uint64_t i = 0; i < num_buckets; i++) {
    slots_[slot].refused[buckets[i]] = false;
    for (uint32_t s = 0; s < kSegments; s++)
      table_.each(buckets[i] * kSegments + s, [&](Key key, SetId id) {
        if (!sets_.has(id, slot) || std::binary_search(wanted.begin(), wanted.end(), key)) return;
        std::memcpy(excess.emplace_back().data(), &key, sizeof key);
      });
  }
  if (!excess.empty()) remove(slot, excess.front().data(), excess.size());
  add(slot, hashes, num_hashes);
}

uint32_t HolderIndex::look_up(const uint8_t* hashes, uint64_t num_hashes, int32_t* lengths,
                              Slot* found) {
  std::fill(lengths, lengths + slots_.size(), 0);
  if (!num_hashes) return 0;
  const uint64_t last = num_hashes - 1;
  table_.prefetch(key_at(hashes, last));
  const SetId first_id = id_at(key_at(hashes, 0));
  if (!first_id) return 0;
  const SetId last_id = last ? id_at(key_at(hashes, last)) : first_id;
  std::fill(searched_.begin(), searched_.end(), 0);
  if (sets_.is_small(first_id)) {
    for (Slot slot : sets_.members(first_id))
      if (slot != kNoSlot) searched_[slot / 64] |= uint64_t(1) << (slot % 64);
  } else {
    std::copy_n(sets_.row(first_id), searched_.size(), searched_.begin());
  }
  Search search{hashes, lengths, found, 0};
  unclaimed_ = searched_;
  consider(search, {0, last, first_id, last_id});
  consider(search, {last, num_hashes, last_id, 0});
  while (!next_spans_.empty()) {
    spans_.swap(next_spans_);
    next_spans_.clear();
    cut_all(search);
  }
  return search.num_found;
}

// Runs one round of a look-up. All spans are read at once, because independent reads from memory
// take little more time than one.
void HolderIndex::cut_all(Search& search) {
  for (const Span& span : spans_) {
    const Cuts cuts(span.low, span.high, spans_.size());
    for (uint64_t way = 1; way < cuts.num; way++)
      table_.prefetch(key_at(search.hashes, cuts.at(way)));
  }
  unclaimed_ = searched_;
  for (const Span& span : spans_) {
    const Cuts cuts(span.low, span.high, spans_.size());
    Span piece{span.low, span.low, span.low_id, span.low_id};
    for (uint64_t way = 1; way <= cuts.num; way++) {
      piece.high = way < cuts.num ? cuts.at(way) : span.high;
      piece.high_id = way < cuts.num ? id_at(key_at(search.hashes, piece.high)) : span.high_id;
      consider(search, piece);
      piece.low = piece.high;
      piece.low_id = piece.high_id;
    }
  }
}

// Finds the slots that hold the span's first block but not its last, and queues the span for the
// next round, or records their ends. If both blocks have the same holders, so have all between
// them, because no group's chain has holes. If there are holes nevertheless, a slot is followed
// only into the lowest span that it leaves, so that there are never more spans than slots.
void HolderIndex::consider(Search& search, const Span& span) {
  if (span.low_id == span.high_id) return;
  const bool is_end = span.high - span.low == 1;
  bool is_left = false;
  const auto leave = [&](size_t word, uint64_t left) {
    is_left = true;
    unclaimed_[word] ^= left;
    if (!is_end) return;
    searched_[word] ^= left;
    for (; left; left &= left - 1) {
      const Slot slot = 64 * word + __builtin_ctzll(left);
      search.lengths[slot] = span.high;
      search.found[search.num_found++] = slot;
    }
  };
  if (sets_.is_small(span.low_id)) {
    for (Slot slot : sets_.members(span.low_id)) {
      if (slot == kNoSlot) break;
      const uint64_t bit = uint64_t(1) << (slot % 64);
      if (unclaimed_[slot / 64] & bit && !sets_.has(span.high_id, slot)) leave(slot / 64, bit);
    }
  } else {
    const uint64_t* before = sets_.row(span.low_id);
    for (size_t i = 0; i < unclaimed_.size(); i++) {
      const uint64_t left = unclaimed_[i] & before[i] & ~sets_.word(span.high_id, i);
      if (left) leave(i, left);
    }
  }
  if (is_left && !is_end) next_spans_.push_back(span);
}

bool HolderIndex::has_room() {
  if (table_.num_keys() < max_blocks_) return true;
  if (!num_ownerless_) return false;
  sweep(kNumSegments);
  return table_.num_keys() < max_blocks_;
}

// Erases the ownerless keys of some segments. A gateway must not stop for ten million blocks when a
// group dies, so each later batch of events sweeps a few segments.
void HolderIndex::sweep(uint32_t num_segments) {
  std::vector<Key> ownerless;
  for (num_segments = std::min(num_segments, kNumSegments); num_segments && num_ownerless_;
       num_segments--) {
    ownerless.clear();
    table_.each(swept_, [&](Key key, SetId id) {
      if (!sets_.is_empty(id)) return;
      ownerless.push_back(key);
      sets_.release(id);
    });
    for (Key key : ownerless) table_.erase(key, table_.find(key));
    num_ownerless_ -= ownerless.size();
    table_.shrink(swept_);
    swept_ = (swept_ + 1) % kNumSegments;
  }
}

}  // namespace quire

using quire::HolderIndex;

// Compared with Python's when the library is loaded.
extern const uint64_t quire_holders_hash_bytes, quire_holders_num_digests;
const uint64_t quire_holders_hash_bytes = quire::kHashBytes;
const uint64_t quire_holders_num_digests = quire::kNumDigests;

extern "C" {

HolderIndex* quire_holders_new(uint64_t max_blocks) { return new HolderIndex(max_blocks); }
void quire_holders_delete(HolderIndex* index) { delete index; }
void quire_holders_admit(HolderIndex* index, uint32_t slot) { index->admit(slot); }

void quire_holders_add(HolderIndex* index, uint32_t slot, const uint8_t* hashes,
                       uint64_t num_hashes) {
  index->add(slot, hashes, num_hashes);
}

void quire_holders_remove(HolderIndex* index, uint32_t slot, const uint8_t* hashes,
                          uint64_t num_hashes) {
  index->remove(slot, hashes, num_hashes);
}

void quire_holders_clear(HolderIndex* index, uint32_t slot) { index->clear(slot); }

void quire_holders_replace(HolderIndex* index, uint32_t slot, const uint8_t* buckets,
                           uint64_t num_buckets, const uint8_t* hashes, uint64_t num_hashes) {
  index->replace(slot, buckets, num_buckets, hashes, num_hashes);
}

uint32_t quire_holders_look_up(HolderIndex* index, const uint8_t* hashes, uint64_t num_hashes,
                               int32_t* lengths, uint32_t* found) {
  return index->look_up(hashes, num_hashes, lengths, found);
}

uint64_t quire_holders_num_blocks(const HolderIndex* index) { return index->num_blocks(); }
uint64_t quire_holders_num_refused(const HolderIndex* index) { return index->num_refused(); }

uint64_t quire_holders_num_sets(const HolderIndex* index) { return index->num_sets(); }
uint64_t quire_holders_num_bytes(const HolderIndex* index) { return index->num_bytes(); }

uint64_t quire_holders_num_held(const HolderIndex* index, uint32_t slot) {
  return index->num_held(slot);
}

void quire_holders_digests(const HolderIndex* index, uint32_t slot, uint64_t* digests,
                           uint8_t* refused) {
  std::memcpy(digests, index->digests(slot), 8 * quire::kNumDigests);
  for (int bucket = 0; bucket < quire::kNumDigests; bucket++)
    refused[bucket] = index->was_refused(slot, bucket);
}
}  // extern "C"
