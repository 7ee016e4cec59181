// Computes block hashes, SHA-256 of a token buffer's prefixes, with the CPU's SHA instructions.
//
// One compression per 64 bytes continues the chain. One more per block, on a copy of the state,
// ends the prefix with SHA-256's padding. No later compression depends on this one, so it runs
// beside the next block's first: on Zen 4 two compressions together take the time of one, 35 ns.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kChunk = 64;  // Bytes in one compression.
constexpr int kDigest = 32;

// The state of an unfinished hash, as in a `hashlib` object. `quire.worker.blocks.native_hashing`
// allocates it.
struct Chain {
  uint32_t h[8];
  uint64_t num_bytes;
  uint8_t tail[kChunk];  // The last num_bytes % 64 bytes.
};

alignas(16) const uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

const uint32_t kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                              0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

// The eight words of the hash state, in the order that the SHA instructions require.
struct State {
  __m128i abef, cdgh;
};

inline __m128i big_endian(__m128i words) {
  return _mm_shuffle_epi8(words, _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203));
}

inline State load(const uint32_t* h) {
  __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i*)h), 0xb1);
  __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i*)(h + 4)), 0x1b);
  return {_mm_alignr_epi8(badc, hgfe, 8), _mm_blend_epi16(hgfe, badc, 0xf0)};
}

inline void words(const State& state, __m128i& abcd, __m128i& efgh) {
  __m128i feba = _mm_shuffle_epi32(state.abef, 0x1b);
  __m128i dchg = _mm_shuffle_epi32(state.cdgh, 0xb1);
  abcd = _mm_blend_epi16(feba, dchg, 0xf0);
  efgh = _mm_alignr_epi8(dchg, feba, 8);
}

inline void store(const State& state, uint32_t* h) {
  __m128i abcd, efgh;
  words(state, abcd, efgh);
  _mm_storeu_si128((__m128i*)h, abcd);
  _mm_storeu_si128((__m128i*)(h + 4), efgh);
}

inline void store_digest(const State& state, uint8_t* out) {
  __m128i abcd, efgh;
  words(state, abcd, efgh);
  _mm_storeu_si128((__m128i*)out, big_endian(abcd));
  _mm_storeu_si128((__m128i*)(out + 16), big_endian(efgh));
}

// N independent compressions.
template <int N>
inline __attribute__((always_inline)) void compress(State (&states)[N],
                                                    const uint8_t* const (&chunks)[N]) {
  State s[N];
  __m128i w[N][4];
  for (int n = 0; n < N; n++) {
    s[n] = states[n];
    for (int i = 0; i < 4; i++)
      w[n][i] = big_endian(_mm_loadu_si128((const __m128i*)chunks[n] + i));
  }
#pragma GCC unroll 16
  for (int r = 0; r < 16; r++)
    for (int n = 0; n < N; n++) {
      __m128i& now = w[n][r & 3];
      if (r >= 4) {
        const __m128i last = w[n][(r + 3) & 3];
        __m128i sum = _mm_sha256msg1_epu32(now, w[n][(r + 1) & 3]);
        sum = _mm_add_epi32(sum, _mm_alignr_epi8(last, w[n][(r + 2) & 3], 4));
        now = _mm_sha256msg2_epu32(sum, last);
      }
      __m128i k = _mm_add_epi32(now, _mm_load_si128((const __m128i*)(kRound + 4 * r)));
      s[n].cdgh = _mm_sha256rnds2_epu32(s[n].cdgh, s[n].abef, k);
      s[n].abef = _mm_sha256rnds2_epu32(s[n].abef, s[n].cdgh, _mm_shuffle_epi32(k, 0x0e));
    }
  for (int n = 0; n < N; n++) {
    states[n].abef = _mm_add_epi32(states[n].abef, s[n].abef);
    states[n].cdgh = _mm_add_epi32(states[n].cdgh, s[n].cdgh);
  }
}

inline void compress1(State& state, const uint8_t* chunk) {
  State states[] = {state};
  const uint8_t* chunks[] = {chunk};
  compress(states, chunks);
  state = states[0];
}

inline void compress2(State& a, const uint8_t* chunk_a, State& b, const uint8_t* chunk_b) {
  State states[] = {a, b};
  const uint8_t* chunks[] = {chunk_a, chunk_b};
  compress(states, chunks);
  a = states[0];
  b = states[1];
}

// The last chunk of one prefix, with its padding, before it is compressed.
struct Ending {
  State state;
  alignas(16) uint8_t chunk[kChunk] = {0x80};
  bool has_tail = false;
  uint8_t* out = nullptr;  // Where the digest goes; null: nothing is pending.

  void begin(const State& chain, const uint8_t* tail, uint64_t num_bytes, uint8_t* digest) {
    // The last 8 bytes are the length in bits, big-endian. The store has 16 bytes, like the read
    // that follows: else the read would wait until the store has left the core.
    const uint64_t num_bits = __builtin_bswap64(8 * num_bytes);
    _mm_store_si128((__m128i*)(chunk + 48), _mm_set_epi64x(int64_t(num_bits), 0));
    const size_t num_tail = num_bytes % kChunk;
    if (num_tail || has_tail) {
      std::memset(chunk, 0, kChunk - 8);
      std::memcpy(chunk, tail, num_tail);
      chunk[num_tail] = 0x80;
      has_tail = num_tail;
    }
    state = chain;
    out = digest;
  }

  void finish() {
    if (!out) return;
    compress1(state, chunk);
    write();
  }

  void write() {
    store_digest(state, out);
    out = nullptr;
  }
};

}  // namespace

extern const int64_t quire_chain_bytes;
const int64_t quire_chain_bytes = sizeof(Chain);

extern "C" {

void quire_chain_begin(Chain* chain, const uint8_t* first_chunk) {
  State state = load(kInitial);
  compress1(state, first_chunk);
  store(state, chain->h);
  chain->num_bytes = kChunk;
}

// Writes the digest of each of `num_blocks` prefixes to `digests`. `block_bytes` is a multiple of
// 16: a tail of at most 48 bytes leaves room for the padding.
void quire_chain_extend(Chain* chain, const uint8_t* data, int64_t block_bytes, int64_t num_blocks,
                        uint8_t* digests) {
  State state = load(chain->h);
  uint64_t num_bytes = chain->num_bytes;
  Ending ending;
  for (int64_t block = 0; block < num_blocks; block++, digests += kDigest) {
    for (const uint8_t* end = data + block_bytes; data < end;) {
      const size_t num_tail = num_bytes % kChunk;
      const size_t num_taken = std::min<size_t>(kChunk - num_tail, end - data);
      const uint8_t* chunk = data;
      if (num_taken < kChunk) {
        std::memcpy(chain->tail + num_tail, data, num_taken);
        chunk = chain->tail;
      }
      data += num_taken;
      num_bytes += num_taken;
      if (num_bytes % kChunk) break;
      if (ending.out) {
        compress2(state, chunk, ending.state, ending.chunk);
        ending.write();
      } else {
        compress1(state, chunk);
      }
    }
    ending.finish();  // Still pending only if the block completed no chunk.
    ending.begin(state, chain->tail, num_bytes, digests);
  }
  ending.finish();
  store(state, chain->h);
  chain->num_bytes = num_bytes;
}
}  // extern "C"
