// Reading the paged cache: where the tiles of a split are, and copies of those that the loops of
// `attention_tile.h` cannot read in place: small blocks' keys, a sequence's last tile, and bf16
// where the dot products take floats. The layout is described in `kv_write.cpp`.
#pragma once

#include <algorithm>

#include "attention_tile.h"
#include "quire.h"

namespace quire {

// A split of one head's K and V: as it lies in the cache, in parts of one block each where blocks
// are smaller than tiles, and as the loops read it.
struct Tiles {
  int tokens;
  const char* k_part[kMaxParts];
  const char* v_part[kMaxParts];
  const char* k[kSplitTiles];
  const char* v[kMaxParts];
};

template <class Dot, class Element>
class CacheReader {
 public:
  // The cache's tiles feed the dot products as they are; else they are converted to floats.
  static constexpr bool kDirect = Dot::kPack == 4 / sizeof(Element);

  explicit CacheReader(const AttendArgs& args) : args_(args), head_size_(args.head_size) {}

  int part_tokens() const { return std::min(args_.block_size, kTileTokens); }
  int64_t tile_bytes() const { return int64_t{head_size_} * kTileTokens * 4 / Dot::kPack; }

  // Room for the tiles that were copied: K's, then V's.
  int64_t room() const { return 2 * kSplitTiles * tile_bytes(); }
  void use_room(char* at) { gathered_ = at; }

  // Where the split of a row is in the cache. What comes after the last is the last again: `ahead`
  // of the loops may be longer than the split.
  void find(int row, int head, int split, Tiles& tiles) const {
    const int32_t* table = args_.block_tables + row * args_.bt_stride;
    const int first = split * kSplitTokens, part = part_tokens();
    const int64_t token_bytes = head_size_ * sizeof(Element);
    const int64_t head_bytes = args_.block_size * token_bytes;
    const auto* k = static_cast<const char*>(args_.k_cache);
    const auto* v = static_cast<const char*>(args_.v_cache);
    tiles.tokens = std::min(kSplitTokens, args_.seq_lens[row] - first);
    int i = 0;
    for (int at = 0; at < tiles.tokens; at += part, ++i) {
      const int64_t block = table[(first + at) / args_.block_size];
      const int64_t offset = (block * args_.num_kv_heads + head) * head_bytes +
                             (first + at) % args_.block_size * token_bytes;
      tiles.k_part[i] = k + offset;
      tiles.v_part[i] = v + offset;
    }
    for (; i * part < kSplitTokens; ++i) {
      tiles.k_part[i] = tiles.k_part[i - 1];
      tiles.v_part[i] = tiles.v_part[i - 1];
    }
  }

  // Makes the tiles fit for the loops: as they are, if they can be.
  void fetch(Tiles& tiles) {
    const int part = part_tokens(), parts = kTileTokens / part;
    const int lines_per_token = head_size_ / kLanes;
    const int64_t part_bytes = part * head_size_ * int64_t{sizeof(Element)};
    // A tile of floats is put together from the cache's type in its upper half.
    const int64_t gap = kDirect ? 0 : tile_bytes() / 2;
    for (int i = 0; i * kTileTokens < tiles.tokens; ++i) {
      const int valid = std::min(kTileTokens, tiles.tokens - i * kTileTokens);
      const char* const* k = tiles.k_part + i * parts;
      const char* const* v = tiles.v_part + i * parts;
      char* k_copy = gathered_ + i * tile_bytes();
      char* v_copy = k_copy + kSplitTiles * tile_bytes();
      const char* values = parts == 1 ? v[0] : nullptr;
      tiles.k[i] = k[0];
      if (parts > 1) {
        for (int j = 0; j * part < valid; ++j) {
          insert_keys(k[j], v[j], j * part, k_copy + gap);
          tiles.v[i * parts + j] = v[j];
        }
        tiles.k[i] = k_copy + gap;
        if (kDirect && valid == kTileTokens) continue;
        for (int j = 0; j * part < valid; ++j)
          memcpy(v_copy + gap + j * part_bytes, v[j], part_bytes);
        values = v_copy + gap;
      }
      if constexpr (!kDirect) {
        tiles.k[i] = widened(tiles.k[i], k_copy, 1);
        values = widened(values, v_copy, lines_per_token);
      }
      if (valid < kTileTokens) values = without_rest(values, valid, v_copy);
      for (int j = 0; j < parts; ++j)
        tiles.v[i * parts + j] = values + j * (tile_bytes() / parts);
    }
  }

 private:
  // A small block's keys [lines][block_size] as columns `slot` and on of a tile [lines][16]. The
  // block's values are wanted soon.
  void insert_keys(const char* from, const char* ahead, int slot, char* to) const {
    const int num_lines = head_size_ * int(sizeof(Element)) / 4;
    to += slot * 4;
    const auto copy = [&](auto bytes) {
      for (int line = 0; line < num_lines; ++line) {
        memcpy(to + line * kLineBytes, from + line * bytes, bytes);
        if (line * bytes % kLineBytes == 0) __builtin_prefetch(ahead + line * bytes);
      }
    };
    args_.block_size == 4 ? copy(std::integral_constant<int, 16>())
                          : copy(std::integral_constant<int, 32>());
  }

  // A bf16 tile as a tile of floats. In each `lines` lines stand, word by word, two rows of the
  // result: two channels of K, or two tokens of V. `from` may be the upper half of `to`.
  const char* widened(const char* from, char* to, int lines) const {
    Vec even[kMaxHeadSize / kLanes], odd[kMaxHeadSize / kLanes];
    for (char* end = to + tile_bytes(); to < end;) {
      for (int i = 0; i < lines; ++i, from += kLineBytes)
        even[i] = even_bf16(from), odd[i] = odd_bf16(from);
      for (int i = 0; i < lines; ++i, to += kLineBytes) store(to, even[i]);
      for (int i = 0; i < lines; ++i, to += kLineBytes) store(to, odd[i]);
    }
    return to - tile_bytes();
  }

  // The tile's first `valid` tokens and zeros: a weight of 0 times an unused slot's NaN is NaN.
  const char* without_rest(const char* from, int valid, char* to) const {
    const int64_t row_bytes = int64_t{head_size_} * 4;
    const int whole = valid / Dot::kPack;
    if (to != from) memmove(to, from, whole * row_bytes);
    char* rest = to + whole * row_bytes;
    int64_t kept = 0;
    if (valid % Dot::kPack) {  // the first of a pair of bf16
      for (; kept < row_bytes; kept += 4) {
        memcpy(rest + kept, from + whole * row_bytes + kept, 2);
        memset(rest + kept + 2, 0, 2);
      }
    }
    memset(rest + kept, 0, tile_bytes() - whole * row_bytes - kept);
    return to;
  }

  const AttendArgs& args_;
  const int head_size_;
  char* gathered_ = nullptr;
};

}  // namespace quire
