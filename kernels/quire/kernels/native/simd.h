// Vectors of sixteen floats and their operations, for the instruction set of this build.
//
// Every operation rounds once and in a fixed order, so a lane's result depends on that lane's
// operands only. `fma` is fused where the CPU has it. The build sets -ffp-contract=off, so that
// no other operations are fused.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace quire {

constexpr int kLanes = 16;

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define QUIRE_AVX512 1

using Vec = __m512;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec load(const void* at) { return _mm512_loadu_ps(at); }
inline void store(void* at, Vec x) { _mm512_storeu_ps(at, x); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }

// x in the first `count` lanes, `other` in the rest.
inline Vec first_lanes(Vec x, int count, Vec other) {
  return _mm512_mask_mov_ps(other, static_cast<__mmask16>((1u << count) - 1), x);
}

inline void store_first(void* at, int count, Vec x) {
  _mm512_mask_storeu_ps(at, static_cast<__mmask16>((1u << count) - 1), x);
}

inline float sum_of_lanes(Vec x) { return _mm512_reduce_add_ps(x); }
inline float max_of_lanes(Vec x) { return _mm512_reduce_max_ps(x); }

// Lane i of the result is the greatest lane of x[i]. There are at most 8 vectors x.
template <int kCount>
inline Vec max_of_each(const Vec (&x)[kCount]) {
  static_assert(kCount <= 8);
  constexpr int k1 = 1 < kCount ? 1 : 0, k2 = 2 < kCount ? 2 : 0, k3 = 3 < kCount ? 3 : 0,
                k4 = 4 < kCount ? 4 : 0, k5 = 5 < kCount ? 5 : 0, k6 = 6 < kCount ? 6 : 0,
                k7 = 7 < kCount ? 7 : 0;
  const auto halve = [](Vec a, Vec b) {
    return max(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  };
  const auto quarter = [](Vec ab, Vec cd) {
    const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
    return max(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
               _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  };
  const Vec low = quarter(halve(x[0], x[k1]), halve(x[k2], x[k3]));  // 4 candidates of each
  const Vec high = kCount <= 4 ? low : quarter(halve(x[k4], x[k5]), halve(x[k6], x[k7]));
  const Vec two = max(_mm512_shuffle_f32x4(low, high, 0x44), _mm512_shuffle_f32x4(low, high, 0xee));
  const Vec one = max(two, _mm512_shuffle_f32x4(two, two, 0xb1));
  return _mm512_shuffle_f32x4(one, one, 0x08);  // lanes 0-3 and 8-11 first
}

// The first and the second values of 16 pairs of bf16, as floats.
inline Vec even_bf16(const void* pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16));
}
inline Vec odd_bf16(const void* pairs) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_loadu_si512(pairs), _mm512_set1_epi32(int(0xffff0000u))));
}
inline Vec load_bf16(const void* at) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(at))), 16));
}
inline void store_bf16(void* at, Vec x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(static_cast<__m256i*>(at), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  _mm256_storeu_si256(static_cast<__m256i*>(at), halves);
#endif
}

// x minus its floor, and p * 2^floor(x); -inf gives p * 0 for a p of 1.
inline Vec fraction(Vec x) { return _mm512_reduce_ps(x, 0x09); }
inline Vec scale_by_floor(Vec p, Vec x) { return _mm512_scalef_ps(p, x); }
inline Vec exponent_range(Vec x) { return x; }

#else  // parts of 8 lanes with AVX2, of 4 lanes on any other CPU

#if defined(__AVX2__) && defined(__FMA__)
constexpr int kPart = 8;
#else
constexpr int kPart = 4;
#endif
constexpr int kParts = kLanes / kPart;
typedef float FloatPart __attribute__((vector_size(4 * kPart)));
typedef int32_t IntPart __attribute__((vector_size(4 * kPart)));
typedef uint32_t BitPart __attribute__((vector_size(4 * kPart)));

struct Vec {
  FloatPart part[kParts];
};

template <class F>
inline Vec each(F&& f) {
  Vec out;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) out.part[i] = f(i);
  return out;
}

inline FloatPart splat_part(float x) {
#if defined(__AVX2__) && defined(__FMA__)
  return _mm256_set1_ps(x);
#else
  return FloatPart{x, x, x, x};
#endif
}
inline IntPart lane_part(int i) {
  IntPart lane;
  for (int k = 0; k < kPart; ++k) lane[k] = i * kPart + k;
  return lane;
}

