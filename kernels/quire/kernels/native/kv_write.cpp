// Writes a step's K and V into the paged KV cache, whose layout is defined here.
//
// A block is [K][block_size * D], one KV head after the other. A head's part consists of tiles of
// 16 tokens (of `block_size` tokens if blocks are smaller), as in `attention_tile.h`:
//
//     bf16   K tile [D/2][tokens][2 channels]   V tile [tokens/2][D][2 tokens]
//     f32    K tile [D][tokens]                 V tile [tokens][D]
//
// In int8 a value is a byte, in the order of the type that the dot products take (`Bf16Dot`,
// `DotF32`). The tokens' scales, float [block_size], follow the values of each head.
//
// A block has as many bytes as [block_size][K][D], in int8 as [block_size][K][D + 4]. Whole blocks
// may be copied; only this file and the attention know the layout inside.

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "attention.h"
#include "attention_tile.h"
#include "quantize.h"

namespace quire {
namespace {

// Writes a token's K and V of one head as column `lane` of their tiles.
template <int kPack, class Stored>
void put(const Stored* k, const Stored* v, Stored* k_tile, Stored* v_tile, int head_size,
         int tile_tokens, int lane) {
  for (int word = 0; word < head_size / kPack; ++word)
    memcpy(k_tile + (word * tile_tokens + lane) * kPack, k + word * kPack, kPack * sizeof(Stored));
  v_tile += lane / kPack * kPack * int64_t{head_size} + lane % kPack;
  for (int d = 0; d < head_size; ++d) v_tile[d * kPack] = v[d];
}

template <class Element, int kPack, bool kIsInt8>
void write_token(const WriteKvArgs& args, int64_t token) {
  using Stored = std::conditional_t<kIsInt8, uint8_t, Element>;
  const int head_size = args.head_size, width = head_size + (kIsInt8 ? 4 : 0);
  const int tile_tokens = std::min(args.block_size, kTileTokens);
  const int64_t block = args.slots[token] / args.block_size;
  const int offset = int(args.slots[token] % args.block_size);
  const int lane = offset % tile_tokens;
  const int64_t tile_at = int64_t{offset - lane} * head_size;
  const Element* k = static_cast<const Element*>(args.k) + token * args.k_stride_t;
  const Element* v = static_cast<const Element*>(args.v) + token * args.v_stride_t;
  for (int head = 0; head < args.num_kv_heads; ++head, k += head_size, v += head_size) {
    const int64_t at = (block * args.num_kv_heads + head) * args.block_size * width;
    Stored* k_to = static_cast<Stored*>(args.k_cache) + at;
    Stored* v_to = static_cast<Stored*>(args.v_cache) + at;
    if constexpr (kIsInt8) {
      uint8_t k_values[kMaxHeadSize], v_values[kMaxHeadSize];
      const float k_scale = quantize(k, head_size, 0, k_values);
      const float v_scale = quantize(v, head_size, 0, v_values);
      const int64_t scale_at = int64_t{args.block_size} * head_size + 4 * offset;
      memcpy(k_to + scale_at, &k_scale, sizeof k_scale);
      memcpy(v_to + scale_at, &v_scale, sizeof v_scale);
      put<kPack>(k_values, v_values, k_to + tile_at, v_to + tile_at, head_size, tile_tokens, lane);
    } else {
      put<kPack>(k, v, k_to + tile_at, v_to + tile_at, head_size, tile_tokens, lane);
    }
  }
}

}  // namespace
}  // namespace quire

void write_kv_rows(const WriteKvArgs& args, int64_t begin, int64_t end) {
  using namespace quire;
  const bool is_bf16 = args.dtype == QUIRE_BF16;
  const auto write = args.cache_is_int8
                         ? (is_bf16 ? write_token<bf16, Bf16Dot::kPack, true>
                                    : write_token<float, DotF32::kPack, true>)
                         : (is_bf16 ? write_token<bf16, 2, false> : write_token<float, 1, false>);
  for (int64_t token = begin; token < end; ++token) write(args, token);
}
