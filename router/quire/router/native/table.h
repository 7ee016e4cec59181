// From 64-bit keys to ids of sets, 16 to 24 bytes a key.
//
// A key's top bits choose one of 1,024 segments, which grow one by one: no event waits for more
// than a thousandth of the table to be moved. A segment is an array of buckets of one cache line:
// five keys, five ids, and how many keys that belong here or before lie further on. A search so
// ends at the first bucket that nothing passed, which for most keys is the first it reads.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "extents.h"

namespace quire {

using Key = uint64_t;
using SetId = uint32_t;  // 0 is no set: an empty place.

constexpr int kSegmentBits = 10;
constexpr uint32_t kNumSegments = 1u << kSegmentBits;
constexpr uint32_t kPlaces = 5;
constexpr uint32_t kFullAt = 4;  // Keys per bucket, on average, at which a segment grows.

struct alignas(64) Bucket {
    Key keys[kPlaces];
    SetId ids[kPlaces];
    uint32_t num_passed;
};
static_assert(sizeof(Bucket) == 64, "a bucket is a cache line");

class Segment {
  public:
    Segment() { resize(1); }
    ~Segment() { release(buckets_, num_buckets_); }
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    size_t num_bytes() const { return num_buckets_ * sizeof(Bucket); }

    void prefetch(Key key) const { __builtin_prefetch(buckets_ + home(key)); }

    // Where the id of `key` is, or null. Valid until the segment is changed.
    SetId* find(Key key) const {
        uint32_t at = home(key);
        for (uint32_t step = 0; step < num_buckets_; step++) {
            Bucket& bucket = buckets_[at];
            for (uint32_t i = 0; i < kPlaces; i++)
                if (bucket.keys[i] == key && bucket.ids[i]) return &bucket.ids[i];
            if (!bucket.num_passed) return nullptr;
            at = next(at);
        }
        return nullptr;
    }

    // `key` must not be there.
    void insert(Key key, SetId id) {
        if (num_keys_ >= kFullAt * num_buckets_) resize(num_buckets_ + num_buckets_ / 2 + 1);
        place(key, id);
    }

    // `key` must be there.
    void erase(Key key) {
        for (uint32_t at = home(key);; at = next(at)) {
            Bucket& bucket = buckets_[at];
            for (uint32_t i = 0; i < kPlaces; i++)
                if (bucket.keys[i] == key && bucket.ids[i]) {
                    bucket.ids[i] = 0;
                    num_keys_--;
                    return;
                }
            bucket.num_passed--;
        }
    }

    template <class Visit>  // visit(key, id)
    void each(Visit visit) const {
        for (uint32_t at = 0; at < num_buckets_; at++)
            for (uint32_t i = 0; i < kPlaces; i++)
                if (buckets_[at].ids[i]) visit(buckets_[at].keys[i], buckets_[at].ids[i]);
    }

    // Gives memory back where less than half of what it could hold is left.
    void shrink() {
        if (2 * num_keys_ < kFullAt * num_buckets_ && num_buckets_ > 1)
            resize(num_keys_ / kFullAt + num_keys_ / (4 * kFullAt) + 1);
    }

  private:
    // The table's segment takes the key's top bits, this its lowest.
    uint32_t home(Key key) const { return uint64_t(uint32_t(key)) * num_buckets_ >> 32; }
    uint32_t next(uint32_t at) const { return at + 1 == num_buckets_ ? 0 : at + 1; }

    void place(Key key, SetId id) {
        num_keys_++;
        for (uint32_t at = home(key);; at = next(at)) {
            Bucket& bucket = buckets_[at];
            for (uint32_t i = 0; i < kPlaces; i++)
                if (!bucket.ids[i]) {
                    bucket.keys[i] = key;
                    bucket.ids[i] = id;
                    return;
                }
            bucket.num_passed++;
        }
    }

    void resize(uint32_t num_buckets) {
        Bucket* old = buckets_;
        const uint32_t num_old = num_buckets_;
        buckets_ = allocate(num_buckets);
        std::memset(static_cast<void*>(buckets_), 0, num_buckets * sizeof(Bucket));
        num_buckets_ = num_buckets;
        num_keys_ = 0;
        for (uint32_t at = 0; at < num_old; at++)
            for (uint32_t i = 0; i < kPlaces; i++)
                if (old[at].ids[i]) place(old[at].keys[i], old[at].ids[i]);
        release(old, num_old);
    }

    static Bucket* allocate(uint32_t num_buckets) {
        const size_t num_bytes = num_buckets * sizeof(Bucket);
        void* memory = num_bytes < Extents::kLeast ? std::aligned_alloc(alignof(Bucket), num_bytes)
                                                   : Extents::shared().allocate(num_bytes);
        if (!memory) throw std::bad_alloc();
        return static_cast<Bucket*>(memory);
    }

    static void release(Bucket* buckets, uint32_t num_buckets) {
        const size_t num_bytes = num_buckets * sizeof(Bucket);
        if (num_bytes < Extents::kLeast)
            std::free(buckets);
        else
            Extents::shared().release(buckets, num_bytes);
    }

    Bucket* buckets_ = nullptr;
    uint32_t num_buckets_ = 0;
    uint32_t num_keys_ = 0;
};

class Table {
  public:
    uint64_t num_keys = 0;

    size_t num_bytes() const {
        size_t total = 0;
        for (const Segment& segment : segments_) total += sizeof segment + segment.num_bytes();
        return total;
    }

    static uint32_t segment_of(Key key) { return key >> (64 - kSegmentBits); }

    Segment& segment(uint32_t index) { return segments_[index]; }
    void prefetch(Key key) const { segments_[segment_of(key)].prefetch(key); }
    SetId* find(Key key) const { return segments_[segment_of(key)].find(key); }

    void insert(Key key, SetId id) {
        segments_[segment_of(key)].insert(key, id);
        num_keys++;
    }

    void erase(Key key) {
        segments_[segment_of(key)].erase(key);
        num_keys--;
    }

  private:
    std::vector<Segment> segments_{kNumSegments};
};

}  // namespace quire
