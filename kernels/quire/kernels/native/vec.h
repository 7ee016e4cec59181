// Vectors of float, in the width of the instruction set that this is compiled for.
//
// GCC's and Clang's vector types do most of it on any machine; intrinsics stand where these cannot
// say what is meant. The compiler may not fuse or reorder (-ffp-contract=off): a sum is fused
// where `fma` says so and nowhere else, so that one code gives one result wherever it is inlined.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kTileRows = 12;  // rows x 2 accumulators, 2 weights and an input in 32 registers
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kTileRows = 6;  // the same in 16 registers
#else
constexpr int kLanes = 4;
constexpr int kTileRows = 6;
#endif

typedef float F __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));
typedef uint16_t H __attribute__((vector_size(2 * kLanes)));

struct bf16 {
  uint16_t bits;
};

template <class To, class From>
inline To bitcast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline F splat(float x) { return F{} + x; }

inline F fma(F a, F b, F c) {
#if defined(__AVX512F__)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline F load(const float* p) {
  F x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline F load(const bf16* p) {
  H bits;
  std::memcpy(&bits, p, sizeof bits);
  return bitcast<F>(__builtin_convertvector(bits, U) << 16);
}

inline void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }

// To the nearest, ties to even, as everywhere.
inline void store(bf16* p, F x) {
#if defined(__AVX512BF16__)
  __m256bh bits = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(p, &bits, sizeof bits);
#else
  U wide = bitcast<U>(x);
  U rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  H bits = __builtin_convertvector(x == x ? rounded : U{} + 0x7fc0, H);
  std::memcpy(p, &bits, sizeof bits);
#endif
}

// The first n lanes; the others are 0, or left alone.
template <class T>
inline F load_n(const T* p, int n) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, p, n * sizeof(T));
  return load(lanes);
}

template <class T>
inline void store_n(T* p, F x, int n) {
  if (n >= kLanes) return store(p, x);
  T lanes[kLanes];
  store(lanes, x);
  std::memcpy(p, lanes, n * sizeof(T));
}

// As the element type keeps it.
template <class T>
inline F rounded(F x) {
  T lanes[kLanes];
  store(lanes, x);
  return load(lanes);
}
template <>
inline F rounded<float>(F x) {
  return x;
}

inline float sum(F x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

// e^x for |x| < 87, beyond which it stays at the limit; 1 ulp. Cephes' polynomial.
inline F exp(F x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  x = x > 87.0f ? splat(87.0f) : x;
  const F magic = splat(12582912.0f);  // 1.5 * 2**23: adding it leaves the rounded integer below
  F shifted = fma(x, splat(1.44269504088896341f), magic);
  F n = shifted - magic;
  F r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  return p * bitcast<F>((bitcast<U>(shifted) - 0x4b400000u + 127u) << 23);
}

inline F silu(F x) { return x / (exp(-x) + 1.0f); }
