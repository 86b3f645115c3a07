// Causal attention of one KV head over pages of 16 tokens, in bf16 or in int8.
//
// Keys of a page lie as [dim pairs][16 tokens][2], so that one dot instruction scores 16 tokens and
// no sum runs across lanes; values as [8 token pairs][dims][2]. All query heads of the KV head and
// several tokens are rows that share each load. A row's numbers are formed in the same order
// whatever the other rows are: scores of all tokens first, then softmax, then the sum over values,
// token pair by token pair.
//
// Pages of int8 have bytes in the same places, and behind them a scale for each token of the keys and
// of the values. Bytes are exact in bf16: some pages at a time are widened, and the same products
// taken. Scales of keys go to the scores, scales of values to the weights.
//
// With sinks a row sees the first tokens and those of its window; queries that meet the sinks are
// turned for them.
#pragma once

#include <algorithm>
#include <cmath>

#include "vector.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace shoal {

constexpr int PAGE = 16;           // tokens
constexpr int TILE_ROWS_MAX = 128;  // query heads of one KV head

// sum += a pair of bf16 products, lane by lane; `pair` holds the two factors of every lane.
inline void dot(Floats& sum, const uint16_t* two_by_lane, uint32_t pair) {
#ifdef __AVX512BF16__
  const __m512i lanes = _mm512_loadu_si512(two_by_lane);
  const __m512i factors = _mm512_set1_epi32(pair);
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(factors), "v"(lanes));
#else
  const Ints lanes = load<Ints>(two_by_lane);
  const float low = from_bf16(uint16_t(pair)), high = from_bf16(uint16_t(pair >> 16));
  sum = fma(as_floats(lanes << 16), all(low), sum);
  sum = fma(as_floats(lanes & int32_t(0xffff0000)), all(high), sum);
#endif
}

struct HeadPages {
  const uint8_t* pool;       // keys and values of this layer and head in page 0
  size_t page_stride;        // bytes from a page to the next
  const int32_t* table;      // pages of the sequence
  int dims;                  // a multiple of 16
  int int8;                  // whether they are bytes, and scales behind them
  const uint8_t* at(int page) const { return pool + table[page] * page_stride; }
  int numbers() const { return dims * PAGE; }  // of the keys of a page, and of its values
  const uint16_t* keys(int page) const { return reinterpret_cast<const uint16_t*>(at(page)); }
  const uint16_t* values(int page) const { return keys(page) + numbers(); }
  const int8_t* key_bytes(int page) const { return reinterpret_cast<const int8_t*>(at(page)); }
  const int8_t* value_bytes(int page) const { return key_bytes(page) + numbers(); }
  Floats key_scales(int page) const { return load<Floats>(at(page) + 2 * numbers()); }
  Floats value_scales(int page) const { return load<Floats>(at(page) + 2 * numbers() + sizeof(Floats)); }
};

template <int R, int B>
inline void score(const HeadPages& kv, int page, const uint16_t* queries, int row_stride,
                  float* scores, size_t score_stride) {
  Floats sums[B][R] = {};
  const uint16_t* keys[B];
  for (int b = 0; b < B; b++) keys[b] = kv.keys(page + b);
  for (int pair = 0; pair < kv.dims / 2; pair++)
    for (int r = 0; r < R; r++) {
      uint32_t factors;
      std::memcpy(&factors, queries + r * row_stride + 2 * pair, 4);
      for (int b = 0; b < B; b++) dot(sums[b][r], keys[b] + pair * 2 * PAGE, factors);
    }
  for (int b = 0; b < B; b++)
    for (int r = 0; r < R; r++) store(scores + r * score_stride + (page + b) * PAGE, sums[b][r]);
}

