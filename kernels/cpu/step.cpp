// One call = one step of a decoder: embeddings to logits, over any mix of prompt chunks and single
// rows. `services/gpu_worker/models/decoder.py` is the same model in torch, and the oracle.
//
// Every number of a row is formed in an order that the row alone fixes, so logits are bitwise the
// same in any company, chunking, and number of threads.

#include <cerrno>
#include <chrono>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "team.h"
#include "vector.h"

#include <sys/mman.h>
#ifdef __AMX_INT8__
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace shoal;

// --- what the caller describes; kernels/cpu/library.py mirrors these ------------------------------

struct Layer {
  Matrix qkv, attention_out, gate_up, down;
  // [hidden] and [dims]; null = none, or folded into the matrix that follows
  const float *attention_norm, *query_norm, *key_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm;
  int32_t window;  // 0 = none
  int32_t sinks;   // tokens before the window that stay in sight; a multiple of 16
  int32_t local;   // whether it turns by the second table
};

struct Model {
  int32_t hidden, hidden_padded;  // padded to 64
  int32_t inner_padded;           // to 64
  int32_t num_layers, heads, kv_heads;
  int32_t dims, dims_padded;      // of a head, padded to 16
  int32_t rotary_dims;
  int32_t vocab;
  int32_t gelu;
  float eps, query_scale, attention_cap, logits_cap, embedding_scale;
  const uint16_t* embedding;      // [vocab][hidden_padded] bf16
  const Layer* layers;
  const float* norm;
  Matrix head;
  const float *cosines, *sines;              // [positions][rotary_dims / 2]
  const float *local_cosines, *local_sines;
  // [pages][layers][kv_heads]: keys and values, dims_padded * 16 each; in bytes with 16 scales each
  // behind them, or in bf16.
  uint8_t* pages;
  int32_t int8_pages;
};

struct Span {      // consecutive tokens of one sequence
  int32_t row;     // of the first in the step
  int32_t rows;
  int32_t position;
  int32_t table;   // where its pages begin in `Step::tables`
  int32_t dropped; // pages out of sight, between the sinks and the window, that are not in its table
};

struct Step {
  int32_t rows, spans, pages_max;
  const int32_t* ids;     // [rows]
  const Span* span;       // [spans]
  const int32_t* tables;
};

struct Logits {           // of some rows of the last step
  int32_t rows;
  const int32_t* of;      // [rows]: which
  float* values;          // [rows][vocab, padded]; null = nobody reads them
  int32_t* best;          // [rows]: the first of the largest
  uint8_t* sound;         // [rows]: no NaN, no infinity
};

