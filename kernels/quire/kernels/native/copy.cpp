// Blocks of KV between the cache and memory outside it: a piece of each cache for each block, where
// a call for each would take longer than the bytes.

#include <algorithm>
#include <cstring>

#include "quire.h"

namespace {

// One thread copies these in a millisecond. Beside busy neighbours, several threads wait longer
// for each other.
constexpr int64_t kBytesPerThread = 8 << 20;

}  // namespace

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
  const int64_t num_pieces = a.num_blocks * a.num_caches;
  const int64_t most = num_pieces * a.piece_bytes / kBytesPerThread + 1;
  parallel(int(std::min<int64_t>(num_threads, most)),
           [&](Team team) { team.share_rows(num_pieces, copy); });
}
