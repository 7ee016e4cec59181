// Memory for the table in pieces of one size, cut from huge pages.
//
// A look-up reads a handful of places all over a table of hundreds of megabytes. In pages of 4 KB
// each such read first waits for the page's translation, and under a hypervisor for two; in pages
// of 2 MB it does not. Pieces of one size leave no gaps, whatever order segments grow in.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace quire {

constexpr size_t kExtentBytes = 8 << 10;
constexpr size_t kSlabBytes = 2 << 20;  // A huge page, where the system has them.

// Keeps what is given back, for the next who asks, until it is itself destroyed.
class ExtentPool {
  public:
    // All of it, handed out or not.
    size_t num_bytes() const {
        return slabs_.size() * kSlabBytes + free_.capacity() * sizeof(void*);
    }

    // Its contents are undefined.
    void* take() {
        if (free_.empty()) add_slab();
        void* extent = free_.back();
        free_.pop_back();
        return extent;
    }

    void give_back(void* extent) { free_.push_back(extent); }

  private:
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };

    void add_slab() {
        std::unique_ptr<char, Free> slab(
            static_cast<char*>(std::aligned_alloc(kSlabBytes, kSlabBytes)));
        if (!slab) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        madvise(slab.get(), kSlabBytes, MADV_HUGEPAGE);  // A wish. It may be refused.
#endif
        for (size_t end = kSlabBytes; end; end -= kExtentBytes)
            free_.push_back(slab.get() + end - kExtentBytes);
        slabs_.push_back(std::move(slab));
    }

    std::vector<std::unique_ptr<char, Free>> slabs_;
    std::vector<void*> free_;
};

}  // namespace quire
