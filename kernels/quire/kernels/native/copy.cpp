// Blocks of KV between the cache and memory outside it: a piece of each cache for each block, where
// a call for each would take longer than the bytes.

#include <cstring>

#include "quire.h"

void quire_copy_blocks(const CopyBlocksArgs* args, char* const* caches, int32_t num_threads) {
  const CopyBlocksArgs& a = *args;
  // Block by block: pieces of one lie side by side outside the cache.
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
  parallel(num_threads, [&](Team team) { team.share_rows(a.num_blocks * a.num_caches, copy); });
}
