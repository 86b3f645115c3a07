// y = x W^T with int8 weights per output channel and int8 activations per row, or per group of
// inputs within a row.
//
// Weights lie in panels of 16 outputs, [out / 16][in / 4][16][4], as the dot instructions take them.
// Sums of products are exact integers, and what follows is the same arithmetic for every row, so a
// row's result does not depend on its company, on the tile or on the instruction.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "vector.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace shoal {

struct Matrix {
  int32_t out;            // rows of W, a multiple of 16 (padded)
  int32_t in;             // a multiple of 64 (padded)
  int32_t group;          // inputs that share a scale of x: `in`, or a multiple of 64
  const int8_t* weights;  // [out / 16][in / 4][16][4]
  const float* scales;    // [out]
  const int32_t* offsets; // [in / group][out]: 128 times the weights' sums
  const float* bias;      // [out], or null
};

// Rows of int8 activations: value = scale of its group * byte, which is never -128.
struct Activations {
  int8_t* bytes;     // [rows padded to 32][stride]
  float* scales;     // [rows padded to 32][groups]
  size_t stride;
  size_t groups;
};

constexpr int PANEL = 16;   // outputs
// Rows and panels of a tile: with 8 x 3 sums gcc 12 runs out of registers, on AVX2 with more than 4.
#ifdef __AVX512F__
constexpr int TALL = 6, WIDE = 3;
#else
constexpr int TALL = 4, WIDE = 1;
#endif
constexpr int K_STEP = 64;  // inputs of one AMX product

// --- quantization ------------------------------------------------------------------------------

// A Hadamard transform, not normalized, of lane i of every LANES-th float, over the largest power of
// two that divides `count`; `spread` of rotation.py is its other half. A large input then takes its
// part of many steps, instead of making all of them large.
inline void spread(float* x, int count) {
  const int block = count & -count;
  for (int span = LANES; span < block; span *= 2)
    for (int begin = 0; begin < count; begin += 2 * span)
      for (int i = begin; i < begin + span; i += LANES) {
        const Floats a = load<Floats>(x + i), b = load<Floats>(x + i + span);
        store(x + i, a + b);
        store(x + i + span, a - b);
      }
}

// One row of `count` floats, `count` a multiple of 16; bytes up to `padded` become zero.
inline void quantize(const float* x, int count, int padded, int group, int8_t* bytes, float* scales) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  for (int begin = 0, g = 0; begin < padded; begin += group, g++) {
    const int end = std::min(begin + group, count);
    Ints peak = {};  // bits of |x|: in the order of the numbers, and above them what is not finite
    for (int i = begin; i < end; i += LANES) peak = max(peak, load<Ints>(x + i) & 0x7fffffff);
    const int32_t bits = max(peak);
    float top;
    std::memcpy(&top, &bits, sizeof top);
    // A NaN or an infinity must not be rounded away: its whole group becomes NaN.
    const bool sound = bits < 0x7f800000;
    scales[g] = sound ? top / 127.0f : NAN;
    const float inverse = sound && top > 0.0f ? 127.0f / top : 0.0f;
    for (int i = begin; i < end; i += LANES) {
      const Floats steps = load<Floats>(x + i) * inverse + MAGIC;
      store(bytes + i, __builtin_convertvector(as_ints(steps) & 0xff, Bytes));
    }
    for (int i = std::max(begin, end); i < std::min(begin + group, padded); i++) bytes[i] = 0;
  }
}

// --- tiles -------------------------------------------------------------------------------------

#if !defined(__AVX512VNNI__) && !defined(__AVX2__)
// Products of four inputs with those weights of a panel.
inline Ints four_products(const int8_t* x, const int8_t* v) {
  Ints sums;
  for (int i = 0; i < LANES; i++, v += 4)
    sums[i] = x[0] * v[0] + x[1] * v[1] + x[2] * v[2] + x[3] * v[3];
  return sums;
}
#endif

