// Kimi Delta Attention: one layer on decode and verify rows or on prompt rows, and the commit of all layers.
//
// Per head and row, with S the state [value, key] before the row (k3-architecture sections 5.2 to 5.6):
//   q, k, v = bf(silu(conv(inputs)));  q, k l2-normalised;  d = exp(gate);  beta = sigmoid(.)
//   u = beta (v - S (d k));  o = (S (d q) + (k.q) u) D^-1/2;  S <- fma(u, k, S d)
// The last line is the one update of stepping, verifying and committing: the product with d rounds, then the outer
// product is added fused. A step keeps its states to itself and logs u, k, d; the commit repeats the line. A prompt
// writes its last state to the seat and logs nothing.
//
// The recurrence has its lanes over values, so each sum over keys runs in one order, whatever the lanes: even keys,
// odd keys, then both. Value rows are independent of each other, heads and sequences too; threads split those.
#include "parallel.h"
#include "vec.h"

#include <cmath>
#include <cstdlib>
#include <initializer_list>

namespace outrider {
namespace {

constexpr int W = Vec::W;
constexpr int VECTORS = 2;  // of values that go through the keys together
constexpr int BLOCK = VECTORS * W;
constexpr int TILE = 8;  // of the transposition
constexpr std::int64_t PIECE = 16;  // prompt rows between two visits of the seat; where a prompt is cut is not seen
constexpr float L2_EPS = 1e-6f;

// One layer's parameters; mirrored in outrider/ops/native/kda.py.
struct Layer {
  const float* taps_JC;  // tap j of all channels; the last multiplies the current token
  const float* rate_H;   // exp(A_log)
  const float* dt_bias_HD;
  const float* o_norm_D;
  std::int64_t num_heads, width, num_taps;
  float lower_bound;
  std::int32_t is_bounded;
  float eps;    // of the output norm
  float scale;  // width^-1/2, as the caller rounds it
};

// Rows of a call, columns contiguous.
struct Rows {
  const bf16* inputs;
  const bf16* gate;
  const bf16* forget;
  const bf16* beta;
  std::int64_t inputs_stride, gate_stride, forget_stride, beta_stride;
};

// Seats and log, of one layer for a step and of all layers for a commit; mirrored.
struct Seats {
  float* state_BHDD;
  bf16* window_BXC;
  float* u_RHD;
  float* k_RHD;
  float* decay_RHD;
  bf16* inputs_RC;
  std::int64_t num_layers, num_seats, num_rows;  // rows: capacity of the log
};

// Memory of a thread that grows and is kept.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  float* take(std::int64_t count) {
    if (count > capacity_) {
      std::free(data_);
      std::size_t bytes = static_cast<std::size_t>(ceil_div(count * 4, 64) * 64);
      data_ = static_cast<float*>(std::aligned_alloc(64, bytes));
      if (data_ == nullptr) std::abort();  // no exception may cross the C interface
      capacity_ = count;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  std::int64_t capacity_ = 0;
};

thread_local Scratch scratch;

// log(1 + t) for 0 <= t <= 1, about 2 ulp: 2 artanh(s) with s = t / (2 + t) <= 1/3, Taylor to s^15.
inline Vec log1p_unit(Vec t) {
  Vec s = t / (splat(2.0f) + t);
  Vec z = s * s;
  Vec p = splat(1.0f / 15.0f);
  p = fma(p, z, splat(1.0f / 13.0f));
  p = fma(p, z, splat(1.0f / 11.0f));
  p = fma(p, z, splat(1.0f / 9.0f));
  p = fma(p, z, splat(1.0f / 7.0f));
  p = fma(p, z, splat(1.0f / 5.0f));
  p = fma(p, z, splat(1.0f / 3.0f));
  Vec twice = s + s;
  return fma(p * z, twice, twice);
}

// log(1 + exp(x)) without overflow
inline Vec softplus(Vec x) { return max(x, zero()) + log1p_unit(exp(neg(abs(x)))); }

inline Vec rounded(Vec a) { return widen(narrow(a)); }

inline float sigmoid_of(float x) {
  float result;
  store_n(&result, sigmoid(splat(x)), 1);
  return result;
}

template <class T>
inline Vec load_up_to(const T* p, int n) {
  return n == W ? load(p) : load_n(p, n);
}

template <class T>
inline void store_up_to(T* p, Vec a, int n) {
  n == W ? store(p, a) : store_n(p, a, n);
}

inline int lanes_from(std::int64_t c, std::int64_t width) { return static_cast<int>(min64(W, width - c)); }

inline __m256i tile_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// Columns of 8 rows from 8 columns; rows from num_rows on and columns from num_columns on count as zero and are
// not read. out[j] gets the first num_stored rows of column j for j < num_columns.
inline void transpose_tile(const float* in, std::int64_t in_stride, int num_rows, int num_columns, float* out,
                           std::int64_t out_stride, int num_stored) {
  __m256 r[TILE];
  __m256i columns = tile_lanes(num_columns), stored = tile_lanes(num_stored);
  for (int i = 0; i < TILE; ++i) {
    if (i >= num_rows) {
      r[i] = _mm256_setzero_ps();
    } else {
      const float* row = in + i * in_stride;
      r[i] = num_columns >= TILE ? _mm256_loadu_ps(row) : _mm256_maskload_ps(row, columns);
    }
  }
  __m256 pairs[TILE], fours[TILE];
  for (int i = 0; i < TILE; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < TILE; i += 4) {
    fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  auto put = [&](int j, __m256 column) {
    if (j >= num_columns) return;
    num_stored >= TILE ? _mm256_storeu_ps(out + j * out_stride, column)
                       : _mm256_maskstore_ps(out + j * out_stride, stored, column);
  };
  for (int j = 0; j < 4; ++j) {
    put(j, _mm256_permute2f128_ps(fours[j], fours[j + 4], 0x20));
    put(j + 4, _mm256_permute2f128_ps(fours[j], fours[j + 4], 0x31));
  }
}

// One head of one sequence. Arrays of rows are padded to whole vectors of keys or whole blocks of values.
struct Head {
  const Layer& layer;
  const Rows& rows;
  const Seats& seats;
  const std::int64_t* row_M = nullptr;  // rows of the call
  std::int64_t slot = 0, head = 0, length = 0;
  bool is_prompt = false;
  std::int64_t begin = 0;  // row of the span that row 0 of the arrays is
  std::int64_t channels, key_stride, value_stride;
  float *turned = nullptr, *q = nullptr, *k = nullptr, *decay = nullptr, *decayed_k = nullptr, *decayed_q = nullptr;
  float *v = nullptr, *u = nullptr, *o = nullptr, *beta = nullptr, *overlap = nullptr;

  Head(const Layer& of_layer, const Rows& of_rows, const Seats& of_seats)
      : layer(of_layer),
        rows(of_rows),
        seats(of_seats),
        channels(3 * of_layer.num_heads * of_layer.width),
        key_stride(ceil_div(of_layer.width, W) * W),
        value_stride(ceil_div(of_layer.width, BLOCK) * BLOCK) {}

  static std::int64_t scratch_size(std::int64_t width, std::int64_t num_rows) {
    std::int64_t keys = ceil_div(width, W) * W, values = ceil_div(width, BLOCK) * BLOCK;
    return width * BLOCK + num_rows * (5 * keys + 3 * values + 2);
  }

  void lay_out(float* memory, std::int64_t num_rows) {
    turned = memory;
    float* next = memory + layer.width * BLOCK;
    for (float** keys : {&q, &k, &decay, &decayed_k, &decayed_q}) {
      *keys = next;
      next += num_rows * key_stride;
    }
    for (float** values : {&v, &u, &o}) {
      *values = next;
      next += num_rows * value_stride;
    }
    beta = next;
    overlap = next + num_rows;
  }

  // Input i of the span, i >= -(taps - 1): before the span it is in the carried window.
  const bf16* input(std::int64_t i, std::int64_t channel) const {
    if (i >= 0) return rows.inputs + row_M[i] * rows.inputs_stride + channel;
    std::int64_t carried = layer.num_taps - 1;
    return seats.window_BXC + (slot * carried + carried + i) * channels + channel;
  }

  // Convolution and SiLU of one stream (0 q, 1 k, 2 v), one rounding to bfloat16.
  void convolve(std::int64_t stream, std::int64_t m, float* out) const {
    std::int64_t base = (stream * layer.num_heads + head) * layer.width, last = layer.num_taps - 1;
    std::int64_t oldest = begin + m - last;
    for (std::int64_t c = 0; c < layer.width; c += W) {
      int n = lanes_from(c, layer.width);
      std::int64_t channel = base + c;
      Vec sum = load_up_to(input(oldest, channel), n) * load_up_to(layer.taps_JC + channel, n);
      for (std::int64_t j = 1; j <= last; ++j) {
        Vec tap = load_up_to(layer.taps_JC + j * channels + channel, n);
        sum = fma(load_up_to(input(oldest + j, channel), n), tap, sum);
      }
      store(out + c, rounded(sum * sigmoid(sum)));
    }
  }

  void l2_normalise(float* x) const {
    Vec sum = zero();
    for (std::int64_t c = 0; c < layer.width; c += W) {
      Vec part = load(x + c);
      sum = fma(part, part, sum);
    }
    Vec inverse = splat(1.0f / std::sqrt(reduce_add(sum) + L2_EPS));
    for (std::int64_t c = 0; c < layer.width; c += W) store(x + c, load(x + c) * inverse);
  }

  void make_decay(std::int64_t m, float* out) const {
    const bf16* raw = rows.forget + row_M[begin + m] * rows.forget_stride + head * layer.width;
    const float* bias = layer.dt_bias_HD + head * layer.width;
    Vec rate = splat(layer.rate_H[head]), bound = splat(layer.lower_bound);
    for (std::int64_t c = 0; c < layer.width; c += W) {
      int n = lanes_from(c, layer.width);
      Vec biased = load_up_to(raw + c, n) + load_up_to(bias + c, n);
      Vec log_decay = layer.is_bounded ? bound * sigmoid(rate * biased) : neg(rate) * softplus(biased);
      store(out + c, exp(log_decay));
    }
  }

  // All that does not depend on the state.
  void prepare_row(std::int64_t m) const {
    std::int64_t width = layer.width;
    float *q_m = q + m * key_stride, *k_m = k + m * key_stride, *v_m = v + m * value_stride;
    float* decay_m = decay + m * key_stride;
    convolve(0, m, q_m);
    convolve(1, m, k_m);
    for (std::int64_t c = key_stride; c < value_stride; ++c) v_m[c] = 0.0f;
    convolve(2, m, v_m);
    l2_normalise(q_m);
    l2_normalise(k_m);
    make_decay(m, decay_m);
    Vec sum = zero();
    for (std::int64_t c = 0; c < width; c += W) {
      Vec key = load(k_m + c), query = load(q_m + c), factor = load(decay_m + c);
      sum = fma(key, query, sum);
      store(decayed_k + m * key_stride + c, factor * key);
      store(decayed_q + m * key_stride + c, factor * query);
    }
    overlap[m] = reduce_add(sum);
    beta[m] = sigmoid_of(to_float(rows.beta[row_M[begin + m] * rows.beta_stride + head]));
  }

  void log_row(std::int64_t m) const {
    std::int64_t width = layer.width, log = (row_M[m] * layer.num_heads + head) * width;
    std::size_t bytes = sizeof(float) * static_cast<std::size_t>(width);
    std::memcpy(seats.u_RHD + log, u + m * value_stride, bytes);
    std::memcpy(seats.k_RHD + log, k + m * key_stride, bytes);
    std::memcpy(seats.decay_RHD + log, decay + m * key_stride, bytes);
    for (std::int64_t stream = 0; stream < 3; ++stream) {
      std::int64_t channel = (stream * layer.num_heads + head) * width;
      std::memcpy(seats.inputs_RC + row_M[m] * channels + channel, input(m, channel), bytes / 2);
    }
  }

  // Values first..first + BLOCK of the state, keys by rows.
  void turn(std::int64_t first) const {
    std::int64_t width = layer.width;
    const float* state = seats.state_BHDD + ((slot * layer.num_heads + head) * width + first) * width;
    for (std::int64_t value = 0; value < BLOCK; value += TILE) {
      int num_rows = static_cast<int>(max64(0, min64(TILE, width - first - value)));
      for (std::int64_t key = 0; key < width; key += TILE) {
        int num_columns = static_cast<int>(min64(TILE, width - key));
        transpose_tile(
            state + value * width + key, width, num_rows, num_columns, turned + key * BLOCK + value, BLOCK, TILE);
      }
    }
  }

  // Advance the state by the last of num_rows rows and put it back.
  void turn_back(std::int64_t first, std::int64_t num_rows, const Vec (&u_block)[VECTORS]) const {
    std::int64_t width = layer.width;
    const float *k_last = k + (num_rows - 1) * key_stride, *decay_last = decay + (num_rows - 1) * key_stride;
    for (std::int64_t key = 0; key < width; ++key) {
      for (int i = 0; i < VECTORS; ++i) {
        float* place = turned + key * BLOCK + i * W;
        store(place, fma(u_block[i], splat(k_last[key]), load(place) * splat(decay_last[key])));
      }
    }
    float* state = seats.state_BHDD + ((slot * layer.num_heads + head) * width + first) * width;
    for (std::int64_t value = 0; value < min64(BLOCK, width - first); value += TILE) {
      int num_values = static_cast<int>(min64(TILE, width - first - value));
      for (std::int64_t key = 0; key < width; key += TILE) {
        int num_keys = static_cast<int>(min64(TILE, width - key));
        transpose_tile(turned + key * BLOCK + value, BLOCK, num_keys, num_values, state + value * width + key, width,
                       num_keys);
      }
    }
  }

  // u and o of one row for a block of values. IS_LATER: first advance the state by the row before.
  template <bool IS_LATER, bool IS_KEPT>
  void advance(std::int64_t m, const float* k_before, const float* decay_before, Vec (&u_block)[VECTORS],
               std::int64_t first) const {
    const float *k_m = decayed_k + m * key_stride, *q_m = decayed_q + m * key_stride;
    Vec read_k[2][VECTORS], read_q[2][VECTORS];
    for (int parity = 0; parity < 2; ++parity) {
      for (int i = 0; i < VECTORS; ++i) read_k[parity][i] = read_q[parity][i] = zero();
    }
    auto one_key = [&](std::int64_t key, Vec(&sum_k)[VECTORS], Vec(&sum_q)[VECTORS]) {
      for (int i = 0; i < VECTORS; ++i) {
        float* place = turned + key * BLOCK + i * W;
        Vec state = load(place);
        if (IS_LATER) {
          state = fma(u_block[i], splat(k_before[key]), state * splat(decay_before[key]));
          if (IS_KEPT) store(place, state);
        }
        sum_k[i] = fma(state, splat(k_m[key]), sum_k[i]);
        sum_q[i] = fma(state, splat(q_m[key]), sum_q[i]);
      }
    };
    std::int64_t key = 0;
    for (; key + 2 <= layer.width; key += 2) {
      one_key(key, read_k[0], read_q[0]);
      one_key(key + 1, read_k[1], read_q[1]);
    }
    if (key < layer.width) one_key(key, read_k[0], read_q[0]);
    for (int i = 0; i < VECTORS; ++i) {
      std::int64_t at = m * value_stride + first + i * W;
      u_block[i] = splat(beta[m]) * (load(v + at) - (read_k[0][i] + read_k[1][i]));
      store(u + at, u_block[i]);
      store(o + at, fma(splat(overlap[m]), u_block[i], read_q[0][i] + read_q[1][i]));
    }
  }

  void recur(std::int64_t first, std::int64_t num_rows) const {
    turn(first);
    Vec u_block[VECTORS];
    for (int i = 0; i < VECTORS; ++i) u_block[i] = zero();
    advance<false, false>(0, nullptr, nullptr, u_block, first);
    for (std::int64_t m = 1; m < num_rows; ++m) {
      const float *k_before = k + (m - 1) * key_stride, *decay_before = decay + (m - 1) * key_stride;
      if (is_prompt || m + 1 < num_rows) {
        advance<true, true>(m, k_before, decay_before, u_block, first);
      } else {
        advance<true, false>(m, k_before, decay_before, u_block, first);
      }
    }
    if (is_prompt) turn_back(first, num_rows, u_block);
  }

  // Round the output, norm and gate it.
  void finish_row(std::int64_t m, bf16* out) const {
    std::int64_t width = layer.width, row = row_M[begin + m], place = (row * layer.num_heads + head) * width;
    const bf16* gate = rows.gate + row * rows.gate_stride + head * width;
    float* o_m = o + m * value_stride;
    Vec sum = zero(), scale = splat(layer.scale);
    for (std::int64_t c = 0; c < width; c += W) {
      Vec part = rounded(load(o_m + c) * scale);
      store(o_m + c, part);
      // Lanes behind the width hold values of a state that is not there: zero, so they add nothing.
      sum = fma(part, part, sum);
    }
    Vec inverse = splat(1.0f / std::sqrt(reduce_add(sum) / static_cast<float>(width) + layer.eps));
    for (std::int64_t c = 0; c < width; c += W) {
      int n = lanes_from(c, width);
      Vec normed = load(o_m + c) * inverse * load_up_to(layer.o_norm_D + c, n);
      store_up_to(out + place + c, normed * sigmoid(load_up_to(gate + c, n)), n);
    }
  }

  void piece(std::int64_t num_rows, bf16* out) const {
    for (std::int64_t m = 0; m < num_rows; ++m) prepare_row(m);
    for (std::int64_t first = 0; first < layer.width; first += BLOCK) recur(first, num_rows);
    for (std::int64_t m = 0; m < num_rows; ++m) finish_row(m, out);
  }

  void run_step(bf16* out) {
    begin = 0;
    piece(length, out);
    for (std::int64_t m = 0; m < length; ++m) log_row(m);
  }

  void run_prompt(bf16* out) {
    for (begin = 0; begin < length; begin += PIECE) piece(min64(PIECE, length - begin), out);
    carry_inputs();
  }

  // The carried inputs of the head's channels after the span; ascending x reads nothing that was written before.
  void carry_inputs() const {
    std::int64_t carried = layer.num_taps - 1;
    for (std::int64_t x = 0; x < carried; ++x) {
      for (std::int64_t stream = 0; stream < 3; ++stream) {
        std::int64_t channel = (stream * layer.num_heads + head) * layer.width;
        std::memmove(seats.window_BXC + (slot * carried + x) * channels + channel, input(length - carried + x, channel),
                     sizeof(bf16) * static_cast<std::size_t>(layer.width));
      }
    }
  }
};

// ROWS value rows of a state, NUM vectors of keys, through the committed rows; `n` lanes of the last vector live.
template <int ROWS, int NUM>
inline void fold(float* state, std::int64_t width, int n, const std::int64_t* row_M, std::int64_t num_committed,
                 std::int64_t row_stride, const float* u, const float* k, const float* decay) {
  auto lanes = [n](int i) { return i + 1 < NUM ? W : n; };
  Vec held[ROWS][NUM];
  for (int r = 0; r < ROWS; ++r) {
    for (int i = 0; i < NUM; ++i) held[r][i] = load_up_to(state + r * width + i * W, lanes(i));
  }
  for (std::int64_t m = 0; m < num_committed; ++m) {
    std::int64_t row = row_M[m] * row_stride;
    for (int i = 0; i < NUM; ++i) {
      Vec key = load_up_to(k + row + i * W, lanes(i)), factor = load_up_to(decay + row + i * W, lanes(i));
      for (int r = 0; r < ROWS; ++r) held[r][i] = fma(splat(u[row + r]), key, held[r][i] * factor);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int i = 0; i < NUM; ++i) store_up_to(state + r * width + i * W, held[r][i], lanes(i));
  }
}

constexpr int FOLD_ROWS = 4;

// One head of one sequence and layer: its state, and the log at its head and key (k, decay) or value (u) 0.
struct Fold {
  float* state;
  const float *u, *k, *decay;
  const std::int64_t* row_M;
  std::int64_t width, row_stride, num_committed;

  template <int NUM>
  void columns(std::int64_t c, int n) const {
    std::int64_t value = 0;
    for (; value + FOLD_ROWS <= width; value += FOLD_ROWS) {
      fold<FOLD_ROWS, NUM>(state + value * width + c, width, n, row_M, num_committed, row_stride, u + value, k + c,
                           decay + c);
    }
    for (; value < width; ++value) {
      fold<1, NUM>(state + value * width + c, width, n, row_M, num_committed, row_stride, u + value, k + c, decay + c);
    }
  }

  void run() const {
    std::int64_t c = 0;
    for (; c + VECTORS * W <= width; c += VECTORS * W) columns<VECTORS>(c, W);
    for (; c < width; c += W) columns<1>(c, lanes_from(c, width));
  }
};

Fold fold_of(const Seats& seats, std::int64_t num_heads, std::int64_t width, std::int64_t layer_index,
             std::int64_t slot, std::int64_t head, const std::int64_t* row_M, std::int64_t num_committed) {
  std::int64_t row_stride = num_heads * width;
  std::int64_t log = layer_index * seats.num_rows * row_stride + head * width;
  float* state = seats.state_BHDD + ((layer_index * seats.num_seats + slot) * num_heads + head) * width * width;
  return Fold{state, seats.u_RHD + log, seats.k_RHD + log, seats.decay_RHD + log, row_M, width, row_stride,
              num_committed};
}

// The carried inputs after num_committed rows: entry x of the new window is entry num_committed + x of window and
// inputs in a row. Ascending x reads nothing that was written before.
void shift_window(const Seats& seats, std::int64_t carried, std::int64_t channels, std::int64_t layer_index,
                  std::int64_t slot, const std::int64_t* row_M, std::int64_t num_committed) {
  bf16* window = seats.window_BXC + (layer_index * seats.num_seats + slot) * carried * channels;
  const bf16* inputs = seats.inputs_RC + layer_index * seats.num_rows * channels;
  for (std::int64_t x = 0; x < carried; ++x) {
    std::int64_t from = num_committed + x;
    const bf16* source = from < carried ? window + from * channels : inputs + row_M[from - carried] * channels;
    std::memcpy(window + x * channels, source, sizeof(bf16) * static_cast<std::size_t>(channels));
  }
}

}  // namespace

// Prompt rows (is_prompt) or decode and verify rows of one layer. valid_SM (bytes) tells the length of each span,
// rows_SM its rows, of the call and the log.
OUTRIDER_API void outrider_kda_rows(const Layer* layer, const Seats* seats, const bf16* inputs, const bf16* gate,
                                    const bf16* forget, const bf16* beta, std::int64_t inputs_stride,
                                    std::int64_t gate_stride, std::int64_t forget_stride, std::int64_t beta_stride,
                                    const std::int64_t* slots_S, const std::int64_t* rows_SM,
                                    const std::uint8_t* valid_SM, std::int64_t num_sequences, std::int64_t max_length,
                                    std::int64_t num_rows, std::int64_t is_prompt, bf16* out_TI,
                                    std::int64_t num_threads) {
  Rows rows{inputs, gate, forget, beta, inputs_stride, gate_stride, forget_stride, beta_stride};
  std::int64_t num_heads = layer->num_heads, width = layer->width;
  std::int64_t work = num_rows * num_heads * width * width, count = num_sequences * num_heads;
  std::int64_t held_rows = is_prompt ? min64(PIECE, max_length) : max_length;
  parallel_ranges(static_cast<int>(num_threads), count, 1, work, [&](std::int64_t begin, std::int64_t end) {
    float* memory = scratch.take(Head::scratch_size(width, held_rows));
    for (std::int64_t task = begin; task < end; ++task) {
      std::int64_t sequence = task / num_heads, length = 0;
      const std::uint8_t* valid_M = valid_SM + sequence * max_length;
      while (length < max_length && valid_M[length]) ++length;
      if (length == 0) continue;
      Head head(*layer, rows, *seats);
      head.row_M = rows_SM + sequence * max_length;
      head.slot = slots_S[sequence];
      head.head = task % num_heads;
      head.length = length;
      head.is_prompt = is_prompt != 0;
      head.lay_out(memory, held_rows);
      is_prompt ? head.run_prompt(out_TI) : head.run_step(out_TI);
    }
  });
}
OUTRIDER_OP(kda_rows)

// All layers: fold the first num_committed_S rows of each span into state and window of its seat.
OUTRIDER_API void outrider_kda_commit(const Seats* seats, std::int64_t num_heads, std::int64_t width,
                                      std::int64_t carried, const std::int64_t* slots_S, const std::int64_t* rows_SM,
                                      const std::int64_t* num_committed_S, std::int64_t num_sequences,
                                      std::int64_t max_length, std::int64_t num_threads) {
  std::int64_t count = seats->num_layers * num_sequences * num_heads;
  parallel_ranges(static_cast<int>(num_threads), count, 1, count * width * width, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t task = begin; task < end; ++task) {
      std::int64_t head = task % num_heads, sequence = task / num_heads % num_sequences;
      std::int64_t layer_index = task / num_heads / num_sequences, slot = slots_S[sequence];
      std::int64_t num_committed = max64(0, min64(num_committed_S[sequence], max_length));
      const std::int64_t* row_M = rows_SM + sequence * max_length;
      if (num_committed == 0) continue;
      fold_of(*seats, num_heads, width, layer_index, slot, head, row_M, num_committed).run();
      if (head == 0) {
        shift_window(*seats, carried, 3 * num_heads * width, layer_index, slot, row_M, num_committed);
      }
    }
  });
}
OUTRIDER_OP(kda_commit)

}  // namespace outrider
