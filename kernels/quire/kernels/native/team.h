// Threads that share the work of a forward pass, stage by stage.
//
// A kernel is a function `..._part(args, team)` that every thread of a team calls with the same
// arguments. It takes pieces of the work until none is left, and returns when all are done. Kernels
// do not use OpenMP themselves, so that a whole forward pass runs in one parallel region.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>
#if defined(_OPENMP)
#include <omp.h>
#endif

// A set of work pieces, which free threads take one by one. A stage ends when every piece is done,
// not when every thread has arrived. A thread whose core is busy elsewhere thus delays the others
// only by the piece that it is computing, and may find later stages already done.
class Stage {
 public:
  int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

  void finish() { done_.fetch_add(1, std::memory_order_acq_rel); }

  // Returns when `count` pieces are done. Spins for longer than a piece takes, then yields its core
  // repeatedly, because the thread with the last piece may need it. Beside other busy processes
  // each yield costs milliseconds: a decode of the small model beside two of them on two cores took
  // 37 ms, and 40 to 58 ms when spinning for only 10 microseconds.
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
  Stage* stage;  // the next stage, which this thread has not begun

  // Calls `work(piece)` for some of `count` pieces; returns when all of them are done.
  template <class Work>
  void share(int64_t count, const Work& work) const {
    for (int64_t piece = stage->take(); piece < count; piece = stage->take()) {
      work(piece);
      stage->finish();
    }
    stage->wait(count);
  }

  // As `share`, for rows that cost little each: calls `work(begin, end)` for some runs of rows.
  template <class Work>
  void share_rows(int64_t num_rows, const Work& work) const {
    const int64_t count = std::min<int64_t>(kRunsPerThread * size, (num_rows + 7) / 8);
    share(count,
          [&](int64_t piece) { work(num_rows * piece / count, num_rows * (piece + 1) / count); });
  }

 private:
  static constexpr int kRunsPerThread = 4;
};

// Calls `work(team)` on each of `num_threads` threads. A single thread does not use OpenMP.
template <class Work>
void parallel(int num_threads, const Work& work) {
  Stage stage;
#if defined(__SANITIZE_THREAD__)
  // The sanitizer would report races in OpenMP's runtime, which is not instrumented.
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
