// The C entry points of attention and KV write, each with a parallel region of its own.

#include <algorithm>

#include "attention.h"
#include "check.h"

namespace {

// With fewer scores, or heads of tokens to write, waking other threads costs more than it saves.
constexpr int64_t kMinScores = 2048;
constexpr int64_t kMinWrites = 512;

int threads_for(int64_t work, int64_t min_work) {
#if defined(_OPENMP)
  if (work >= min_work && !omp_in_parallel()) return omp_get_max_threads();
#endif
  return 1;
}

}  // namespace

QuireRefusal quire_attend(const AttendArgs* args) {
  const QuireRefusal refusal = quire::check_rows(*args);
  if (refusal.what) return refusal;
  int64_t scores = 0;
  for (int row = 0; row < args->num_rows; ++row) {
    const int num_tokens = args->seq_lens[row];
    const int seen = args->window ? std::min(args->window, num_tokens) : num_tokens;
    scores +=
        int64_t{args->query_starts[row + 1] - args->query_starts[row]} * seen * args->num_heads;
  }
  const int num_threads = threads_for(scores, kMinScores);
  quire::AttendPlan plan = quire::plan_attention(*args, num_threads);
  parallel(num_threads, [&](Team team) { quire::attend_part(*args, plan, team); });
  return {};
}

QuireRefusal quire_write_kv(const WriteKvArgs* args) {
  const int64_t num_slots = int64_t{args->num_blocks} * args->block_size;
  const QuireRefusal refusal =
      quire::check_indices(QUIRE_SLOT, args->slots, args->num_tokens, num_slots);
  if (refusal.what) return refusal;
  const int num_threads = threads_for(int64_t{args->num_tokens} * args->num_kv_heads, kMinWrites);
  parallel(num_threads, [=](Team team) {
    team.share_rows(args->num_tokens,
                    [=](int64_t begin, int64_t end) { write_kv_rows(*args, begin, end); });
  });
  return {};
}