template <int R>
inline void score_pages(const HeadPages& kv, int first, int last, const uint16_t* queries,
                        int row_stride, float* scores, size_t score_stride) {
  constexpr int B = R == 1 ? 8 : R == 2 ? 4 : R <= 4 ? 3 : R <= 8 ? 2 : 1;  // sums in flight
  int page = first;
  for (; page + B <= last; page += B)
    score<R, B>(kv, page, queries, row_stride, scores, score_stride);
  for (; page < last; page++) score<R, 1>(kv, page, queries, row_stride, scores, score_stride);
}

// values: out[r][dim] = sum over tokens of weight[r][token] * value[token][dim], for 64 dims; `more` =
// added one by one to what is there.
template <int R, int D>
inline void mix(const HeadPages& kv, int first, int last, int dim, const uint16_t* weights,
                size_t weight_stride, float* out, int out_stride, bool more) {
  Floats sums[R][D] = {};
  if (more)
    for (int r = 0; r < R; r++)
      for (int d = 0; d < D; d++) sums[r][d] = load<Floats>(out + r * out_stride + dim + d * LANES);
  for (int page = first; page < last; page++) {
    const uint16_t* values = kv.values(page) + 2 * dim;
    for (int pair = 0; pair < PAGE / 2; pair++)
      for (int r = 0; r < R; r++) {
        uint32_t factors;
        std::memcpy(&factors, weights + r * weight_stride + page * PAGE + 2 * pair, 4);
        for (int d = 0; d < D; d++)
          dot(sums[r][d], values + pair * 2 * kv.dims + d * 2 * LANES, factors);
      }
  }
  for (int r = 0; r < R; r++)
    for (int d = 0; d < D; d++) store(out + r * out_stride + dim + d * LANES, sums[r][d]);
}

template <int R>
inline void mix_pages(const HeadPages& kv, int first, int last, const uint16_t* weights,
                      size_t weight_stride, float* out, int out_stride, bool more) {
  int dim = 0;
  for (; dim + 4 * LANES <= kv.dims; dim += 4 * LANES)
    mix<R, 4>(kv, first, last, dim, weights, weight_stride, out, out_stride, more);
  for (; dim < kv.dims; dim += LANES)
    mix<R, 1>(kv, first, last, dim, weights, weight_stride, out, out_stride, more);
}

struct Mask {
  int position;  // of the row's token: it sees [position - window + 1, position]
  int window;    // 0 = from the beginning
  int sinks;     // and [0, sinks) before them; a multiple of PAGE
};