namespace {

enum Phase { NORM, QKV, ROPE, ATTENTION, OUT_INPUT, OUT, MLP_INPUT, GATE_UP, GATED, DOWN, HEAD, PHASES };

constexpr size_t LARGE_PAGE = size_t(2) << 20;

// Asks for large pages where whole ones fit: each small one costs a walk through the host's tables.
void in_large_pages(void* memory, size_t bytes) {
  const uintptr_t begin = (uintptr_t(memory) + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
  const uintptr_t end = (uintptr_t(memory) + bytes) / LARGE_PAGE * LARGE_PAGE;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

template <class T>
class Buffer {  // grows, never shrinks; aligned to a cache line, and in large pages where they pay
 public:
  T* room(size_t count) {
    if (count > size_) {
      size_t bytes = count * sizeof(T);
      const bool large = bytes > LARGE_PAGE / 8;
      if (large) bytes = (bytes + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
      const auto align = std::align_val_t(large ? LARGE_PAGE : 64);
      data_ = {static_cast<T*>(::operator new(bytes, align)), Free{align}};
      in_large_pages(data_.get(), bytes);
      std::memset(static_cast<void*>(data_.get()), 0, bytes);
      size_ = count;
    }
    return data_.get();
  }
  T* get() const { return data_.get(); }

 private:
  struct Free {
    std::align_val_t align{64};
    void operator()(T* p) const { ::operator delete(p, align); }
  };
  std::unique_ptr<T, Free> data_;
  size_t size_ = 0;
};

struct Best {
  float value;
  int32_t id;
  bool sound;
};

class Decoder {
 public:
  Decoder(const Model& model, int threads)
      : m_(model),
        team_(std::min(threads, Parts::THREADS_MAX)),
        parts_(size_t(model.num_layers) * HEAD + 2),
        own_(team_.size()) {
    for (int i = 0; i < model.num_layers; i++) layers_.push_back(model.layers[i]);
  }

  void forward(const Step& step) {
    step_ = &step;
    prepare();
    clock_ = std::chrono::steady_clock::now();
    team_.run([this](int rank) { layers(rank); });
    step_ = nullptr;
  }

  void logits(const Logits& asked) {
    asked_ = &asked;
    const int tasks = parts(m_.head);
    room_for_rows(asked.rows);
    if (!asked.values)
      for (Own& own : own_) own.logits.room(size_t(asked.rows) * PART * PANEL);
    best_.resize(size_t(asked.rows) * tasks);
    parts_[0].share(asked.rows, team_.size());
    parts_[1].share(tasks, team_.size());
    clock_ = std::chrono::steady_clock::now();
    team_.run([this](int rank) { head(rank); });
    judge();
    asked_ = nullptr;
  }

  double seconds[PHASES] = {};

 private:
  struct Task {
    int span, kv_head, first, rows;
  };
  struct Own {  // scratch of one thread
    Buffer<float> row, scores, logits;
    Buffer<uint16_t> weights, widened;
  };

  int group() const { return m_.heads / m_.kv_heads; }
  size_t page_bytes() const {  // of one layer and head
    const size_t numbers = size_t(2) * m_.dims_padded * PAGE;
    return m_.int8_pages ? numbers + 2 * PAGE * sizeof(float) : numbers * sizeof(uint16_t);
  }
  size_t page_stride() const { return m_.num_layers * m_.kv_heads * page_bytes(); }

  // --- before and after: on the caller's thread ---

  void prepare() {
    const Step& s = *step_;
    const size_t rows = room_for_rows(s.rows);
    hidden_.room(rows * hidden_stride());
    const int widest_output = std::max({layers_[0].qkv.out, 2 * m_.inner_padded, m_.hidden_padded});
    wide_.room(rows * apart<float>(widest_output));
    queries_.room(rows * m_.heads * m_.dims_padded);
    for (const Layer& l : layers_)
      if (l.sinks) sink_queries_.room(rows * m_.heads * m_.dims_padded);
    attended_.room(rows * m_.heads * m_.dims_padded);
    places_.resize(s.rows);
    for (int i = 0; i < s.spans; i++)
      for (int r = 0; r < s.span[i].rows; r++) places_[s.span[i].row + r] = i;
    plan_attention();
    for (int layer = 0; layer < m_.num_layers; layer++) {
      const Layer& l = layers_[layer];
      for (int phase = 0; phase < HEAD; phase++) part(layer, phase).share(s.rows, team_.size());
      part(layer, QKV).share(parts(l.qkv), team_.size());
      part(layer, ATTENTION).share(tasks_.size(), team_.size());
      part(layer, OUT).share(parts(l.attention_out), team_.size());
      part(layer, GATE_UP).share(parts(l.gate_up), team_.size());
      part(layer, DOWN).share(parts(l.down), team_.size());
    }
    part(m_.num_layers, NORM).share(s.rows, team_.size());
  }

  // Activations of `count` rows, and of as many more as the matrix unit fills up.
  size_t room_for_rows(int count) {
    const size_t rows = (count + 31) / 32 * 32;
    bytes_.room(rows * apart<int8_t>(widest()));
    scales_.room(rows * (widest() / 64));
    for (Own& own : own_) own.row.room(widest());
    return rows;
  }

  int widest() const {
    return std::max({m_.hidden_padded, m_.inner_padded, padded(m_.heads * m_.dims_padded)});
  }

  // Tiles of tokens: those of a sequence's KV head one after the other, so that its keys and values
  // stay in the cache; long ones first, and spread over the threads.
  void plan_attention() {
    const Step& s = *step_;
    tasks_.clear();
    const int tile = tile_tokens(group(), m_.int8_pages);
    for (int i = 0; i < s.spans; i++)
      for (int head = 0; head < m_.kv_heads; head++)
        for (int first = (s.span[i].rows - 1) / tile * tile; first >= 0; first -= tile)
          tasks_.push_back({i, head, first, std::min(tile, s.span[i].rows - first)});
    auto length = [&](const Task& t) { return in_view(s.span[t.span]) + s.span[t.span].rows; };
    std::stable_sort(tasks_.begin(), tasks_.end(),
                     [&](const Task& a, const Task& b) { return length(a) > length(b); });
    std::vector<Task> dealt;
    for (int rank = 0; rank < team_.size(); rank++)
      for (size_t i = rank; i < tasks_.size(); i += team_.size()) dealt.push_back(tasks_[i]);
    tasks_.swap(dealt);
    const size_t tokens = apart<float>(size_t(s.pages_max) * PAGE);
    for (Own& own : own_) {
      own.scores.room(tile * group() * tokens);
      own.weights.room(tile * group() * tokens);
      if (m_.int8_pages) own.widened.room(size_t(WIDENED) * 2 * m_.dims_padded * PAGE);
    }
  }

  void judge() {
    const int count = parts(m_.head);
    for (int row = 0; row < asked_->rows; row++) {
      Best best = best_[size_t(row) * count];
      for (int i = 1; i < count; i++) {
        const Best& other = best_[size_t(row) * count + i];
        best.sound &= other.sound;
        if (other.value > best.value) best.value = other.value, best.id = other.id;
      }
      asked_->best[row] = best.id;
      asked_->sound[row] = best.sound;
    }
  }

  // --- on every thread ---

  void layers(int rank) {
    for (int i = 0; i < m_.num_layers; i++) {
      const Layer& l = layers_[i];
      each(i, NORM, rank, [&](int row) {
        if (i == 0) embed(row);
        else if (layers_[i - 1].mlp_post_norm) add_normalized(row, layers_[i - 1].mlp_post_norm);
        normalize(hidden(row), l.attention_norm, row, l.qkv, rank);
      });
      multiply(i, QKV, rank, l.qkv, wide_.get(), apart<float>(l.qkv.out), false);
      each(i, ROPE, rank, [&](int row) { turn(i, row, rank); });
      each(i, ATTENTION, rank, [&](int task) { attend_task(i, tasks_[task], rank); });
      each(i, OUT_INPUT, rank, [&](int row) { gather(row, l.attention_out, rank); });
      multiply_into_hidden(i, OUT, rank, l.attention_out, l.attention_post_norm);
      each(i, MLP_INPUT, rank, [&](int row) {
        if (l.attention_post_norm) add_normalized(row, l.attention_post_norm);
        normalize(hidden(row), l.mlp_norm, row, l.gate_up, rank);
      });
      multiply(i, GATE_UP, rank, l.gate_up, wide_.get(), apart<float>(l.gate_up.out), false);
      each(i, GATED, rank, [&](int row) { gate(row, l.down, rank); });
      multiply_into_hidden(i, DOWN, rank, l.down, l.mlp_post_norm);
    }
    if (const float* gain = layers_.back().mlp_post_norm)
      each(m_.num_layers, NORM, rank, [&](int row) { add_normalized(row, gain); });
    leave();
  }

  void head(int rank) {
    const Logits& l = *asked_;
    run_parts(parts_[0], rank, HEAD, [&](int i) { normalize(hidden(l.of[i]), m_.norm, i, m_.head, rank); });
    const Activations x = activations(m_.head);
    run_parts(parts_[1], rank, HEAD, [&](int task) {
      const int first = task * PART * PANEL;
      Output out = {l.values, size_t(m_.head.out), false};
      if (!l.values) out = {own_[rank].logits.get() - first, size_t(PART) * PANEL, false};
      product(m_.head, task * PART, x, l.rows, out);
      for (int row = 0; row < l.rows; row++)
        best_[size_t(row) * parts(m_.head) + task] = best_of(out.y + row * out.stride, task);
    });
    leave();
  }

  static void leave() {
#ifdef __AMX_INT8__
    _tile_release();  // the kernel need not save it when it switches threads
#endif
  }

  Best best_of(float* logits, int task) {
    const int begin = task * PART * PANEL, end = std::min(begin + PART * PANEL, m_.vocab);
    if (m_.logits_cap > 0.0f)
      for (int i = begin; i < end; i++)
        logits[i] = m_.logits_cap * std::tanh(logits[i] / m_.logits_cap);
    Floats top = all(-INFINITY), nothing = {};
    Ints ids = {};
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int i = begin; i < end; i += LANES) {
      const Ints here = i + lane;
      const Floats x = here < end ? load<Floats>(logits + i) : all(-INFINITY);
      nothing = nothing + (here < end ? x * 0.0f : Floats{});  // NaN from what is not finite
      ids = x > top ? here : ids;
      top = max(x, top);
    }
    Best best = {-INFINITY, begin, sum(nothing) == 0.0f};
    for (int i = 0; i < LANES; i++)
      if (top[i] > best.value || (top[i] == best.value && ids[i] < best.id))
        best.value = top[i], best.id = ids[i];
    return best;
  }

  // --- rows ---

  size_t hidden_stride() const { return apart<float>(m_.hidden_padded); }

  float* hidden(int row) { return hidden_.get() + row * hidden_stride(); }

  void embed(int row) {
    const uint16_t* from = m_.embedding + size_t(step_->ids[row]) * m_.hidden_padded;
    for (int i = 0; i < m_.hidden_padded; i += LANES)
      store(hidden(row) + i, from_bf16(load<Halves>(from + i)) * m_.embedding_scale);
  }

  static float inverse_rms(const float* x, int count, int padded, float eps) {
    Floats squares = {};
    for (int i = 0; i < padded; i += LANES) {
      const Floats v = load<Floats>(x + i);
      squares = squares + v * v;
    }
    return 1.0f / std::sqrt(sum(squares) / count + eps);
  }

  void normalize(const float* x, const float* gain, int to_row, const Matrix& w, int rank) {
    const float scale = inverse_rms(x, m_.hidden, m_.hidden_padded, m_.eps);
    float* y = own_[rank].row.get();
    for (int i = 0; i < m_.hidden_padded; i += LANES) {
      const Floats v = load<Floats>(x + i) * scale;
      store(y + i, gain ? v * load<Floats>(gain + i) : v);
    }
    quantize_row(y, m_.hidden_padded, to_row, w);
  }

  void quantize_row(const float* x, int count, int row, const Matrix& w) {
    const Activations a = activations(w);
    quantize(x, count, w.in, w.group, a.bytes + row * a.stride, a.scales + row * a.groups);
  }

  Activations activations(const Matrix& w) {
    return {bytes_.get(), scales_.get(), apart<int8_t>(w.in), size_t(w.in / w.group)};
  }

  void add_normalized(int row, const float* gain) {
    const float* x = wide_.get() + row * hidden_stride();
    const float scale = inverse_rms(x, m_.hidden, m_.hidden_padded, m_.eps);
    float* y = hidden(row);
    for (int i = 0; i < m_.hidden_padded; i += LANES)
      store(y + i, load<Floats>(y + i) + load<Floats>(x + i) * scale * load<Floats>(gain + i));
  }

  // Queries, keys and values of a row: normalized, turned, put where attention reads them.
  void turn(int layer, int row, int rank) {
    const Layer& l = layers_[layer];
    const Span& span = step_->span[places_[row]];
    const int position = span.position + row - span.row, d = m_.dims_padded;
    const Angles angles = angles_at(l, position);
    // As far from the sinks as if nothing had been between them and the window.
    const Angles near = l.sinks ? angles_at(l, std::min(position, l.sinks + l.window - 1)) : angles;
    float *x = wide_.get() + row * apart<float>(l.qkv.out), *own = own_[rank].row.get();
    for (int head = 0; head < m_.heads; head++, x += d) {
      const size_t at = query_at(head / group(), row) + (head % group()) * d;
      if (l.sinks) {
        std::memcpy(own, x, d * sizeof(float));
        rotate(own, l.query_norm, near);
        if (m_.int8_pages) spread_head(own);
        put_query(sink_queries_.get() + at, own);
      }
      rotate(x, l.query_norm, angles);
      if (m_.int8_pages) spread_head(x);
      put_query(queries_.get() + at, x);
    }
    const int place = in_view(span) + row - span.row;
    const int page = step_->tables[span.table + place / PAGE];
    for (int head = 0; head < m_.kv_heads; head++, x += d) {
      rotate(x, l.key_norm, angles);
      if (m_.int8_pages) spread_head(x);
      uint8_t* to = pages(layer, head) + page * page_stride();
      put_pair(to, place % PAGE, x, x + size_t(m_.kv_heads) * d, own);
    }
  }

  struct Angles {
    const float *cosines, *sines;
  };

  Angles angles_at(const Layer& l, int position) const {
    const size_t at = size_t(position) * (m_.rotary_dims / 2);
    return {(l.local ? m_.local_cosines : m_.cosines) + at, (l.local ? m_.local_sines : m_.sines) + at};
  }

  // Keys have a few large channels, on which a scale per token would spend its steps. A Hadamard
  // transform, not normalized, of queries and keys spreads them, and leaves the scores as they are.
  void spread_head(float* x) {
    spread(x, m_.dims_padded);
    for (int i = 0; i < m_.dims_padded; i += LANES) {
      Floats v = load<Floats>(x + i);
      v = butterfly<8>(v);
      v = butterfly<4>(v);
      v = butterfly<2>(v);
      store(x + i, butterfly<1>(v));
    }
  }

  template <int WIDTH>
  static Floats butterfly(Floats v) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Floats other = __builtin_shuffle(v, lane ^ WIDTH);
    return (lane & WIDTH) != 0 ? other - v : v + other;
  }

  void put_query(uint16_t* to, const float* x) {
    const int mixed = m_.int8_pages ? m_.dims_padded & -m_.dims_padded : 1;
    const float scale = m_.query_scale / mixed;
    for (int i = 0; i < m_.dims_padded; i += LANES) store(to + i, to_bf16(load<Floats>(x + i) * scale));
  }

  // Key and value of one token. `own` is scratch.
  void put_pair(uint8_t* page, int slot, const float* key, const float* value, float* own) {
    const int d = m_.dims_padded;
    if (m_.int8_pages) {
      auto *bytes = reinterpret_cast<int8_t*>(own), *to = reinterpret_cast<int8_t*>(page);
      auto* scales = reinterpret_cast<float*>(page + size_t(2) * d * PAGE);
      quantize(key, d, d, d, bytes, scales + slot);
      quantize(value, d, d, d, bytes + d, scales + PAGE + slot);
      for (int i = 0; i < d; i += LANES) put_lanes(to, slot, i, bytes + i, bytes + d + i);
      return;
    }
    for (int i = 0; i < d; i += LANES) {
      uint16_t k[LANES], v[LANES];
      store(k, to_bf16(load<Floats>(key + i)));
      store(v, to_bf16(load<Floats>(value + i)));
      put_lanes(reinterpret_cast<uint16_t*>(page), slot, i, k, v);
    }
  }

  template <class T>
  void put_lanes(T* keys, int slot, int dim, const T* k, const T* v) {
    const int d = m_.dims_padded;
    T* values = keys + size_t(d) * PAGE;
    for (int j = 0; j < LANES; j++) {
      keys[(dim + j) / 2 * 2 * PAGE + 2 * slot + j % 2] = k[j];
      values[slot / 2 * 2 * d + 2 * (dim + j) + slot % 2] = v[j];
    }
  }

  void rotate(float* x, const float* gain, const Angles& angles) {
    if (gain) {
      const float scale = inverse_rms(x, m_.dims, m_.dims_padded, m_.eps);
      for (int i = 0; i < m_.dims; i++) x[i] = x[i] * scale * gain[i];
    }
    const int half = m_.rotary_dims / 2;
    for (int i = 0; i < half; i++) {
      const float a = x[i], b = x[i + half];
      x[i] = a * angles.cosines[i] - b * angles.sines[i];
      x[i + half] = b * angles.cosines[i] + a * angles.sines[i];
    }
  }

  // The place of a span's first token among those that its table holds.
  static int in_view(const Span& span) { return span.position - span.dropped * PAGE; }

  size_t query_at(int kv_head, int row) const {
    return (size_t(kv_head) * step_->rows + row) * group() * m_.dims_padded;
  }

  float* attended(int kv_head, int row) {
    return attended_.get() + query_at(kv_head, row);
  }

  uint8_t* pages(int layer, int kv_head) {
    return m_.pages + (size_t(layer) * m_.kv_heads + kv_head) * page_bytes();
  }

  void attend_task(int layer, const Task& task, int rank) {
    const Span& span = step_->span[task.span];
    const int row = span.row + task.first;
    AttentionTile t;
    t.kv = {pages(layer, task.kv_head), page_stride(), step_->tables + span.table, m_.dims_padded,
            m_.int8_pages};
    t.queries = queries_.get() + query_at(task.kv_head, row);
    t.sink_queries = layers_[layer].sinks ? sink_queries_.get() + query_at(task.kv_head, row) : nullptr;
    t.rows = task.rows * group();
    t.heads = group();
    t.position = in_view(span) + task.first;
    t.window = layers_[layer].window;
    t.sinks = layers_[layer].sinks;
    t.cap = m_.attention_cap;
    t.out = attended(task.kv_head, row);
    t.out_stride = m_.dims_padded;
    t.scores = own_[rank].scores.get();
    t.weights = own_[rank].weights.get();
    t.widened = own_[rank].widened.get();
    attend(t);
  }

  void gather(int row, const Matrix& w, int rank) {
    float* x = own_[rank].row.get();
    const size_t count = size_t(group()) * m_.dims_padded;
    for (int head = 0; head < m_.kv_heads; head++)
      std::memcpy(x + head * count, attended(head, row), count * sizeof(float));
    quantize_row(x, m_.kv_heads * count, row, w);
  }

  void gate(int row, const Matrix& w, int rank) {
    const float* gates = wide_.get() + row * apart<float>(2 * m_.inner_padded);
    const float* ups = gates + m_.inner_padded;
    float* y = own_[rank].row.get();
    for (int i = 0; i < m_.inner_padded; i += LANES) {
      const Floats g = load<Floats>(gates + i);
      Floats turned = g;
      if (m_.gelu) turned = 1.5957691216f * (g + 0.044715f * g * g * g);  // 2 sqrt(2 / pi)
      store(y + i, g * sigmoid(turned) * load<Floats>(ups + i));
    }
    spread(y, m_.inner_padded);
    quantize_row(y, m_.inner_padded, row, w);
  }

  // --- phases ---

  void multiply(int layer, Phase phase, int rank, const Matrix& w, float* y, size_t stride, bool add) {
    const Activations x = activations(w);
    run_parts(part(layer, phase), rank, phase, [&](int task) {
      product(w, task * PART, x, step_->rows, {y, stride, add});
    });
  }

  void multiply_into_hidden(int layer, Phase phase, int rank, const Matrix& w, const float* post_norm) {
    float* y = post_norm ? wide_.get() : hidden_.get();
    multiply(layer, phase, rank, w, y, hidden_stride(), !post_norm);
  }

  template <class F>
  void each(int layer, Phase phase, int rank, const F& work) {
    run_parts(part(layer, phase), rank, phase, work);
  }

  template <class F>
  void run_parts(Parts& parts, int rank, Phase phase, const F& work) {
    for (int i; (i = parts.take(rank)) >= 0;) work(i);
    team_.barrier();
    if (rank == 0) {
      const auto now = std::chrono::steady_clock::now();
      seconds[phase] += std::chrono::duration<double>(now - clock_).count();
      clock_ = now;
    }
  }

  Parts& part(int layer, int phase) { return parts_[size_t(layer) * HEAD + phase]; }

  static int padded(int count) { return (count + 63) / 64 * 64; }

  const Model m_;
  std::vector<Layer> layers_;
  Team team_;
  std::vector<Parts> parts_;
  std::vector<Own> own_;
  const Step* step_ = nullptr;    // of the call that runs
  const Logits* asked_ = nullptr;
  std::vector<int> places_;  // row -> its span
  std::vector<Task> tasks_;
  std::vector<Best> best_;  // [sampled][parts of the head]
  Buffer<float> hidden_, wide_, attended_, scales_;
  Buffer<uint16_t> queries_, sink_queries_;
  Buffer<int8_t> bytes_;
  std::chrono::steady_clock::time_point clock_;
};

}  // namespace

extern "C" {

// Once per process, before anything else: 0, or the error of a system that does not lend its matrix
// unit.
int shoal_begin() {
#ifdef __AMX_INT8__
  const int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) return errno;
#endif
  return 0;
}

// For memory that nobody has written to yet. A system without large pages does not mind.
void shoal_large_pages(void* memory, size_t bytes) { in_large_pages(memory, bytes); }

void* shoal_open(const Model* model, int threads) { return new Decoder(*model, threads); }

// These two: 0, or an error number (no memory). All memory is taken before anything is computed.
int shoal_forward(void* decoder, const Step* step) {
  try {
    static_cast<Decoder*>(decoder)->forward(*step);
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  }
  return 0;
}


int shoal_logits(void* decoder, const Logits* asked) {
  try {
    static_cast<Decoder*>(decoder)->logits(*asked);
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  }
  return 0;
}

void shoal_seconds(void* decoder, double* seconds) {
  std::memcpy(seconds, static_cast<Decoder*>(decoder)->seconds, sizeof Decoder::seconds);
}

// --- single operations, for tests ---

// y [rows][out] = x [rows][in] times a packed matrix; x and y padded as the matrix is.
void shoal_linear(const Matrix* w, const float* x, int rows, float* y) {
  const size_t groups = w->in / w->group, room = (rows + 31) / 32 * 32;
  Buffer<int8_t> bytes;
  Buffer<float> scales;
  const size_t stride = apart<int8_t>(w->in);
  const Activations a = {bytes.room(room * stride), scales.room(room * groups), stride, groups};
  for (int row = 0; row < rows; row++)
    quantize(x + size_t(row) * w->in, w->in, w->in, w->group, a.bytes + row * stride,
             a.scales + row * groups);
  for (int part = 0; part < parts(*w); part++)
    product(*w, part * PART, a, rows, {y, size_t(w->out), false});
}

void shoal_attend(const AttentionTile* tile) { attend(*tile); }

// x [count], a multiple of 16, in place; 0 = exp, 1 = sigmoid, 2 = roughly_exp2.
void shoal_elementwise(int which, float* x, int count) {
  for (int i = 0; i < count; i += LANES) {
    const Floats v = load<Floats>(x + i);
    store(x + i, which == 0 ? exp(v) : which == 1 ? sigmoid(v) : roughly_exp2(v));
  }
}

void shoal_spread(float* x, int count) { spread(x, count); }

void shoal_close(void* decoder) { delete static_cast<Decoder*>(decoder); }
}
