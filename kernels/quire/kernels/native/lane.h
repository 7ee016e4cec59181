// Dot products over packed 32-bit lanes: a lane holds one step of k in float, two in bfloat16.
#pragma once

#include "elements.h"

namespace quire {

inline uint32_t load_lane(const void* p) {
  uint32_t lane;
  memcpy(&lane, p, sizeof lane);
  return lane;
}

inline float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

template <class T>
struct Lane;

template <>
struct Lane<float> {
  static constexpr int kSteps = 1;
  using Weights = Vec;
  static inline Weights weights(const uint32_t* p) { return load(p); }
  static inline Vec dot(Vec sum, const Weights& w, uint32_t x) {
    return fma(w, splat(as_float(x)), sum);
  }
};

#if defined(__AVX512BF16__)
template <>
struct Lane<bf16> {
  static constexpr int kSteps = 2;
  using Weights = __m512i;
  static inline Weights weights(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static inline Vec dot(Vec sum, const Weights& w, uint32_t x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(static_cast<int>(x)));
  }
};
#else
template <>
struct Lane<bf16> {
  static constexpr int kSteps = 2;
  struct Weights {
    Vec even, odd;
  };
  static inline Weights weights(const uint32_t* p) { return {even_bf16(p), odd_bf16(p)}; }
  static inline Vec dot(Vec sum, const Weights& w, uint32_t x) {
    sum = fma(w.even, splat(as_float(x << 16)), sum);
    return fma(w.odd, splat(as_float(x & 0xffff0000u)), sum);
  }
};
#endif

}  // namespace quire
