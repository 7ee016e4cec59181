// Dot products of int8: each of sixteen 32-bit sums gains the products of four pairs of int8.
//
// Exact on every CPU: values are from -127 to 127, so the sum of two products fits in 16 bits.
#pragma once

#include "simd.h"

namespace quire {

// The offset with which inputs are stored: vpdpbusd takes one operand unsigned.
#if defined(QUIRE_AVX512) && defined(__AVX512VNNI__)
constexpr int kInputOffset = 128;
#else
constexpr int kInputOffset = 0;
#endif

#if defined(QUIRE_AVX512)

// Not __m512i, whose lanes have 64 bits: GCC 12 copies and spills sums of that type in each step.
typedef int32_t Ints __attribute__((vector_size(64)));

inline Ints load_ints(const int32_t* p) { return (Ints)_mm512_loadu_si512(p); }
inline Vec as_floats(Ints x) { return _mm512_cvtepi32_ps((__m512i)x); }

#if defined(__AVX512VNNI__)
struct Int8Weights {
  __m512i values;
  explicit Int8Weights(const int8_t* p) : values(_mm512_loadu_si512(p)) {}
};
inline Ints dot(Ints sum, const Int8Weights& w, int32_t x) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(x), w.values);
}
#else
// |w| times x with the sign of w.
struct Int8Weights {
  __m512i magnitude;
  __mmask64 negative;
  explicit Int8Weights(const int8_t* p) {
    const __m512i values = _mm512_loadu_si512(p);
    magnitude = _mm512_abs_epi8(values);
    negative = _mm512_movepi8_mask(values);
  }
};
inline Ints dot(Ints sum, const Int8Weights& w, int32_t x) {
  const __m512i all = _mm512_set1_epi32(x);
  const __m512i with_sign = _mm512_mask_sub_epi8(all, w.negative, _mm512_setzero_si512(), all);
  const __m512i pairs = _mm512_maddubs_epi16(w.magnitude, with_sign);
  return sum + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#endif

#elif defined(__AVX2__) && defined(__FMA__)

struct Ints {
  __m256i part[2];
};

inline Ints load_ints(const int32_t* p) {
  const auto* at = reinterpret_cast<const __m256i*>(p);
  return {{_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)}};
}
inline Vec as_floats(const Ints& x) {
  return each([&](int i) { return (FloatPart)_mm256_cvtepi32_ps(x.part[i]); });
}

// |w| times x with the sign of w.
struct Int8Weights {
  __m256i part[2];
  explicit Int8Weights(const int8_t* p) {
    const auto* at = reinterpret_cast<const __m256i*>(p);
    part[0] = _mm256_loadu_si256(at), part[1] = _mm256_loadu_si256(at + 1);
  }
};
inline Ints dot(const Ints& sum, const Int8Weights& w, int32_t x) {
  const __m256i all = _mm256_set1_epi32(x), ones = _mm256_set1_epi16(1);
  Ints out;
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m256i pairs =
        _mm256_maddubs_epi16(_mm256_abs_epi8(w.part[i]), _mm256_sign_epi8(all, w.part[i]));
    out.part[i] = _mm256_add_epi32(sum.part[i], _mm256_madd_epi16(pairs, ones));
  }
  return out;
}

#else

struct Ints {
  int32_t lane[kLanes];
};

inline Ints load_ints(const int32_t* p) {
  Ints out;
  memcpy(&out, p, sizeof out);
  return out;
}
inline Vec as_floats(const Ints& x) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(x.lane[i]);
  return load(lanes);
}

struct Int8Weights {
  int8_t values[4 * kLanes];
  explicit Int8Weights(const int8_t* p) { memcpy(values, p, sizeof values); }
};
inline Ints dot(Ints sum, const Int8Weights& w, int32_t x) {
  int8_t inputs[4];
  memcpy(inputs, &x, sizeof inputs);
  for (int i = 0; i < kLanes; ++i)
    for (int k = 0; k < 4; ++k) sum.lane[i] += int32_t{w.values[4 * i + k]} * inputs[k];
  return sum;
}

#endif

}  // namespace quire
