// Loads and stores of tensor elements, float or bfloat16, as vectors of 16 floats.
#pragma once

#include "simd.h"

namespace quire {

struct bf16 {
  uint16_t bits;
};

inline Vec read(const float* p) { return load(p); }
inline Vec read(const bf16* p) { return load_bf16(p); }
inline void write(float* p, Vec x) { store(p, x); }
inline void write(bf16* p, Vec x) { store_bf16(p, x); }

// Reads or writes the first `count` of 16 lanes. The other lanes read as 0 and are not written.
template <class T>
inline Vec read(const T* p, int64_t count) {
  if (count >= kLanes) return read(p);
  T lanes[kLanes] = {};
  memcpy(lanes, p, count * sizeof(T));
  return read(lanes);
}
template <class T>
inline void write(T* p, Vec x, int64_t count) {
  if (count >= kLanes) return write(p, x);
  T lanes[kLanes];
  write(lanes, x);
  memcpy(p, lanes, count * sizeof(T));
}

// x rounded to T.
template <class T>
inline Vec rounded(Vec x) {
  T lanes[kLanes];
  write(lanes, x);
  return read(lanes);
}
template <>
inline Vec rounded<float>(Vec x) {
  return x;
}

}  // namespace quire
