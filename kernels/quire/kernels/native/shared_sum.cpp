// Sums (all-reduce) and gathers among the ranks of one machine, through memory that they all map.
//
// Every rank writes its values into a slot of its own, increments its counter, waits for the other
// counters, and reads the others' slots: one round, whatever the number of ranks. Each rank has two
// slots, used in turn. A rank that writes in round n has seen all others write in round n - 1. They
// have thus read the values of round n - 2, which it overwrites.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "elements.h"
#include "quire.h"

namespace quire {
namespace {

// Ranks with a core each are done within this many spins; ranks that share a core must then yield.
constexpr int kSpins = 2000;
constexpr int64_t kLine = 64;

struct alignas(kLine) Counter {
  std::atomic<int64_t> round;
};

Counter* counters(const SharedGroup& group) { return reinterpret_cast<Counter*>(group.base); }

char* slot(const SharedGroup& group, int rank) {
  const int64_t index = 2 * rank + group.round % 2;
  return group.base + kLine * group.size + index * group.capacity;
}

void exchange(SharedGroup* group, const void* x, int64_t num_bytes) {
  ++group->round;
  std::memcpy(slot(*group, group->rank), x, num_bytes);
  counters(*group)[group->rank].round.store(group->round, std::memory_order_release);
  for (int rank = 0; rank < group->size; ++rank) {
    const std::atomic<int64_t>& other = counters(*group)[rank].round;
    for (int spins = 0; other.load(std::memory_order_acquire) < group->round; ++spins) {
      if (spins < kSpins) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      } else {
        sched_yield();
      }
    }
  }
}

// Adds ranks [first, end) as a binary tree, so that 4 ranks add in the same order as 2 ranks of 2.
Vec tree(const SharedGroup& group, int first, int end, int64_t i, int64_t left) {
  if (end - first == 1) return read(reinterpret_cast<const float*>(slot(group, first)) + i, left);
  const int middle = first + (end - first) / 2;
  return add(tree(group, first, middle, i, left), tree(group, middle, end, i, left));
}

}  // namespace
}  // namespace quire

void quire_shared_sum(SharedGroup* group, float* x, int64_t count) {
  using namespace quire;
  const int64_t most = group->capacity / static_cast<int64_t>(sizeof(float));
  for (int64_t done = 0; done < count; done += most) {
    const int64_t part = std::min(most, count - done);
    exchange(group, x + done, part * sizeof(float));
    for (int64_t i = 0; i < part; i += kLanes)
      write(x + done + i, tree(*group, 0, group->size, i, part - i), part - i);
  }
}

void quire_shared_gather(SharedGroup* group, const char* x, char* const* out, int64_t num_bytes) {
  using namespace quire;
  for (int64_t done = 0; done < num_bytes; done += group->capacity) {
    const int64_t part = std::min(group->capacity, num_bytes - done);
    exchange(group, x + done, part);
    if (group->rank != 0) continue;
    for (int rank = 0; rank < group->size; ++rank)
      std::memcpy(out[rank] + done, slot(*group, rank), part);
  }
}
