// Reads the paged KV cache: finds the tiles of a split, and copies those that the loops of
// `attention_tile.h` cannot read in place. These are small blocks' keys, a sequence's last tile,
// int8, and bf16 if the dot products take floats. `kv_write.cpp` describes the layout.
#pragma once

#include <algorithm>

#include "attention_tile.h"
#include "quantize.h"
#include "quire.h"

namespace quire {

// A split of one head's K and V. A part is a tile in the cache, or a block if blocks are smaller
// than tiles; `k` and `v` are what the loops read.
struct Tiles {
  int tokens;
  const char* k_part[kMaxParts];
  const char* v_part[kMaxParts];
  const char* k[kSplitTiles];
  const char* v[kMaxParts];
  // For int8 only.
  const char* k_scale_part[kMaxParts];
  const char* v_scale_part[kMaxParts];
  TokenScales scales;
};

template <class Dot, class Element>
class CacheReader {
 public:
  // Whether the dot products take the cache's tiles as they are, without a conversion.
  static constexpr bool kDirect = Dot::kPack == 4 / sizeof(Element);
  static constexpr bool kIsInt8 = sizeof(Element) == 1;

  explicit CacheReader(const AttendArgs& args) : args_(args), head_size_(args.head_size) {}

  int part_tokens() const { return std::min(args_.block_size, kTileTokens); }
  int64_t tile_bytes() const { return int64_t{head_size_} * kTileTokens * 4 / Dot::kPack; }

  // Bytes for copies of tiles: K's, then V's.
  int64_t room() const { return 2 * kSplitTiles * tile_bytes(); }
  void use_room(char* at) { gathered_ = at; }

  // Finds the split of a row in the cache. The last part is repeated up to the end of the arrays,
  // because the loops may prefetch (`ahead`) more tiles than the split has.
  void find(int row, int head, int split, Tiles& tiles) const {
    const int32_t* table = args_.block_tables + row * args_.bt_stride;
    const int first = split * kSplitTokens, part = part_tokens();
    const int64_t token_bytes = head_size_ * sizeof(Element);
    const int64_t values_bytes = args_.block_size * token_bytes;
    const int64_t head_bytes = values_bytes + (kIsInt8 ? 4 * args_.block_size : 0);
    const auto* k = static_cast<const char*>(args_.k_cache);
    const auto* v = static_cast<const char*>(args_.v_cache);
    tiles.tokens = std::min(kSplitTokens, args_.seq_lens[row] - first);
    int i = 0;
    for (int at = 0; at < tiles.tokens; at += part, ++i) {
      const int64_t block = table[(first + at) / args_.block_size];
      const int64_t begin = (block * args_.num_kv_heads + head) * head_bytes;
      const int token = (first + at) % args_.block_size;
      tiles.k_part[i] = k + begin + token * token_bytes;
      tiles.v_part[i] = v + begin + token * token_bytes;
      if (!kIsInt8) continue;
      tiles.k_scale_part[i] = k + begin + values_bytes + 4 * token;
      tiles.v_scale_part[i] = v + begin + values_bytes + 4 * token;
      // `fetch` reads all of this part after the current split's attention is computed.
      for (int64_t byte = 0; byte < part * token_bytes; byte += kLineBytes) {
        __builtin_prefetch(tiles.k_part[i] + byte);
        __builtin_prefetch(tiles.v_part[i] + byte);
      }
      __builtin_prefetch(tiles.k_scale_part[i]);
      __builtin_prefetch(tiles.v_scale_part[i]);
    }
    for (; i * part < kSplitTokens; ++i) {
      tiles.k_part[i] = tiles.k_part[i - 1];
      tiles.v_part[i] = tiles.v_part[i - 1];
    }
  }

  // Prepares the tiles for the loops, without copies where possible.
  void fetch(Tiles& tiles) {
    if constexpr (kIsInt8) return fetch_int8(tiles);
    const int part = part_tokens(), parts = kTileTokens / part;
    const int lines_per_token = head_size_ / kLanes;
    const int64_t part_bytes = part * head_size_ * int64_t{sizeof(Element)};
    // A tile of floats is first assembled in the cache's type, in the upper half of its memory.
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
      for (int j = 0; j < parts; ++j) tiles.v[i * parts + j] = values + j * (tile_bytes() / parts);
    }
  }

 private:
  // Converts int8 tiles to the type that the dot products take, in the same order.
  void fetch_int8(Tiles& tiles) {
    using Value = std::conditional_t<Dot::kPack == 2, bf16, float>;
    const int part = part_tokens(), parts = kTileTokens / part, line = part * Dot::kPack;
    for (int i = 0; i * kTileTokens < tiles.tokens; ++i) {
      char* k_copy = gathered_ + i * tile_bytes();
      char* v_copy = k_copy + kSplitTiles * tile_bytes();
      int8_t keys[kTileTokens * kMaxHeadSize];
      memset(tiles.scales.k + i * kTileTokens, 0, kTileTokens * 4);
      memset(tiles.scales.v + i * kTileTokens, 0, kTileTokens * 4);
      for (int j = 0; j < parts; ++j) {
        const int from = i * parts + j, token = i * kTileTokens + j * part;
        auto* values = reinterpret_cast<Value*>(v_copy + j * (tile_bytes() / parts));
        tiles.v[from] = reinterpret_cast<char*>(values);
        const int valid = std::min(part, tiles.tokens - token);
        if (valid <= 0) {  // stale values here could be NaN, and NaN times a weight of 0 is NaN
          memset(values, 0, tile_bytes() / parts);
          continue;
        }
        for (int row = 0; parts > 1 && row < head_size_ / Dot::kPack; ++row)
          memcpy(keys + (row * parts + j) * line, tiles.k_part[from] + row * line, line);
        widen(reinterpret_cast<const int8_t*>(tiles.v_part[from]), values, part * head_size_);
        memcpy(tiles.scales.k + token, tiles.k_scale_part[from], valid * 4);
        memcpy(tiles.scales.v + token, tiles.v_scale_part[from], valid * 4);
      }
      const auto* whole = reinterpret_cast<const int8_t*>(tiles.k_part[i]);
      widen(parts > 1 ? keys : whole, reinterpret_cast<Value*>(k_copy), kTileTokens * head_size_);
      tiles.k[i] = k_copy;
    }
  }

  // Copies a small block's keys [lines][block_size] to the columns from `slot` on of a tile
  // [lines][16]. Prefetches the block's values (`ahead`).
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

  // Converts a bf16 tile to floats. Each run of `lines` lines interleaves two rows of the result:
  // two channels of K or two tokens of V. `from` may be the upper half of `to`.
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

  // Copies the tile's first `valid` tokens and zeros the rest: an unused slot may hold NaN, and NaN
  // times a weight of 0 is NaN.
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
