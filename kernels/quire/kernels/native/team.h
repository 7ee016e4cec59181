// Threads that share the work of a forward pass, stage by stage.
//
// A kernel is a function `..._part(args, team)` that every thread of a team calls with the same
// arguments: it takes pieces of the work until none is left, and returns when all are done. There
// is no OpenMP inside, so that a whole forward pass runs in one parallel region.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>
#if defined(_OPENMP)
#include <omp.h>
#endif

// Pieces of work, each for whoever is free. It is over when every piece is done, not when every
// thread has come: one whose core is busy elsewhere holds up the others for the piece that it is
// in and no more, and finds the later stages done.
class Stage {
 public:
  int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

  void finish() { done_.fetch_add(1, std::memory_order_acq_rel); }

  // Until `count` pieces are done. Spins for longer than a piece takes, and then gives up its core
  // in turns, as whoever is in the last piece may need it: beside busy neighbours each such turn
  // costs milliseconds (two on two cores, a decode of the small model: 37 ms; spinning for 10
  // microseconds, 40 to 58).
  void wait(int64_t count) const {
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; ++spins)
      spins < kSpins ? pause() : std::this_thread::yield();
  }

 private:
  static constexpr int kSpins = 10000;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

struct Team {
  int thread;  // 0 .. size - 1
  int size;
  Stage* stage;  // unused so far

  // Calls `work(piece)` for some of `count` pieces; returns when all of them are done.
  template <class Work>
  void share(int64_t count, const Work& work) const {
    for (int64_t piece = stage->take(); piece < count; piece = stage->take()) {
      work(piece);
      stage->finish();
    }
    stage->wait(count);
  }

  // The same for rows that cost little each: `work(begin, end)` for some runs of them.
  template <class Work>
  void share_rows(int64_t num_rows, const Work& work) const {
    const int64_t count = std::min<int64_t>(kRunsPerThread * size, (num_rows + 7) / 8);
    share(count,
          [&](int64_t piece) { work(num_rows * piece / count, num_rows * (piece + 1) / count); });
  }

 private:
  static constexpr int kRunsPerThread = 4;
};

// Calls `work(team)` on each of `num_threads` threads; alone, without OpenMP.
template <class Work>
void parallel(int num_threads, const Work& work) {
  Stage stage;
#if defined(__SANITIZE_THREAD__)
  // What OpenMP's runtime does, which is not instrumented, it would take for races.
  std::vector<std::thread> others;
  for (int thread = 1; thread < num_threads; ++thread)
    others.emplace_back([&, thread] { work(Team{thread, num_threads, &stage}); });
  work(Team{0, num_threads, &stage});
  for (std::thread& other : others) other.join();
  return;
#elif defined(_OPENMP)
  if (num_threads > 1) {
#pragma omp parallel num_threads(num_threads)
    work(Team{omp_get_thread_num(), omp_get_num_threads(), &stage});
    return;
  }
#endif
  work(Team{0, 1, &stage});
}