// sums[r][p] = products of inputs [begin, begin + w.group) for R rows and P panels.
template <int R, int P>
inline void multiply(const Matrix& w, int panel, const int8_t* x, size_t stride, int begin,
                     Ints (&sums)[R][P]) {
  const size_t panel_bytes = size_t(w.in) * PANEL;
  const int8_t* weights = w.weights + panel * panel_bytes;
  const int end = begin + w.group;
#ifdef __AVX512VNNI__
  // The instruction takes the activations unsigned, so they are 128 too high, and the sums begin
  // below zero by what that adds. Assembly, because gcc 12 copies the sums around when it meets the
  // intrinsic.
  const int32_t* offsets = w.offsets + size_t(begin / w.group) * w.out + panel * PANEL;
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) sums[r][p] = -load<Ints>(offsets + p * PANEL);
  for (int k = begin; k < end; k += 4) {
    __m512i v[P];
    for (int p = 0; p < P; p++) v[p] = _mm512_loadu_si512(weights + p * panel_bytes + k * PANEL);
    for (int r = 0; r < R; r++) {
      uint32_t four;
      std::memcpy(&four, x + r * stride + k, 4);
      const __m512i input = _mm512_set1_epi32(four ^ 0x80808080u);
      for (int p = 0; p < P; p++)
        asm("vpdpbusd %2, %1, %0" : "+v"(sums[r][p]) : "v"(input), "v"(v[p]));
    }
  }
#elif defined(__AVX2__)
  // |x| times the weight with x's sign: a pair's sum fits 16 bits, because neither is ever -128.
  __m256i halves[R][2 * P] = {};
  const __m256i ones = _mm256_set1_epi16(1);
  for (int k = begin; k < end; k += 4) {
    __m256i v[2 * P];
    for (int h = 0; h < 2 * P; h++) {
      const int8_t* from = weights + h / 2 * panel_bytes + k * PANEL + h % 2 * 32;
      v[h] = _mm256_loadu_si256((const __m256i*)from);
    }
    for (int r = 0; r < R; r++) {
      int32_t four;
      std::memcpy(&four, x + r * stride + k, 4);
      const __m256i input = _mm256_set1_epi32(four), size = _mm256_abs_epi8(input);
      for (int h = 0; h < 2 * P; h++) {
        const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(v[h], input));
        halves[r][h] = _mm256_add_epi32(halves[r][h], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) sums[r][p] = load<Ints>(&halves[r][2 * p]);
#else
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) sums[r][p] = Ints{};
  for (int k = begin; k < end; k += 4)
    for (int p = 0; p < P; p++)
      for (int r = 0; r < R; r++)
        sums[r][p] += four_products(x + r * stride + k, weights + p * panel_bytes + k * PANEL);
#endif
}

struct Output {
  float* y;       // [rows][stride]
  size_t stride;  // floats
  bool add;       // y += instead of y =
};

// What the total of a row becomes in a panel; the same steps whatever computed the sums.
inline void finish(const Matrix& w, int panel, Floats total, int row, const Output& out) {
  const int column = panel * PANEL;
  Floats value = total * load<Floats>(w.scales + column);
  if (w.bias) value = value + load<Floats>(w.bias + column);
  float* y = out.y + row * out.stride + column;
  store(y, out.add ? load<Floats>(y) + value : value);
}