inline Vec splat(float x) {
  return each([&](int) { return splat_part(x); });
}
inline Vec zero() { return splat(0); }
inline Vec load(const void* at) {
  Vec out;
  memcpy(&out, at, sizeof out);
  return out;
}
inline void store(void* at, Vec x) { memcpy(at, &x, sizeof x); }
inline Vec add(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.part[i] + b.part[i]; });
}
inline Vec sub(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.part[i] - b.part[i]; });
}
inline Vec mul(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.part[i] * b.part[i]; });
}
inline Vec div(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.part[i] / b.part[i]; });
}
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) {
  return each([&](int i) -> FloatPart {
#if defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(a.part[i], b.part[i], c.part[i]);
#else
    return a.part[i] * b.part[i] + c.part[i];
#endif
  });
}
inline Vec max(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
}
inline Vec first_lanes(const Vec& x, int count, const Vec& other) {
  return each([&](int i) { return lane_part(i) < count ? x.part[i] : other.part[i]; });
}
inline float sum_of_lanes(const Vec& x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}
inline float max_of_lanes(const Vec& x) {
  float lanes[kLanes];
  store(lanes, x);
  float most = lanes[0];
  for (int i = 1; i < kLanes; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
}
inline void store_first(void* at, int count, const Vec& x) { memcpy(at, &x, 4 * count); }
template <int kCount>
inline Vec max_of_each(const Vec (&x)[kCount]) {
  float most[kLanes] = {};
  for (int row = 0; row < kCount; ++row) most[row] = max_of_lanes(x[row]);
  return load(most);
}
inline Vec even_bf16(const void* pairs) {
  const Vec bits = load(pairs);
  return each([&](int i) { return (FloatPart)((BitPart)bits.part[i] << 16); });
}
inline Vec odd_bf16(const void* pairs) {
  const Vec bits = load(pairs);
  return each([&](int i) { return (FloatPart)((BitPart)bits.part[i] & 0xffff0000u); });
}
inline Vec load_bf16(const void* at) {
  uint16_t halves[kLanes];
  uint32_t bits[kLanes];
  memcpy(halves, at, sizeof halves);
  for (int i = 0; i < kLanes; ++i) bits[i] = static_cast<uint32_t>(halves[i]) << 16;
  return load(bits);
}
inline void store_bf16(void* at, const Vec& x) {
  uint32_t bits[kLanes];
  uint16_t halves[kLanes];
  store(bits, x);
  for (int i = 0; i < kLanes; ++i) {
    const bool nan = (bits[i] & 0x7fffffffu) > 0x7f800000u;
    halves[i] = nan ? 0x7fc0 : (bits[i] + 0x7fff + ((bits[i] >> 16) & 1)) >> 16;
  }
  memcpy(at, halves, sizeof halves);
}
inline IntPart floor_part(FloatPart x) {
  const IntPart whole = __builtin_convertvector(x, IntPart);
  return whole + (__builtin_convertvector(whole, FloatPart) > x);  // a true lane is -1
}
// Powers below 2^-126 become 0: their exponent field is 0.
inline Vec exponent_range(const Vec& x) { return max(x, splat(-127)); }
inline Vec fraction(const Vec& x) {
  return each(
      [&](int i) { return x.part[i] - __builtin_convertvector(floor_part(x.part[i]), FloatPart); });
}
inline Vec scale_by_floor(const Vec& p, const Vec& x) {
  return each([&](int i) { return p.part[i] * (FloatPart)((floor_part(x.part[i]) + 127) << 23); });
}
#endif

// 2^x for x <= 0 (or above 0 by a rounding error), and exactly 1 for x = 0.
//
// Uses minimax polynomials of the fraction in [0, 1) with constant term 1: of degree 3 if kShort
// (relative error 9e-5, a twentieth of the bf16 rounding that follows), else of degree 6 (2e-9).
template <bool kShort>
inline Vec exp2_of(Vec x) {
  x = exponent_range(x);
  const Vec f = fraction(x);
  Vec p;
  if (kShort) {
    p = fma(f, splat(7.705738596e-02f), splat(2.276555218e-01f));
    p = fma(f, p, splat(6.951144559e-01f));
  } else {
    p = fma(f, splat(2.161206683e-04f), splat(1.246806656e-03f));
    p = fma(f, p, splat(9.675430795e-03f));
    p = fma(f, p, splat(5.548528923e-02f));
    p = fma(f, p, splat(2.402293041e-01f));
    p = fma(f, p, splat(6.931470445e-01f));
  }
  return scale_by_floor(fma(f, p, splat(1)), x);
}

// tanh, with an absolute error of about 1e-7.
inline Vec tanh_of(const Vec& x) {
  const Vec power = max(splat(-126), mul(x, splat(-2 * 1.44269504f)));  // keeps NaN
  return sub(splat(1), div(splat(2), add(exp2_of<false>(sub(zero(), power)), splat(1))));
}

}  // namespace quire
