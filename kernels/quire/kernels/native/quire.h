// The C ABI of the native CPU library: plain structs, filled in by Python through ctypes.
//
// The library is compiled once for each instruction set, and the loader picks one; so there is no
// dispatch in here, only `#if defined(__AVX512BF16__)` and the like. Tensors are row-major and
// their strides count elements.
//
// Threads. A kernel is a function `..._part(args, team)` that every thread of a team calls with
// the same arguments and that does that thread's share: no barrier and no OpenMP inside, so that
// a whole forward pass runs in one parallel region. `quire_...` wraps it in a region of its own.
#pragma once

#include <atomic>
#include <cstdint>

struct Team {
  int thread;      // 0 .. size - 1
  int size;
  std::atomic<int>* ticket;  // shared, 0 at the start: `ticket->fetch_add(1)` is the next piece
                             // of work, so that a core that is busy elsewhere takes fewer
};

enum QuireType : int32_t { QUIRE_F32 = 0, QUIRE_BF16 = 1 };

// T tokens of the step, packed   B rows (sequences)   H query heads   K KV heads   D head size

extern "C" {

struct AttendArgs {
  int32_t dtype;            // of q, out and the caches
  const void* q;            // [T, H, D]; a token's heads are contiguous
  int64_t q_stride_t;
  void* out;                // [T, H, D], contiguous
  const void* k_cache;
  const void* v_cache;
  const int32_t* block_tables;  // [B, ...]
  int64_t bt_stride;
  const int32_t* seq_lens;      // [B]
  const int32_t* query_starts;  // [B + 1]
  int32_t num_rows;
  int32_t num_decodes;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_size;
  int32_t block_size;
  float scale;
};

struct WriteKvArgs {
  int32_t dtype;
  const void* k;            // [T, K, D]; a token's heads are contiguous
  const void* v;
  int64_t k_stride_t;
  int64_t v_stride_t;
  void* k_cache;
  void* v_cache;
  const int64_t* slots;     // [T]: block * block_size + offset
  int32_t num_tokens;
  int32_t num_kv_heads;
  int32_t head_size;
  int32_t block_size;
};

void quire_attend(const AttendArgs* args);
void quire_write_kv(const WriteKvArgs* args);

}  // extern "C"

// Each thread of the team calls it; the caller puts a barrier behind it. Attention: `attention.h`.
void write_kv_part(const WriteKvArgs& args, Team team);