// Lane by lane, the largest score of pages [first, last); four at a time, as each waits for the
// one before.
inline Floats largest(const float* scores, int first, int last) {
  Floats best[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
  int page = first;
  for (; page + 4 <= last; page += 4)
    for (int i = 0; i < 4; i++) best[i] = max(best[i], load<Floats>(scores + (page + i) * PAGE));
  for (; page < last; page++) best[0] = max(best[0], load<Floats>(scores + page * PAGE));
  return max(max(best[0], best[1]), max(best[2], best[3]));
}

// One row of scores -> unnormalized weights in bf16; returns their sum. There are scores of the pages
// of sinks, and of pages [first, last).
inline float softmax(const HeadPages& kv, float* scores, int first, int last, Mask mask, float cap,
                     uint16_t* weights) {
  int begin = mask.window ? std::max(0, mask.position - mask.window + 1) : 0;
  if (begin <= mask.sinks) begin = 0;
  const int sinks = begin ? mask.sinks / PAGE : 0;  // pages seen in full before the window
  first = std::max(first, sinks);
  const int whole = std::max(first, (begin + PAGE - 1) / PAGE);  // the first page seen in full,
  const int rest = std::max(whole, (mask.position + 1) / PAGE);  // and the first after them
  auto each_page = [&](auto work) {
    for (int page = 0; page < sinks; page++) work(page);
    for (int page = first; page < last; page++) work(page);
  };
  auto each_partial = [&](auto work) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int page = first; page < last; page++) {
      if (page == whole) page = rest;
      if (page == last) break;
      const Ints token = page * PAGE + lane;
      work(page, (token <= mask.position) & (token >= begin));
    }
  };
  const bool int8 = kv.int8;
  if (int8)
    each_page([&](int page) {
      store(scores + page * PAGE, load<Floats>(scores + page * PAGE) * kv.key_scales(page));
    });
  if (cap > 0.0f)
    each_page([&](int page) {
      const Floats x = load<Floats>(scores + page * PAGE);  // -> cap * tanh(x / cap)
      store(scores + page * PAGE, cap * (2.0f * sigmoid(x * (2.0f / cap)) - 1.0f));
    });
  Floats best = largest(scores, whole, rest);
  if (sinks) best = max(best, largest(scores, 0, sinks));
  each_partial([&](int page, Ints seen) {
    best = max(best, seen ? load<Floats>(scores + page * PAGE) : all(-INFINITY));
  });
  const float log2_e = 1.44269504f, top = max(best) * log2_e;
  Floats total = {};
  auto weigh = [&](int page, Ints seen) {
    const Floats x = fma(load<Floats>(scores + page * PAGE), all(log2_e), all(-top));
    const Floats weight = seen ? roughly_exp2(x) : Floats{};
    store(weights + page * PAGE, to_bf16(int8 ? weight * kv.value_scales(page) : weight));
    total = total + weight;
  };
  for (int page = 0; page < sinks; page++) weigh(page, ~Ints{});
  for (int page = whole; page < rest; page++) weigh(page, ~Ints{});
  each_partial(weigh);
  return sum(total);
}

#ifdef __AMX_BF16__
// The matrix unit takes a page of keys as two operands of 32 dims, and of values as one per 16 dims.
// It sums in another order than the dot instruction, so everything goes this way, single rows too.
struct alignas(64) AttentionShape {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int t, int tile_rows, int tile_bytes) { rows[t] = tile_rows, bytes[t] = tile_bytes; }

  // Of up to 32 rows, times 32 dims of keys or 16 tokens of values.
  AttentionShape(int count, bool keys) {
    const int low = std::min(16, count), high = count - low;
    const int operand = keys ? 64 : 32, shared = keys ? 16 : PAGE / 2;
    for (int t = 0; t < 4; t++) set(t, high && t > 1 ? high : low, 64);  // sums
    set(4, low, operand);  // queries or weights
    set(5, high ? high : shared, high ? operand : 64);
    for (int t = 6; t < 8; t++) set(t, shared, 64);
  }
};

