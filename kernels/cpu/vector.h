// Sixteen lanes, written as plain arithmetic: one register with AVX-512, two with AVX2, the same
// numbers either way (the library is compiled with -ffp-contract=off).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace shoal {

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));  // bf16 of sixteen lanes

// How far apart rows of `count` numbers lie: an odd number of cache lines. Rows a power of two
// apart would all fall into the same few places of the cache.
template <class T>
constexpr size_t apart(size_t count) {
  const size_t line = 64 / sizeof(T);
  return ((count + line - 1) / line | 1) * line;
}

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

// Of two that do not compare, the second: where `b` is NaN the result is.
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline Floats min(Floats a, Floats b) { return a < b ? a : b; }
inline Ints max(Ints a, Ints b) { return a > b ? a : b; }
inline Floats abs(Floats x) { return as_floats(as_ints(x) & 0x7fffffff); }

// One rounding, written out because the compiler may not choose where to (-ffp-contract=off).
inline Floats fma(Floats a, Floats b, Floats c) {
#ifdef __AVX512F__
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  __m256 half[2];
  const auto *x = (const __m256*)&a, *y = (const __m256*)&b, *z = (const __m256*)&c;
  for (int i = 0; i < 2; i++) half[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
  return load<Floats>(half);
#else
  Floats y;
  for (int i = 0; i < LANES; i++) y[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return y;
#endif
}

// Lane i takes lane i + WIDTH.
template <int WIDTH, class V>
inline V lowered(V x) {
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return __builtin_shuffle(x, (lane + WIDTH) & (LANES - 1));
}

// Sums lanes pairwise, always in the same order.
inline float sum(Floats x) {
  x = x + lowered<8>(x);
  x = x + lowered<4>(x);
  x = x + lowered<2>(x);
  return x[0] + x[1];
}

template <class V>
inline auto max(V x) {
  x = max(x, lowered<8>(x));
  x = max(x, lowered<4>(x));
  x = max(x, lowered<2>(x));
  return x[0] > x[1] ? x[0] : x[1];
}

constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: |x| < 2^22 added to it leaves no fraction of x

// 2^n, where `biased` = MAGIC + n, n in [-126, 127].
inline Floats power_of_two(Floats biased) { return as_floats((as_ints(biased) << 23) + (127 << 23)); }

// e^x within 2 ulp for |x| <= 87; beyond, e^87 or e^-87. NaN stays NaN.
inline Floats exp(Floats x) {
  x = min(all(87.0f), max(all(-87.0f), x));
  const Floats biased = fma(x, all(1.44269504f), all(MAGIC));
  const Floats n = biased - MAGIC;
  const Floats r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), x));
  Floats p = fma(r, all(1.9875691500e-4f), all(1.3981999507e-3f));  // Cephes, expf
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.0f);
  return p * power_of_two(biased);
}

// 2^x for x <= 0, within 1.1e-4 of it where it is at least 2^-126, and 2^-126 below. A weight that
// is rounded to bf16, at 2e-3, needs no more.
inline Floats roughly_exp2(Floats x) {
  x = max(all(-126.0f), x);
  const Floats biased = x + MAGIC;
  const Floats f = x - (biased - MAGIC);
  Floats p = fma(f, all(0.05500893f), all(0.24221097f));  // of 2^f, |f| <= 1/2, exact at 0
  p = fma(p, f, all(0.69328293f));
  p = fma(p, f, all(1.0f));
  return p * power_of_two(biased);
}

inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }

// bf16, to the nearest, ties to even. NaN stays NaN.
inline Halves to_bf16(Floats x) {
#ifdef __AVX512BF16__
  return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
  const Ints bits = as_ints(x);
  const Ints rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Ints kept = x == x ? rounded : (bits | 0x400000);
  return __builtin_convertvector((kept >> 16) & 0xffff, Halves);
#endif
}

inline Floats from_bf16(Halves x) { return as_floats(__builtin_convertvector(x, Ints) << 16); }

inline float from_bf16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

#ifdef __AMX_TILE__
// The four tiles in which every product of the matrix unit gathers; a tile's number is a constant.
inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
#endif

}  // namespace shoal
