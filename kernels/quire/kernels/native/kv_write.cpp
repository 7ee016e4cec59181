// The layout of the paged KV cache, and how the step's K and V get there.
//
// A block is [K][block_size * D], a KV head after the other, and a head's part of it is made of
// tiles of 16 tokens (of `block_size` tokens where blocks are smaller), as `attention_tile.h` says:
//
//     bf16   K tile [D/2][tokens][2 channels]   V tile [tokens/2][D][2 tokens]
//     f32    K tile [D][tokens]                 V tile [tokens][D]
//
// A block's bytes are as many as in [block_size][K][D], and whole blocks may be copied; what is
// inside is between this file and the attention.

#include <algorithm>
#include <cstring>

#include "attention.h"
#include "attention_tile.h"

namespace quire {
namespace {

template <class Element>
void write_token(const WriteKvArgs& args, int64_t token) {
  constexpr int kPack = 4 / sizeof(Element);
  const int head_size = args.head_size;
  const int tile_tokens = std::min(args.block_size, kTileTokens);
  const int64_t block = args.slots[token] / args.block_size;
  const int offset = int(args.slots[token] % args.block_size);
  const int lane = offset % tile_tokens;
  const int64_t tile_at = int64_t{offset - lane} * head_size;
  const Element* k = static_cast<const Element*>(args.k) + token * args.k_stride_t;
  const Element* v = static_cast<const Element*>(args.v) + token * args.v_stride_t;
  for (int head = 0; head < args.num_kv_heads; ++head, k += head_size, v += head_size) {
    const int64_t at =
        (block * args.num_kv_heads + head) * args.block_size * head_size + tile_at;
    Element* k_to = static_cast<Element*>(args.k_cache) + at + lane * kPack;
    for (int word = 0; word < head_size / kPack; ++word)
      memcpy(k_to + word * tile_tokens * kPack, k + word * kPack, 4);
    Element* v_to = static_cast<Element*>(args.v_cache) + at +
                    lane / kPack * kPack * int64_t{head_size} + lane % kPack;
    for (int d = 0; d < head_size; ++d) v_to[d * kPack] = v[d];
  }
}

}  // namespace
}  // namespace quire

void write_kv_rows(const WriteKvArgs& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token)
    args.dtype == QUIRE_BF16 ? quire::write_token<uint16_t>(args, token)
                             : quire::write_token<float>(args, token);
}
