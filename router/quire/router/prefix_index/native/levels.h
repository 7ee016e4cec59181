// Memory for arrays of about the same length, which grow in place.
//
// There are `kNumArrays` arrays, and each has a piece of `kPieceBytes` in every *level* that it
// reaches. Arrays of similar length fill their levels, so no memory is lost between them, no array
// has to move to grow, and no page is requested from the system twice. (A page of 2 MB takes
// 0.1 ms, and fifty times that if a hypervisor has to provide the memory first.)
//
// A *prepared* level is one huge page, if the system has them. A read that misses the caches also
// waits for its address translation, which with 4 KB pages is a second read from memory. Other
// levels, which few arrays may reach, take small pages as they are used.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace quire {

class Levels {
 public:
  static constexpr size_t kPage = size_t(2) << 20;
  static constexpr size_t kNumArrays = 1024;
  static constexpr size_t kPieceBytes = kPage / kNumArrays;
  static constexpr size_t kNumSmall = 4;  // The first levels, which always have small pages.

  Levels() = default;
  Levels(const Levels&) = delete;
  Levels& operator=(const Levels&) = delete;
  ~Levels() {
    for (auto [at, num_bytes] : mapped_) munmap(at, num_bytes);
  }

  // The piece of an array in a level. It is all zeros when the array reaches the level.
  uint8_t* piece(size_t array, size_t level) const { return levels_[level] + array * kPieceBytes; }

  // The level that `prepare` prepares next.
  size_t num_prepared() const { return num_prepared_; }

  void prepare() {
    while (num_prepared_ >= levels_.size()) map_more();
    uint8_t* begin = levels_[num_prepared_++];
#ifdef MADV_HUGEPAGE
    madvise(begin, kPage, MADV_HUGEPAGE);  // If this is refused, pages are small.
#endif
    // Touches a byte, so that the system provides the page. Its value does not change.
    *static_cast<volatile uint8_t*>(begin + kPage - 1) |= 0;
  }

  // One more array reaches `level`.
  void reach(size_t level) {
    while (level >= levels_.size()) map_more();
    num_arrays_[level]++;
  }

  // An array that had reached `level` has shrunk. It has left zeros there.
  void leave(size_t level) {
    if (--num_arrays_[level]) return;
    const size_t end = std::max(level + 1, num_prepared_);
    for (size_t unused = level; unused < end; unused++)
      if (!num_arrays_[unused]) madvise(levels_[unused], kPage, MADV_DONTNEED);
    num_prepared_ = std::max(std::min(num_prepared_, level), kNumSmall);
  }

 private:
  // Reserves addresses for many levels at once. They cost nothing until they are written to.
  void map_more() {
    const size_t num_more = std::max<size_t>(8, levels_.size() / 2);
    const size_t num_bytes = (num_more + 1) * kPage;
    void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mapped_.emplace_back(memory, num_bytes);
    const uintptr_t from = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) & ~(kPage - 1);
    for (size_t i = 0; i < num_more; i++)
      levels_.push_back(reinterpret_cast<uint8_t*>(from + i * kPage));
    num_arrays_.resize(levels_.size());
#ifdef MADV_NOHUGEPAGE
    madvise(memory, num_bytes, MADV_NOHUGEPAGE);
#endif
  }

  std::vector<uint8_t*> levels_;
  std::vector<uint32_t> num_arrays_;  // How many arrays reach each level.
  size_t num_prepared_ = kNumSmall;
  std::vector<std::pair<void*, size_t>> mapped_;
};

}  // namespace quire