// Four pages at a time: one product ends long after the next could begin.
inline void score_rows(const HeadPages& kv, int first, int last, const uint16_t* queries,
                       float* scores, size_t score_stride) {
  for (int page = first; page < last; page += 4) {
    const int pages = std::min(4, last - page);
    float* to = scores + page * PAGE;
    zero_sums();
    for (int dim = 0; dim < kv.dims; dim += 32) {
      _tile_loadd(4, queries + dim, kv.dims * 2);
      _tile_loadd(5, kv.keys(page) + dim * PAGE, 64);
      _tile_dpbf16ps(0, 4, 5);
      if (pages > 1) {
        _tile_loadd(5, kv.keys(page + 1) + dim * PAGE, 64);
        _tile_dpbf16ps(1, 4, 5);
      }
      if (pages > 2) {
        _tile_loadd(5, kv.keys(page + 2) + dim * PAGE, 64);
        _tile_dpbf16ps(2, 4, 5);
      }
      if (pages > 3) {
        _tile_loadd(5, kv.keys(page + 3) + dim * PAGE, 64);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, to, score_stride * 4);
    if (pages > 1) _tile_stored(1, to + PAGE, score_stride * 4);
    if (pages > 2) _tile_stored(2, to + 2 * PAGE, score_stride * 4);
    if (pages > 3) _tile_stored(3, to + 3 * PAGE, score_stride * 4);
  }
}

inline void mix_rows(const HeadPages& kv, int first, int last, const uint16_t* weights,
                     size_t weight_stride, float* out, int out_stride, bool more) {
  for (int dim = 0; dim < kv.dims; dim += 4 * LANES) {
    const int tiles = std::min(4, (kv.dims - dim) / LANES);
    zero_sums();
    if (more) {
      _tile_loadd(0, out + dim, out_stride * 4);
      if (tiles > 1) _tile_loadd(1, out + dim + LANES, out_stride * 4);
      if (tiles > 2) _tile_loadd(2, out + dim + 2 * LANES, out_stride * 4);
      if (tiles > 3) _tile_loadd(3, out + dim + 3 * LANES, out_stride * 4);
    }
    for (int page = first; page < last; page++) {
      const uint16_t* values = kv.values(page) + 2 * dim;
      const int stride = kv.dims * 4;
      _tile_loadd(4, weights + page * PAGE, weight_stride * 2);
      _tile_loadd(5, values, stride);
      _tile_dpbf16ps(0, 4, 5);
      if (tiles > 1) {
        _tile_loadd(5, values + 2 * LANES, stride);
        _tile_dpbf16ps(1, 4, 5);
      }
      if (tiles > 2) {
        _tile_loadd(5, values + 4 * LANES, stride);
        _tile_dpbf16ps(2, 4, 5);
      }
      if (tiles > 3) {
        _tile_loadd(5, values + 6 * LANES, stride);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, out + dim, out_stride * 4);
    if (tiles > 1) _tile_stored(1, out + dim + LANES, out_stride * 4);
    if (tiles > 2) _tile_stored(2, out + dim + 2 * LANES, out_stride * 4);
    if (tiles > 3) _tile_stored(3, out + dim + 3 * LANES, out_stride * 4);
  }
}

// The same for 17 to 32 rows: each load serves two products, whose numbers are those of above.
inline void score_two(const HeadPages& kv, int first, int last, const uint16_t* queries,
                      float* scores, size_t score_stride) {
  const int stride = kv.dims * 2;
  for (int page = first; page < last; page += 2) {
    const uint16_t *left = kv.keys(page), *right = kv.keys(std::min(page + 1, last - 1));
    zero_sums();
    for (int dim = 0; dim < kv.dims; dim += 32) {
      _tile_loadd(4, queries + dim, stride);
      _tile_loadd(6, left + dim * PAGE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, right + dim * PAGE, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, queries + 16 * kv.dims + dim, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    float *low = scores + page * PAGE, *high = low + 16 * score_stride;
    _tile_stored(0, low, score_stride * 4);
    _tile_stored(2, high, score_stride * 4);
    if (page + 1 == last) break;
    _tile_stored(1, low + PAGE, score_stride * 4);
    _tile_stored(3, high + PAGE, score_stride * 4);
  }
}

inline void mix_two(const HeadPages& kv, int first, int last, const uint16_t* weights,
                    size_t weight_stride, float* out, int out_stride, bool more) {
  for (int dim = 0; dim < kv.dims; dim += 2 * LANES) {
    float *to = out + dim, *high = to + 16 * out_stride;
    zero_sums();
    if (more) {
      _tile_loadd(0, to, out_stride * 4);
      _tile_loadd(1, to + LANES, out_stride * 4);
      _tile_loadd(2, high, out_stride * 4);
      _tile_loadd(3, high + LANES, out_stride * 4);
    }
    for (int page = first; page < last; page++) {
      const uint16_t* values = kv.values(page) + 2 * dim;
      const uint16_t* low = weights + page * PAGE;
      _tile_loadd(4, low, weight_stride * 2);
      _tile_loadd(6, values, kv.dims * 4);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, values + 2 * LANES, kv.dims * 4);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, low + 16 * weight_stride, weight_stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, to, out_stride * 4);
    _tile_stored(1, to + LANES, out_stride * 4);
    _tile_stored(2, high, out_stride * 4);
    _tile_stored(3, high + LANES, out_stride * 4);
  }
}

constexpr int TILE_ROWS = 32;
#else
inline void score_rows(int rows, const HeadPages& kv, int first, int last, const uint16_t* queries,
                       float* scores, size_t stride) {
  for (int row = 0; row < rows;) {
    const int count = std::min(6, rows - row);
    const uint16_t* q = queries + row * kv.dims;
    float* s = scores + row * stride;
    switch (count) {
      case 6: score_pages<6>(kv, first, last, q, kv.dims, s, stride); break;
      case 5: score_pages<5>(kv, first, last, q, kv.dims, s, stride); break;
      case 4: score_pages<4>(kv, first, last, q, kv.dims, s, stride); break;
      case 3: score_pages<3>(kv, first, last, q, kv.dims, s, stride); break;
      case 2: score_pages<2>(kv, first, last, q, kv.dims, s, stride); break;
      default: score_pages<1>(kv, first, last, q, kv.dims, s, stride); break;
    }
    row += count;
  }
}

inline void mix_rows(int rows, const HeadPages& kv, int first, int last, const uint16_t* weights,
                     size_t stride, float* out, int out_stride, bool more) {
  for (int row = 0; row < rows;) {
    const int count = std::min(6, rows - row);
    const uint16_t* w = weights + row * stride;
    float* y = out + row * out_stride;
    switch (count) {
      case 6: mix_pages<6>(kv, first, last, w, stride, y, out_stride, more); break;
      case 5: mix_pages<5>(kv, first, last, w, stride, y, out_stride, more); break;
      case 4: mix_pages<4>(kv, first, last, w, stride, y, out_stride, more); break;
      case 3: mix_pages<3>(kv, first, last, w, stride, y, out_stride, more); break;
      case 2: mix_pages<2>(kv, first, last, w, stride, y, out_stride, more); break;
      default: mix_pages<1>(kv, first, last, w, stride, y, out_stride, more); break;
    }
    row += count;
  }
}

constexpr int TILE_ROWS = 24;
#endif

// A tile: `rows` rows of queries [rows][dims] in bf16, scaled; row r is of token first_token + r /
// heads. Writes [rows][dims] in floats. Scratch: rows * (pages + 1) * 16 floats, as many bf16.
struct AttentionTile {
  HeadPages kv;
  const uint16_t* queries;
  const uint16_t* sink_queries;  // the same, turned for the sinks
  int rows, heads;
  int position;  // of the first row's token
  int window, sinks;
  float cap;
  float* out;
  int out_stride;
  float* scores;
  uint16_t* weights;
  uint16_t* widened;  // scratch: WIDENED pages of keys and values; not used with pages in bf16
};

// gcc 12 converts a vector from bytes lane by lane: attention was six times slower.
inline Ints widened(const int8_t* from) {
#ifdef __AVX512F__
  return (Ints)_mm512_cvtepi8_epi32(load<__m128i>(from));
#else
  typedef int8_t Bytes __attribute__((vector_size(LANES)));
  typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));
  return __builtin_convertvector(__builtin_convertvector(load<Bytes>(from), Shorts), Ints);
#endif
}

constexpr int WIDENED = 16;  // pages that are widened at a time: they stay in the cache

// Calls `work(pages, from, to, before)` for pages [first, last) of the tile in bf16: they are [from,
// to) of `pages`, and `before` + these of the tile. Only the keys are there, or only the values.
template <class Work>
inline void in_bf16(const AttentionTile& t, int first, int last, bool values, const Work& work) {
  if (first >= last) return;
  if (!t.kv.int8) return work(t.kv, first, last, 0);
  static constexpr int32_t IN_ORDER[WIDENED] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int numbers = t.kv.numbers();
  const auto* pool = reinterpret_cast<const uint8_t*>(t.widened);
  const HeadPages pages = {pool, size_t(4) * numbers, IN_ORDER, t.kv.dims, 0};
  for (int page = first; page < last; page += WIDENED) {
    const int count = std::min(WIDENED, last - page);
    for (int i = 0; i < count; i++) {
      const int8_t* from = values ? t.kv.value_bytes(page + i) : t.kv.key_bytes(page + i);
      uint16_t* to = t.widened + (2 * i + values) * numbers;
      for (int n = 0; n < numbers; n += LANES)
        store(to + n, to_bf16(to_floats(widened(from + n))));
    }
    work(pages, 0, count, page);
  }
}

// Scores of pages [first, last), for all rows.
inline void score_tile(const AttentionTile& t, const uint16_t* queries, int first, int last,
                       size_t stride) {
  in_bf16(t, first, last, false, [&](const HeadPages& kv, int from, int to, int before) {
    float* scores = t.scores + before * PAGE;
#ifdef __AMX_BF16__
    for (int row = 0; row < t.rows; row += 32) {
      const int rows = std::min(32, t.rows - row);
      const AttentionShape shape(rows, true);
      _tile_loadconfig(&shape);
      (rows > 16 ? score_two : score_rows)(kv, from, to, queries + row * kv.dims,
                                           scores + row * stride, stride);
    }
#else
    score_rows(t.rows, kv, from, to, queries, scores, stride);
#endif
  });
}

// The sum over values of pages [first, last), for all rows; `more` = added to what is there.
inline void mix_tile(const AttentionTile& t, int first, int last, size_t stride, bool more) {
  in_bf16(t, first, last, true, [&](const HeadPages& kv, int from, int to, int before) {
    const uint16_t* weights = t.weights + before * PAGE;
    const bool adds = more || before > first;
#ifdef __AMX_BF16__
    for (int row = 0; row < t.rows; row += 32) {
      const int rows = std::min(32, t.rows - row);
      const AttentionShape shape(rows, false);
      _tile_loadconfig(&shape);
      (rows > 16 ? mix_two : mix_rows)(kv, from, to, weights + row * stride, stride,
                                       t.out + row * t.out_stride, t.out_stride, adds);
    }
#else
    mix_rows(t.rows, kv, from, to, weights, stride, t.out, t.out_stride, adds);
#endif
  });
}

// Tokens whose query heads make one tile; more where they share what is widened for them.
inline int tile_tokens(int heads, bool int8) {
  return std::max(1, TILE_ROWS * (int8 ? 3 : 1) / heads);
}

inline void attend(const AttentionTile& t) {
  const int final_position = t.position + (t.rows - 1) / t.heads;
  const int begin = t.window ? std::max(0, t.position - t.window + 1) : 0;
  const int last = final_position / PAGE + 1, sinks = std::min(t.sinks / PAGE, last);
  const int first = begin <= t.sinks ? 0 : begin / PAGE;
  const size_t stride = apart<float>(size_t(last) * PAGE);
  float totals[TILE_ROWS_MAX];
  score_tile(t, t.sink_queries, 0, sinks, stride);
  score_tile(t, t.queries, std::max(first, sinks), last, stride);
  for (int row = 0; row < t.rows; row++) {
    const Mask mask = {t.position + row / t.heads, t.window, t.sinks};
    float* scores = t.scores + row * stride;
    totals[row] = softmax(t.kv, scores, first, last, mask, t.cap, t.weights + row * stride);
  }
  mix_tile(t, 0, sinks, stride, false);
  mix_tile(t, std::max(first, sinks), last, stride, sinks > 0);
  for (int row = 0; row < t.rows; row++)
    for (int d = 0; d < t.kv.dims; d += LANES) {
      float* at = t.out + row * t.out_stride + d;
      store(at, load<Floats>(at) / totals[row]);
    }
}

}  // namespace shoal
