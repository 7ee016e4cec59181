#include "holders.h"

#include <algorithm>

namespace quire {

namespace {

// Keys ahead for which memory is asked: more than a core can wait for at once.
constexpr uint64_t kAhead = 12;
constexpr uint64_t kWays = 8;

}  // namespace

void HolderIndex::admit(Slot slot) {
    if (slot < slots_.size()) return;
    slots_.resize(slot + 1);
    sets_.admit(slot);
    searched_.resize(sets_.num_words());
}

void HolderIndex::add(Slot slot, const uint8_t* hashes, uint64_t num_hashes) {
    Held& held = slots_[slot];
    // A chain's blocks mostly have the same holders. What is remembered holds within this call:
    // no key leaves a set that has the slot.
    SetId from = 0, to = sets_.toggled(0, slot);
    sets_.refer(to);
    const SetId alone = to;
    for (uint64_t i = 0; i < num_hashes; i++) {
        if (i + kAhead < num_hashes) table_.prefetch(key_at(hashes, i + kAhead));
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
            if (!sets_.num_refs(old)) from = 0;  // Its number may come to mean another set.
        }
        held.num_held++;
        held.digests[bucket_of(key)] ^= key;
    }
    sets_.release(alone);
    if (num_ownerless_) sweep(1 + num_hashes / 1024);
}

