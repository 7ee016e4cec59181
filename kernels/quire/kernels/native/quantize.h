// Floats as int8 from -127 to 127 and a scale: the greatest magnitude is 127.
#pragma once

#include "elements.h"

namespace quire {

// The low byte of each lane.
inline void store_low_bytes(uint8_t* at, const Vec& x) {
#if defined(QUIRE_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at),
                   _mm512_cvtepi32_epi8(_mm512_castps_si512(x)));
#else
  uint32_t bits[kLanes];
  store(bits, x);
  for (int i = 0; i < kLanes; ++i) at[i] = static_cast<uint8_t>(bits[i]);
#endif
}

// Writes `count` bytes, each a value over the scale, rounded to even, plus `offset`; returns the
// scale, by which they are to be multiplied.
template <class T>
inline float quantize(const T* x, int64_t count, int offset, uint8_t* out) {
  Vec most = zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec value = read(x + i, count - i);
    most = max(most, max(value, sub(zero(), value)));
  }
  const float greatest = max_of_lanes(most);
  // Below, the quotient could overflow.
  const Vec inverse = splat(greatest > 1e-30f ? 127.0f / greatest : 0.0f);
  // Added to this, a float's low bits are its integer part as two's complement.
  const Vec shift = splat(12582912.0f + static_cast<float>(offset));
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec shifted = add(mul(read(x + i, count - i), inverse), shift);
    uint8_t bytes[kLanes];
    store_low_bytes(bytes, shifted);
    memcpy(out + i, bytes, count - i < kLanes ? count - i : kLanes);
  }
  return greatest / 127.0f;
}

}  // namespace quire
