// y = x W^T with int8 weights per output channel and 8-bit activations per row, or per group of
// inputs within a row.
//
// Weights lie in panels of 16 outputs, [out / 16][in / 4][16][4], as the dot instructions take them.
// Activations are stored plus 128, unsigned; `offset` takes 128 times the weights' sum off again.
// Sums of products are exact integers, and what follows is the same arithmetic for every row, so a
// row's result does not depend on its company, on the tile or on the instruction.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "vector.h"

#if defined(__AVX512VNNI__) || defined(__AMX_INT8__)
#include <immintrin.h>
#endif

namespace shoal {

struct Matrix {
  int32_t out;            // rows of W, a multiple of 16 (padded)
  int32_t in;             // a multiple of 64 (padded)
  int32_t group;          // inputs that share a scale of x: `in`, or a multiple of 64
  const int8_t* weights;  // [out / 16][in / 4][16][4]
  const float* scales;    // [out]
  const int32_t* offsets; // [in / group][out]
  const float* bias;      // [out], or null
};

// Rows of 8-bit activations: value = scale of its group * (byte - 128).
struct Activations {
  uint8_t* bytes;    // [rows padded to 32][in]
  float* scales;     // [rows padded to 32][groups]
  size_t in;
  size_t groups;
};

constexpr int PANEL = 16;   // outputs
constexpr int WIDE = 3;     // panels of a tile: with 8 x 3 sums gcc 12 runs out of registers
constexpr int K_STEP = 64;  // inputs of one AMX product

// --- quantization ------------------------------------------------------------------------------

// One row of `count` floats, `count` a multiple of 16; bytes up to `padded` become zero.
inline void quantize(const float* x, int count, int padded, int group, uint8_t* bytes, float* scales) {
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
      const Floats steps = load<Floats>(x + i) * inverse + (MAGIC + 128.0f);
      store(bytes + i, __builtin_convertvector(as_ints(steps) & 0xff, Bytes));
    }
    for (int i = std::max(begin, end); i < std::min(begin + group, padded); i++) bytes[i] = 128;
  }
}

// --- tiles -------------------------------------------------------------------------------------

// sums[r][p] += products of inputs [begin, end) for R rows and P panels.
template <int R, int P>
inline void multiply(const Matrix& w, int panel, const uint8_t* x, size_t stride, int begin, int end,
                     Ints (&sums)[R][P]) {
  const size_t panel_bytes = size_t(w.in) * PANEL;
  const int8_t* weights = w.weights + panel * panel_bytes;
#ifdef __AVX512VNNI__
  // Assembly, because gcc 12 copies the sums around in every step when it meets the intrinsic.
  for (int k = begin; k < end; k += 4) {
    __m512i v[P];
    for (int p = 0; p < P; p++) v[p] = _mm512_loadu_si512(weights + p * panel_bytes + k * PANEL);
    for (int r = 0; r < R; r++) {
      int32_t four;
      std::memcpy(&four, x + r * stride + k, 4);
      const __m512i input = _mm512_set1_epi32(four);
      for (int p = 0; p < P; p++)
        asm("vpdpbusd %2, %1, %0" : "+v"(sums[r][p]) : "v"(input), "v"(v[p]));
    }
  }
#else
  for (int k = begin; k < end; k += 4)
    for (int p = 0; p < P; p++) {
      const int8_t* v = weights + p * panel_bytes + k * PANEL;
      for (int r = 0; r < R; r++) {
        const uint8_t* four = x + r * stride + k;
        Ints add;
        for (int i = 0; i < LANES; i++)
          add[i] = four[0] * v[4 * i] + four[1] * v[4 * i + 1] + four[2] * v[4 * i + 2] +
                   four[3] * v[4 * i + 3];
        sums[r][p] += add;
      }
    }
#endif
}

// What a tile's numbers become; the same steps whatever computed the sums.
inline Floats scaled(Ints sum, Ints offset, float scale) {
  return to_floats(sum - offset) * scale;
}

