// The C entry points of attention and KV write, each with a parallel region of its own.

#include <omp.h>

#include "attention.h"

namespace {

// Below this many tokens times heads, waking the other threads costs more than they bring.
constexpr int64_t kMinParallel = 2048;

template <class Part>
void with_team(bool parallel, Part part) {
  std::atomic<int> ticket{0};
  if (!parallel || omp_in_parallel()) return part(Team{0, 1, &ticket});
#pragma omp parallel
  part(Team{omp_get_thread_num(), omp_get_num_threads(), &ticket});
}

}  // namespace

void quire_attend(const AttendArgs* args) {
  int64_t tokens = 0;
  for (int row = 0; row < args->num_rows; ++row)
    tokens += int64_t{args->query_starts[row + 1] - args->query_starts[row]} * args->seq_lens[row];
  const bool parallel = tokens * args->num_heads >= kMinParallel && omp_get_max_threads() > 1;
  quire::AttendPlan plan = quire::plan_attention(*args, parallel ? omp_get_max_threads() : 1);
  with_team(parallel, [&](Team team) { quire::attend_part(*args, plan, team); });
}

void quire_write_kv(const WriteKvArgs* args) {
  const bool parallel = int64_t{args->num_tokens} * args->num_kv_heads >= kMinParallel / 4;
  with_team(parallel, [&](Team team) { write_kv_part(*args, team); });
}
