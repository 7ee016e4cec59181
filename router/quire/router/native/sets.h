// Sets of slots, each distinct one kept once while keys refer to it.
//
// A set is a row of bits. Its hash is the XOR of a number per member, so that the hash of a set with
// one member more or less is known before the set is: finding it costs one look-up.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "table.h"

namespace quire {

using Slot = uint32_t;

class SetTable {
  public:
    SetTable() : words_(1), hashes_(1), num_refs_(1), num_members_(1), interned_(64) {}

    size_t num_words() const { return num_words_; }
    const uint64_t* words(SetId id) const { return &words_[id * num_words_]; }
    bool has(SetId id, Slot slot) const { return words(id)[slot / 64] >> (slot % 64) & 1; }
    bool is_empty(SetId id) const { return !num_members_[id]; }
    uint32_t num_refs(SetId id) const { return num_refs_[id]; }

    size_t num_sets() const { return hashes_.size() - 1 - free_.size(); }

    size_t num_bytes() const {
        return 8 * words_.capacity() + 8 * hashes_.capacity() +
               4 * (num_refs_.capacity() + num_members_.capacity() + interned_.capacity());
    }

    // Makes room for members up to `slot`.
    void admit(Slot slot) {
        size_t wider = num_words_;
        while (slot >= 64 * wider) wider *= 2;
        if (wider == num_words_) return;
        std::vector<uint64_t> words(hashes_.size() * wider);
        for (size_t id = 0; id < hashes_.size(); id++)
            std::memcpy(&words[id * wider], &words_[id * num_words_], 8 * num_words_);
        words_.swap(words);
        num_words_ = wider;
    }

    // The set that differs from `id` in `slot` only. It has no reference yet, or others'.
    SetId toggled(SetId id, Slot slot) {
        const uint64_t hash = hashes_[id] ^ number_of(slot);
        size_t at = place_of(hash);
        for (; interned_[at]; at = (at + 1) & mask())
            if (hashes_[interned_[at]] == hash && differs_in(interned_[at], id, slot))
                return interned_[at];
        const SetId made = make(id, slot, hash);
        intern(made);
        return made;
    }

    // The set without its member `slot`; 0 where no other is left.
    SetId without(SetId id, Slot slot) { return num_members_[id] == 1 ? 0 : toggled(id, slot); }

    void refer(SetId id) { num_refs_[id]++; }

    void release(SetId id) {
        if (--num_refs_[id]) return;
        forget(id);
        free_.push_back(id);
    }

    // Takes `slot` out of every set, in place; returns how many references empty sets got.
    // Two sets may have become equal. One of them then takes no more keys.
    uint64_t clear(Slot slot) {
        uint64_t num_emptied = 0;
        std::fill(interned_.begin(), interned_.end(), 0);
        num_interned_ = 0;
        for (SetId id = 1; id < hashes_.size(); id++) {
            if (!num_refs_[id]) continue;
            if (has(id, slot)) {
                words_[id * num_words_ + slot / 64] ^= uint64_t(1) << (slot % 64);
                hashes_[id] ^= number_of(slot);
                if (!--num_members_[id]) num_emptied += num_refs_[id];
            }
            if (num_members_[id]) intern(id);
        }
        return num_emptied;
    }

  private:
    static uint64_t number_of(Slot slot) {  // splitmix64
        uint64_t x = (slot + 1) * 0x9e3779b97f4a7c15;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
        x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
        return x ^ (x >> 31);
    }

    size_t mask() const { return interned_.size() - 1; }
    size_t place_of(uint64_t hash) const { return hash & mask(); }

    bool differs_in(SetId a, SetId b, Slot slot) const {
        for (size_t i = 0; i < num_words_; i++) {
            const uint64_t wanted = i == slot / 64 ? uint64_t(1) << (slot % 64) : 0;
            if ((words(a)[i] ^ words(b)[i]) != wanted) return false;
        }
        return true;
    }

    SetId make(SetId from, Slot slot, uint64_t hash) {
        SetId id;
        if (free_.empty()) {
            id = hashes_.size();
            words_.resize(words_.size() + num_words_);
            hashes_.push_back(0);
            num_refs_.push_back(0);
            num_members_.push_back(0);
        } else {
            id = free_.back();
            free_.pop_back();
        }
        uint64_t* to = &words_[id * num_words_];
        std::memcpy(to, words(from), 8 * num_words_);
        to[slot / 64] ^= uint64_t(1) << (slot % 64);
        num_members_[id] = num_members_[from] + (to[slot / 64] >> (slot % 64) & 1 ? 1 : -1);
        hashes_[id] = hash;
        return id;
    }

    void intern(SetId id) {
        if (2 * ++num_interned_ > interned_.size()) {
            std::vector<SetId> old(2 * interned_.size());
            old.swap(interned_);
            for (SetId other : old)
                if (other) interned_[vacancy(hashes_[other])] = other;
        }
        interned_[vacancy(hashes_[id])] = id;
    }

    size_t vacancy(uint64_t hash) const {
        size_t at = place_of(hash);
        while (interned_[at]) at = (at + 1) & mask();
        return at;
    }

    // Linear probing without marks: what lies behind the hole and would be missed moves into it.
    void forget(SetId id) {
        size_t hole = place_of(hashes_[id]);
        for (; interned_[hole] != id; hole = (hole + 1) & mask())
            if (!interned_[hole]) return;  // Not interned: empty, or equal to another.
        num_interned_--;
        for (size_t at = (hole + 1) & mask(); interned_[at]; at = (at + 1) & mask()) {
            const size_t home = place_of(hashes_[interned_[at]]);
            if (((at - home) & mask()) >= ((at - hole) & mask())) {
                interned_[hole] = interned_[at];
                hole = at;
            }
        }
        interned_[hole] = 0;
    }

    size_t num_words_ = 1;
    std::vector<uint64_t> words_;  // num_words_ for each set; set 0 is empty and nobody's.
    std::vector<uint64_t> hashes_;
    std::vector<uint32_t> num_refs_;
    std::vector<uint32_t> num_members_;
    std::vector<SetId> interned_;  // Open addressing by hash; its size is a power of two.
    size_t num_interned_ = 0;
    std::vector<SetId> free_;
};

}  // namespace quire