struct Output {
  float* y;       // [rows][stride]
  size_t stride;  // floats
  bool add;       // y += instead of y =
};

inline void finish(const Matrix& w, int column, Floats value, float* y, bool add) {
  value = value * load<Floats>(w.scales + column);
  if (w.bias) value = value + load<Floats>(w.bias + column);
  store(y, add ? load<Floats>(y) + value : value);
}

template <int R, int P>
inline void tile(const Matrix& w, int panel, const Activations& x, int row, const Output& out) {
  const uint8_t* bytes = x.bytes + row * x.in;
  Floats total[R][P] = {};
  for (int begin = 0, g = 0; begin < w.in; begin += w.group, g++) {
    Ints sums[R][P] = {};
    multiply<R, P>(w, panel, bytes, x.in, begin, begin + w.group, sums);
    for (int r = 0; r < R; r++)
      for (int p = 0; p < P; p++) {
        const Ints offset = load<Ints>(w.offsets + size_t(g) * w.out + (panel + p) * PANEL);
        total[r][p] = total[r][p] + scaled(sums[r][p], offset, x.scales[(row + r) * x.groups + g]);
      }
  }
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) {
      const int column = (panel + p) * PANEL;
      finish(w, column, total[r][p], out.y + (row + r) * out.stride + column, out.add);
    }
}

template <int P>
inline void rows_by_tile(const Matrix& w, int panel, const Activations& x, int begin, int end,
                         const Output& out) {
  // With groups the totals are live beside the sums.
  const int tallest = w.group == w.in ? 6 : 4;
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
// Thirty-two rows by two panels on the matrix unit. Rows past the end are computed and not stored.
struct alignas(64) TileShape {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  TileShape() {
    for (int t = 0; t < 8; t++) bytes[t] = 64, rows[t] = 16;
  }
};

inline void amx_tile(const Matrix& w, int panel, const Activations& x, int row, int rows,
                     const Output& out) {
  alignas(64) int32_t sums[2][32][PANEL];  // [panel][row]
  Floats total[2][32];
  std::memset(total, 0, sizeof total);
  const size_t panel_bytes = size_t(w.in) * PANEL;
  const uint8_t* low = x.bytes + row * x.in;
  const uint8_t* high = low + 16 * x.in;
  const int8_t* left = w.weights + panel * panel_bytes;
  const int8_t* right = left + panel_bytes;
  const float* scales = x.scales + row * x.groups;
  for (int begin = 0, g = 0; begin < w.in; begin += w.group, g++) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = begin; k < begin + w.group; k += K_STEP) {
      _tile_loadd(4, low + k, x.in);
      _tile_loadd(6, left + k * PANEL, 64);
      _tile_dpbusd(0, 4, 6);
      _tile_loadd(7, right + k * PANEL, 64);
      _tile_dpbusd(1, 4, 7);
      if (rows > 16) {
        _tile_loadd(5, high + k, x.in);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
      }
    }
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[1][0], 64);
    if (rows > 16) {
      _tile_stored(2, sums[0][16], 64);
      _tile_stored(3, sums[1][16], 64);
    }
    const int32_t* offsets = w.offsets + size_t(g) * w.out + panel * PANEL;
    const Ints first = load<Ints>(offsets), second = load<Ints>(offsets + PANEL);
    for (int r = 0; r < rows; r++) {
      const float scale = scales[r * x.groups + g];
      total[0][r] = total[0][r] + scaled(load<Ints>(sums[0][r]), first, scale);
      total[1][r] = total[1][r] + scaled(load<Ints>(sums[1][r]), second, scale);
    }
  }
  for (int r = 0; r < rows; r++) {
    float* y = out.y + (row + r) * out.stride + panel * PANEL;
    finish(w, panel * PANEL, total[0][r], y, out.add);
    finish(w, (panel + 1) * PANEL, total[1][r], y + PANEL, out.add);
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
    const TileShape shape;
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
