// Quantizes floats to int8 from -127 to 127 with a scale: the greatest magnitude becomes 127.
#pragma once

#include "elements.h"

namespace quire {

// Stores the low byte of each lane.
inline void store_low_bytes(uint8_t* at, const Vec& x) {
#if defined(QUIRE_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(_mm512_castps_si512(x)));
#else
  uint32_t bits[kLanes];
  store(bits, x);
  for (int i = 0; i < kLanes; ++i) at[i] = static_cast<uint8_t>(bits[i]);
#endif
}

// Writes `count` bytes: each value divided by the scale, rounded half to even, plus `offset`.
// Returns the scale.
template <class T>
inline float quantize(const T* x, int64_t count, int offset, uint8_t* out) {
  Vec most = zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec value = read(x + i, count - i);
    most = max(most, max(value, sub(zero(), value)));
  }
  const float greatest = max_of_lanes(most);
  // With smaller values, the quotient could overflow.
  const Vec inverse = splat(greatest > 1e-30f ? 127.0f / greatest : 0.0f);
  // The low bits of a float plus this are its rounded value in two's complement.
  const Vec shift = splat(12582912.0f + static_cast<float>(offset));
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec shifted = add(mul(read(x + i, count - i), inverse), shift);
    uint8_t bytes[kLanes];
    store_low_bytes(bytes, shifted);
    memcpy(out + i, bytes, count - i < kLanes ? count - i : kLanes);
  }
  return greatest / 127.0f;
}

// Converts `count` int8, a multiple of 32, to floats or to bf16, both of which hold them exactly.
inline void widen(const int8_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}
inline void widen(const int8_t* from, bf16* to, int64_t count) {
#if defined(QUIRE_AVX512) && defined(__AVX512BF16__)
  const auto floats = [](const int8_t* at) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
  };
  for (int64_t i = 0; i < count; i += 32)
    _mm512_storeu_si512(to + i,
                        (__m512i)_mm512_cvtne2ps_pbh(floats(from + i + 16), floats(from + i)));
#else
  for (int64_t i = 0; i < count; ++i) {
    const float value = from[i];
    memcpy(to + i, reinterpret_cast<const char*>(&value) + 2, 2);
  }
#endif
}

}  // namespace quire
