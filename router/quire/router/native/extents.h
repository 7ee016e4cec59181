// Memory for what is large and read in no order, cut from huge pages where the system has them.
//
// A read that no cache holds waits for its address to be translated too, and with pages of 4 KB
// that is a second read from memory. Ranges are taken from the lowest address that has room, so
// that holes are filled before more is asked for. What a hole leaves of huge pages goes back to
// the system once it is large: a small one will soon be filled, and a new page must be cleared.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <new>

namespace quire {

class Extents {
  public:
    static constexpr size_t kPage = size_t(2) << 20;
    static constexpr size_t kLeast = kPage / 64;     // Less is malloc's.
    static constexpr size_t kLargeHole = 4 * kPage;  // Smaller ones keep their pages.

    // Of the process. Never destroyed: tables may be left when it ends.
    static Extents& shared() {
        static Extents* extents = new Extents;
        return *extents;
    }

    // Aligned to a cache line, its contents undefined. `num_bytes` is a multiple of 64.
    void* allocate(size_t num_bytes) {
        const std::lock_guard<std::mutex> guard(lock_);
        auto hole = holes_.begin();
        while (hole != holes_.end() && hole->second < num_bytes) ++hole;
        if (hole == holes_.end()) hole = grow(num_bytes);
        const auto [at, size] = *hole;
        holes_.erase(hole);
        if (size > num_bytes) holes_.emplace(at + num_bytes, size - num_bytes);
        return reinterpret_cast<void*>(at);
    }

    void release(void* memory, size_t num_bytes) {
        const std::lock_guard<std::mutex> guard(lock_);
        uintptr_t from = reinterpret_cast<uintptr_t>(memory), to = from + num_bytes;
        // Around it there may be holes that were too small.
        const uintptr_t near_from = from - kLargeHole, near_to = to + kLargeHole;
        auto after = holes_.lower_bound(from);
        if (after != holes_.begin()) {
            const auto before = std::prev(after);
            if (before->first + before->second == from) {
                from = before->first;
                holes_.erase(before);
            }
        }
        if (after != holes_.end() && after->first == to) {
            to += after->second;
            holes_.erase(after);
        }
        holes_.emplace(from, to - from);
        if (to - from < kLargeHole) return;
        from = (std::max(from, near_from) + kPage - 1) & ~(kPage - 1);
        to = std::min(to, near_to) & ~(kPage - 1);
        madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
    }

  private:
    using Holes = std::map<uintptr_t, size_t>;  // Sizes by address; no two touch each other.

    // Addresses are reserved in large pieces and cost nothing until they are written to.
    Holes::iterator grow(size_t num_bytes) {
        const size_t size = std::max((num_bytes + kPage - 1) & ~(kPage - 1), 32 * kPage);
        void* memory = mmap(nullptr, size + kPage, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        const uintptr_t begin = reinterpret_cast<uintptr_t>(memory);
        const uintptr_t from = (begin + kPage - 1) & ~(kPage - 1);
        if (from > begin) munmap(memory, from - begin);
        munmap(reinterpret_cast<void*>(from + size), begin + kPage - from);
#ifdef MADV_HUGEPAGE
        madvise(reinterpret_cast<void*>(from), size, MADV_HUGEPAGE);  // Refused: small ones.
#endif
        auto hole = holes_.emplace(from, size).first;
        if (hole != holes_.begin()) {
            const auto before = std::prev(hole);
            if (before->first + before->second == from) {
                before->second += size;
                holes_.erase(hole);
                hole = before;
            }
        }
        return hole;
    }

    std::mutex lock_;
    Holes holes_;
};

}  // namespace quire
