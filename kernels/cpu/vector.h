// Sixteen lanes, written as plain arithmetic: one register with AVX-512, two with AVX2, the same
// numbers either way (the library is compiled with -ffp-contract=off).
#pragma once

#include <cstdint>
#include <cstring>

namespace shoal {

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));  // bf16 of sixteen lanes

template <class V, class T>
inline V load(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V, class T>
inline void store(T* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

inline Floats all(float x) { return x - Floats{}; }
inline Ints as_ints(Floats x) { return (Ints)x; }
inline Floats as_floats(Ints x) { return (Floats)x; }
inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
inline Ints to_ints(Floats x) { return __builtin_convertvector(x, Ints); }  // toward zero

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline Floats abs(Floats x) { return as_floats(as_ints(x) & 0x7fffffff); }

// Sums lanes pairwise, always in the same order.
inline float sum(Floats x) {
  float lane[LANES];
  store(lane, x);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lane[i] += lane[i + width];
  return lane[0];
}

inline float max(Floats x) {
  float lane[LANES];
  store(lane, x);
  float best = lane[0];
  for (float y : lane) best = y > best ? y : best;
  return best;
}

// To the nearest integer, ties to even, for |x| < 2^22.
inline Floats rounded(Floats x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: what is added here leaves no fraction
  return (x + magic) - magic;
}

// e^x within 2 ulp for x <= 88; 0 below -87.
inline Floats exp(Floats x) {
  const Floats n = rounded(x * 1.44269504f);
  const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;  // Cephes, expf
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints power = (to_ints(n) + 127) << 23;
  return x < -87.0f ? Floats{} : p * as_floats(power);
}

inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(x > 80.0f ? all(-80.0f) : x < -80.0f ? all(80.0f) : -x)); }

// bf16, to the nearest, ties to even. NaN stays NaN.
inline Halves to_bf16(Floats x) {
  const Ints bits = as_ints(x);
  const Ints rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Ints kept = x == x ? rounded : (bits | 0x400000);
  return __builtin_convertvector((kept >> 16) & 0xffff, Halves);
}

inline Floats from_bf16(Halves x) { return as_floats(__builtin_convertvector(x, Ints) << 16); }

inline float from_bf16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace shoal