template <int R, int P>
inline void tile(const Matrix& w, int panel, const Activations& x, int row, const Output& out) {
  Floats total[R][P] = {};
  for (int begin = 0, g = 0; begin < w.in; begin += w.group, g++) {
    Ints sums[R][P];
    multiply<R, P>(w, panel, x.bytes + row * x.stride, x.stride, begin, sums);
    for (int r = 0; r < R; r++) {
      const Floats scale = all(x.scales[(row + r) * x.groups + g]);
      for (int p = 0; p < P; p++) total[r][p] = fma(to_floats(sums[r][p]), scale, total[r][p]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) finish(w, panel + p, total[r][p], row + r, out);
}

template <int P>
inline void rows_by_tile(const Matrix& w, int panel, const Activations& x, int begin, int end,
                         const Output& out) {
  // With groups the totals are live beside the sums.
  const int tallest = w.group == w.in ? TALL : 4;
  for (int row = begin; row < end;) {
    const int rest = end - row;
    const int tiles = (rest + tallest - 1) / tallest;
    const int rows = (rest + tiles - 1) / tiles;  // equal tiles beat full ones and a remnant
    switch (rows) {
      case 6: tile<6, P>(w, panel, x, row, out); break;
      case 5: tile<5, P>(w, panel, x, row, out); break;
      case 4: tile<4, P>(w, panel, x, row, out); break;
      case 3: tile<3, P>(w, panel, x, row, out); break;
      case 2: tile<2, P>(w, panel, x, row, out); break;
      default: tile<1, P>(w, panel, x, row, out); break;
    }
    row += rows;
  }
}

#ifdef __AMX_INT8__
// The matrix unit multiplies 16 rows by a panel, 64 inputs at a time. Rows past the end are
// computed and not stored.
struct alignas(64) TileShape {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  explicit TileShape(int count) {  // sums and activations: `count` rows; weights
    for (int t = 0; t < 8; t++) bytes[t] = 64, rows[t] = t < 6 ? count : 16;
  }
};

constexpr int AT_ONCE = 4;  // groups whose sums wait, so that totals stay in registers

// sums[panel][row] of up to 32 rows by two panels, over one group: each load serves two products.
// Meanwhile what lies `ahead` bytes after the weights comes into the cache; 0 = it is there.
inline void amx_sums(const Matrix& w, int panel, const int8_t* x, size_t stride, int rows,
                     int begin, size_t ahead, int32_t (*sums)[32][PANEL]) {
  const int8_t* high = x + 16 * stride;
  const int8_t* left = w.weights + size_t(panel) * w.in * PANEL;
  const int8_t* right = left + size_t(w.in) * PANEL;
  zero_sums();
  for (int k = begin; k < begin + w.group; k += K_STEP) {
    for (int line = 0; ahead && line < 16; line++) {
      _mm_prefetch(left + k * PANEL + ahead + 64 * line, _MM_HINT_T1);
      _mm_prefetch(right + k * PANEL + ahead + 64 * line, _MM_HINT_T1);
    }
    _tile_loadd(4, x + k, stride);
    _tile_loadd(6, left + k * PANEL, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, right + k * PANEL, 64);
    _tile_dpbssd(1, 4, 7);
    if (rows > 16) {
      _tile_loadd(5, high + k, stride);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0][0], 64);
  _tile_stored(1, sums[1][0], 64);
  if (rows > 16) {
    _tile_stored(2, sums[0][16], 64);
    _tile_stored(3, sums[1][16], 64);
  }
}

inline void amx_tile(const Matrix& w, int panel, const Activations& x, int row, int rows,
                     const Output& out) {
  alignas(64) int32_t sums[AT_ONCE][2][32][PANEL];
  Floats totals[2][32];  // of groups before, where there are more than wait
  const int groups = x.groups;
  // The first rows wait for memory: asked for the next two panels early, 8 to 32 rows take 8 % less.
  const size_t ahead = row == 0 ? 2 * size_t(w.in) * PANEL : 0;
  for (int g = 0; g < groups; g += AT_ONCE) {
    const int count = std::min(AT_ONCE, groups - g);
    for (int i = 0; i < count; i++)
      amx_sums(w, panel, x.bytes + row * x.stride, x.stride, rows, (g + i) * w.group, ahead,
               sums[i]);
    for (int r = 0; r < rows; r++)
      for (int p = 0; p < 2; p++) {
        const float* scales = x.scales + (row + r) * x.groups + g;
        Floats total = g ? totals[p][r] : Floats{};
        for (int i = 0; i < count; i++)
          total = fma(to_floats(load<Ints>(sums[i][p][r])), all(scales[i]), total);
        if (g + count < groups)
          totals[p][r] = total;
        else
          finish(w, panel + p, total, row + r, out);
      }
  }
}
#endif

constexpr int PART = 6;       // panels of one task: a whole number of both tiles' widths
constexpr int AMX_ROWS = 5;   // from so many on the matrix unit is faster, though it fills up to 16

// Panels [first, first + PART) of the product of rows [0, rows).
inline void product(const Matrix& w, int first, const Activations& x, int rows, const Output& out) {
  const int end = std::min(first + PART, w.out / PANEL);
#ifdef __AMX_INT8__
  if (rows >= AMX_ROWS) {
    const TileShape shape(rows > 8 ? 16 : 8);
    _tile_loadconfig(&shape);
    for (int row = 0; row < rows; row += 32)
      for (int panel = first; panel + 2 <= end; panel += 2)
        amx_tile(w, panel, x, row, std::min(32, rows - row), out);
    if ((end - first) % 2) rows_by_tile<1>(w, end - 1, x, 0, rows, out);
    return;
  }
#endif
  int panel = first;
  for (; panel + WIDE <= end; panel += WIDE) rows_by_tile<WIDE>(w, panel, x, 0, rows, out);
  for (; panel < end; panel++) rows_by_tile<1>(w, panel, x, 0, rows, out);
}

inline int parts(const Matrix& w) { return (w.out / PANEL + PART - 1) / PART; }

}  // namespace shoal