void HolderIndex::remove(Slot slot, const uint8_t* hashes, uint64_t num_hashes) {
    Held& held = slots_[slot];
    SetId from = 0, to = 0;  // As above, the other way round.
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
            table_.erase(key);
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
    constexpr uint32_t kSegments = kNumSegments / kNumDigests;  // A bucket is the same top bits.
    for (uint64_t i = 0; i < num_buckets; i++) {
        slots_[slot].refused[buckets[i]] = false;
        for (uint32_t s = 0; s < kSegments; s++)
            table_.segment(buckets[i] * kSegments + s).each([&](Key key, SetId id) {
                if (!sets_.has(id, slot) || std::binary_search(wanted.begin(), wanted.end(), key))
                    return;
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
    Search under_way{hashes, lengths, found, 0};
    search(under_way, 0, first_id, last, last_id);
    search(under_way, last, last_id, num_hashes, 0);
    return under_way.num_found;
}

// Visits the slots whose end is searched for, that are in one set and not in the other, as long as
// `visit` says to go on; returns whether it did not.
template <class Visit>  // visit(slot) -> bool
bool HolderIndex::each_that_leaves(SetId low_id, SetId high_id, Visit visit) const {
    if (sets_.is_small(low_id)) {
        for (Slot slot : sets_.members(low_id)) {
            if (slot == kNoSlot) break;
            const bool is_searched = searched_[slot / 64] >> (slot % 64) & 1;
            if (is_searched && !sets_.has(high_id, slot) && !visit(slot)) return true;
        }
        return false;
    }
    const uint64_t* before = sets_.row(low_id);
    for (size_t i = 0; i < searched_.size(); i++)
        for (uint64_t left = searched_[i] & before[i] & ~sets_.word(high_id, i); left;
             left &= left - 1)
            if (!visit(64 * i + __builtin_ctzll(left))) return true;
    return false;
}

// Between two blocks with the same holders all blocks have those, as no group's chain has holes.
// Else the span is cut into eight, for eight reads from memory at once take the time of one.
void HolderIndex::search(Search& under_way, uint64_t low, SetId low_id, uint64_t high,
                         SetId high_id) {
    if (low_id == high_id || !any_leaves(low_id, high_id)) return;
    const uint64_t span = high - low;
    if (span == 1) {
        each_that_leaves(low_id, high_id, [&](Slot slot) {
            searched_[slot / 64] ^= uint64_t(1) << (slot % 64);
            under_way.lengths[slot] = high;
            under_way.found[under_way.num_found++] = slot;
            return true;
        });
        return;
    }
    const uint64_t ways = std::min(span, kWays);
    SetId ids[kWays + 1];
    for (uint64_t way = 1; way < ways; way++)
        table_.prefetch(key_at(under_way.hashes, low + span * way / ways));
    ids[0] = low_id;
    ids[ways] = high_id;
    for (uint64_t way = 1; way < ways; way++)
        ids[way] = id_at(key_at(under_way.hashes, low + span * way / ways));
    for (uint64_t way = 0; way < ways; way++)
        search(under_way, low + span * way / ways, ids[way], low + span * (way + 1) / ways,
               ids[way + 1]);
}

bool HolderIndex::any_leaves(SetId low_id, SetId high_id) const {
    return each_that_leaves(low_id, high_id, [](Slot) { return false; });
}

bool HolderIndex::has_room() {
    if (table_.num_keys < max_blocks_) return true;
    if (!num_ownerless_) return false;
    sweep(kNumSegments);
    return table_.num_keys < max_blocks_;
}

// Erases the ownerless keys of some segments. A gateway must not stop to walk ten million blocks
// just because a group died: each batch of events afterwards sweeps a little.
void HolderIndex::sweep(uint32_t num_segments) {
    std::vector<Key> ownerless;
    for (num_segments = std::min(num_segments, kNumSegments); num_segments && num_ownerless_;
         num_segments--) {
        Segment& segment = table_.segment(swept_);
        swept_ = (swept_ + 1) % kNumSegments;
        ownerless.clear();
        segment.each([&](Key key, SetId id) {
            if (!sets_.is_empty(id)) return;
            ownerless.push_back(key);
            sets_.release(id);
        });
        for (Key key : ownerless) table_.erase(key);
        num_ownerless_ -= ownerless.size();
        segment.shrink();
    }
}

}  // namespace quire

extern "C" {

using quire::HolderIndex;
using quire::Slot;

HolderIndex* quire_holders_new(uint64_t max_blocks) { return new HolderIndex(max_blocks); }
void quire_holders_delete(HolderIndex* index) { delete index; }
void quire_holders_admit(HolderIndex* index, Slot slot) { index->admit(slot); }

void quire_holders_add(HolderIndex* index, Slot slot, const uint8_t* hashes, uint64_t num_hashes) {
    index->add(slot, hashes, num_hashes);
}

void quire_holders_remove(HolderIndex* index, Slot slot, const uint8_t* hashes,
                          uint64_t num_hashes) {
    index->remove(slot, hashes, num_hashes);
}

void quire_holders_clear(HolderIndex* index, Slot slot) { index->clear(slot); }

void quire_holders_replace(HolderIndex* index, Slot slot, const uint8_t* buckets,
                           uint64_t num_buckets, const uint8_t* hashes, uint64_t num_hashes) {
    index->replace(slot, buckets, num_buckets, hashes, num_hashes);
}

uint32_t quire_holders_look_up(HolderIndex* index, const uint8_t* hashes, uint64_t num_hashes,
                               int32_t* lengths, Slot* found) {
    return index->look_up(hashes, num_hashes, lengths, found);
}

uint64_t quire_holders_num_blocks(const HolderIndex* index) { return index->num_blocks(); }
uint64_t quire_holders_num_refused(const HolderIndex* index) { return index->num_refused(); }

uint64_t quire_holders_num_sets(const HolderIndex* index) { return index->num_sets(); }
uint64_t quire_holders_num_bytes(const HolderIndex* index) { return index->num_bytes(); }

uint64_t quire_holders_num_held(const HolderIndex* index, Slot slot) {
    return index->num_held(slot);
}

void quire_holders_digests(const HolderIndex* index, Slot slot, uint64_t* digests,
                           uint8_t* refused) {
    std::memcpy(digests, index->digests(slot), 8 * quire::kNumDigests);
    for (int bucket = 0; bucket < quire::kNumDigests; bucket++)
        refused[bucket] = index->was_refused(slot, bucket);
}
}
