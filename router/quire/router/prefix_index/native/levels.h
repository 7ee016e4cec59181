// Memory for arrays that grow side by side and in place.
//
// There are `kNumArrays` of them, and each has a piece of `kPieceBytes` in every *level* that it
// reaches. Arrays of about one length fill their levels, so that nothing is lost between them, none
// has to move to become longer, and no page is asked of the system twice. (One of 2 MB takes it
// 0.1 ms, and fifty times that where a hypervisor has to find the memory first.)
//
// A level that was *prepared* is one huge page, where the system has them: a read that no cache
// holds waits for its address to be translated too, and with pages of 4 KB that is a second read
// from memory. Any other one, which maybe few arrays reach, takes small pages as they are used.
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
  static constexpr size_t kNumSmall = 4;  // Levels whose pages are small in any case.

  Levels() = default;
  Levels(const Levels&) = delete;
  Levels& operator=(const Levels&) = delete;
  ~Levels() {
    for (auto [at, num_bytes] : mapped_) munmap(at, num_bytes);
  }

  // The piece of an array in a level. All zeros when the array reached the level first.
  uint8_t* piece(size_t array, size_t level) const { return levels_[level] + array * kPieceBytes; }

  // The lowest level that may be prepared next.
  size_t num_prepared() const { return num_prepared_; }

  void prepare() {
    while (num_prepared_ >= levels_.size()) map_more();
    uint8_t* begin = levels_[num_prepared_++];
#ifdef MADV_HUGEPAGE
    madvise(begin, kPage, MADV_HUGEPAGE);  // Refused: small ones.
#endif
    // A byte of the last piece, for the system: its value remains.
    *static_cast<volatile uint8_t*>(begin + kPage - 1) |= 0;
  }

  // One more array reaches `level`.
  void reach(size_t level) {
    while (level >= levels_.size()) map_more();
    num_arrays_[level]++;
  }

  // An array that had reached `level` is shorter now, and has left zeros there.
  void leave(size_t level) {
    if (--num_arrays_[level]) return;
    const size_t end = std::max(level + 1, num_prepared_);
    for (size_t unused = level; unused < end; unused++)
      if (!num_arrays_[unused]) madvise(levels_[unused], kPage, MADV_DONTNEED);
    num_prepared_ = std::max(std::min(num_prepared_, level), kNumSmall);
  }

 private:
  // Addresses are reserved for many levels at once. They cost nothing until they are written to.
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
  std::vector<uint32_t> num_arrays_;  // That reach a level.
  size_t num_prepared_ = kNumSmall;
  std::vector<std::pair<void*, size_t>> mapped_;
};

}  // namespace quire
