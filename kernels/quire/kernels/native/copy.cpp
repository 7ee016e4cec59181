// Copies KV blocks between the caches and memory outside of them. One call copies all pieces: a
// call for each would take longer than copying its bytes.

#include <algorithm>
#include <cstring>

#include "quire.h"

namespace {

// One thread copies this in a millisecond. Beside other busy processes, several threads would wait
// longer than that for each other.
constexpr int64_t kBytesPerThread = 8 << 20;

}  // namespace

void quire_copy_blocks(const CopyBlocksArgs* args, char* const* caches, int32_t num_threads) {
  const CopyBlocksArgs& a = *args;
  // Copies block by block, because a block's pieces are adjacent outside the caches.
  const auto copy = [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t block = piece / a.num_caches, number = piece % a.num_caches;
      char* in_cache = caches[number] + a.cache_blocks[block] * a.piece_bytes;
      char* outside =
          a.outside + a.outside_blocks[block] * a.block_stride + number * a.piece_stride;
      a.goes_out ? memcpy(outside, in_cache, a.piece_bytes)
                 : memcpy(in_cache, outside, a.piece_bytes);
    }
  };
  const int64_t num_pieces = a.num_blocks * a.num_caches;
  const int64_t most = num_pieces * a.piece_bytes / kBytesPerThread + 1;
  parallel(int(std::min<int64_t>(num_threads, most)),
           [&](Team team) { team.share_rows(num_pieces, copy); });
}
