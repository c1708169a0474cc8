// Kimi Delta Attention: one layer on decode and verify rows or on prompt rows, and the commit of all layers.
//
// Per head and row, with S the state [value, key] before the row (k3-architecture sections 5.2 to 5.6):
//   q, k, v = bf(silu(conv(inputs)));  q, k l2-normalised;  d = exp(gate);  beta = sigmoid(.)
//   u = beta (v - S (d k));  o = (S (d q) + (k.q) u) D^-1/2;  S <- fma(u, k, S d)
// The last line is the one update of stepping, verifying and committing: the product with d rounds, then the outer
// product is added fused. A step keeps its states to itself and logs u, k, d; the commit repeats the line. A prompt
// writes its last state to the seat and logs nothing.
//
// A seat holds the state as [key, value], transposed to that of the torch forms: lanes run over values, so each sum
// over keys has one order, whatever the lanes: even keys, odd keys, then both. Heads and sequences are independent;
// threads split those. The first row of a step reads the seat itself, later ones a copy that stays in the nearest cache.
#include "pairs.h"
#include "parallel.h"
#include "vec.h"

#include <cmath>
#include <cstdlib>
#include <initializer_list>

namespace outrider {
namespace {

constexpr int W = Vec::W;
constexpr int VECTORS = W == 16 ? 4 : 2;  // of values that go through the keys together
constexpr int BLOCK = VECTORS * W;
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
  float* state_BHDD;  // [.., key, value]
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

// Rounded to bfloat16; what is too small for a normal one becomes zero or stays, as the instruction set has it.
inline Vec rounded_normal(Vec a) { return widen(narrow_normal(a)); }

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

// One head of one sequence. Arrays of rows are padded to whole vectors.
struct Head {
  const Layer& layer;
  const Rows& rows;
  const Seats& seats;
  const std::int64_t* row_M = nullptr;  // rows of the call
  std::int64_t slot = 0, head = 0, length = 0;
  bool is_prompt = false;
  std::int64_t begin = 0;  // row of the span that row 0 of the arrays is
  std::int64_t channels, stride;
  float *copy = nullptr, *q = nullptr, *k = nullptr, *decay = nullptr, *decayed_k = nullptr, *decayed_q = nullptr;
  float *v = nullptr, *u = nullptr, *o = nullptr, *beta = nullptr, *overlap = nullptr;

  Head(const Layer& of_layer, const Rows& of_rows, const Seats& of_seats)
      : layer(of_layer),
        rows(of_rows),
        seats(of_seats),
        channels(3 * of_layer.num_heads * of_layer.width),
        stride(ceil_div(of_layer.width, W) * W) {}

  static std::int64_t scratch_size(std::int64_t width, std::int64_t num_rows) {
    return width * BLOCK + num_rows * (8 * ceil_div(width, W) * W + 2);
  }

  void lay_out(float* memory, std::int64_t num_rows) {
    copy = memory;
    float* next = memory + layer.width * BLOCK;
    for (float** array : {&q, &k, &decay, &decayed_k, &decayed_q, &v, &u, &o}) {
      *array = next;
      next += num_rows * stride;
    }
    beta = next;
    overlap = next + num_rows;
  }

  float* state() const {
    return seats.state_BHDD + (slot * layer.num_heads + head) * layer.width * layer.width;
  }

  void fetch_state() const { prefetch(state(), 4 * layer.width * layer.width); }

  // Input i of the span, i >= -(taps - 1): before the span it is in the carried window.
  const bf16* input(std::int64_t i, std::int64_t channel) const {
    if (i >= 0) return rows.inputs + row_M[i] * rows.inputs_stride + channel;
    std::int64_t carried = layer.num_taps - 1;
    return seats.window_BXC + (slot * carried + carried + i) * channels + channel;
  }

  // Convolution and SiLU of the three streams of the first num_rows rows, one rounding to bfloat16. TAPS 0: as many as
  // the layer has; else an input is widened once and slides past the taps.
  template <int TAPS>
  void convolve(std::int64_t num_rows) const {
    float* const outs[3] = {q, k, v};
    for (std::int64_t stream = 0; stream < 3; ++stream) {
      for (std::int64_t c = 0; c < layer.width; c += W) {
        const int n = lanes_from(c, layer.width);
        const std::int64_t channel = (stream * layer.num_heads + head) * layer.width + c;
        auto tap = [&](std::int64_t j) { return load_up_to(layer.taps_JC + j * channels + channel, n); };
        auto finish = [&](std::int64_t m, Vec sum) {
          store(outs[stream] + m * stride + c, rounded_normal(sum * sigmoid(sum)));
        };
        if constexpr (TAPS > 0) {
          Vec taps[TAPS], held[TAPS];
          for (int j = 0; j < TAPS; ++j) taps[j] = tap(j);
          for (int j = 1; j < TAPS; ++j) held[j] = load_up_to(input(begin - TAPS + j, channel), n);
          for (std::int64_t m = 0; m < num_rows; ++m) {
            for (int j = 1; j < TAPS; ++j) held[j - 1] = held[j];
            held[TAPS - 1] = load_up_to(input(begin + m, channel), n);
            Vec sum = held[0] * taps[0];
            for (int j = 1; j < TAPS; ++j) sum = fma(held[j], taps[j], sum);
            finish(m, sum);
          }
        } else {
          const std::int64_t last = layer.num_taps - 1;
          for (std::int64_t m = 0; m < num_rows; ++m) {
            Vec sum = load_up_to(input(begin + m - last, channel), n) * tap(0);
            for (std::int64_t j = 1; j <= last; ++j) {
              sum = fma(load_up_to(input(begin + m - last + j, channel), n), tap(j), sum);
            }
            finish(m, sum);
          }
        }
      }
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

  // All that does not depend on the state; after the convolution.
  void prepare_row(std::int64_t m) const {
    std::int64_t width = layer.width;
    float *q_m = q + m * stride, *k_m = k + m * stride, *decay_m = decay + m * stride;
    l2_normalise(q_m);
    l2_normalise(k_m);
    make_decay(m, decay_m);
    Vec sum = zero();
    for (std::int64_t c = 0; c < width; c += W) {
      Vec key = load(k_m + c), query = load(q_m + c), factor = load(decay_m + c);
      sum = fma(key, query, sum);
      store(decayed_k + m * stride + c, factor * key);
      store(decayed_q + m * stride + c, factor * query);
    }
    overlap[m] = reduce_add(sum);
    beta[m] = sigmoid_of(to_float(rows.beta[row_M[begin + m] * rows.beta_stride + head]));
  }

  void log_row(std::int64_t m) const {
    std::int64_t width = layer.width, log = (row_M[m] * layer.num_heads + head) * width;
    std::size_t bytes = sizeof(float) * static_cast<std::size_t>(width);
    std::memcpy(seats.u_RHD + log, u + m * stride, bytes);
    std::memcpy(seats.k_RHD + log, k + m * stride, bytes);
    std::memcpy(seats.decay_RHD + log, decay + m * stride, bytes);
    for (std::int64_t stream = 0; stream < 3; ++stream) {
      std::int64_t channel = (stream * layer.num_heads + head) * width;
      std::memcpy(seats.inputs_RC + row_M[m] * channels + channel, input(m, channel), bytes / 2);
    }
  }

  // u and o of row m for NUM vectors of values, of which n lanes of the last one live. IS_LATER: first advance the
  // state by the row before; IS_KEPT: and store it to `to`.
  template <bool IS_LATER, bool IS_KEPT, int NUM>
  void advance(std::int64_t m, std::int64_t first, int n, const float* from, std::int64_t from_stride,
               float* to) const {
    const float *k_m = decayed_k + m * stride, *q_m = decayed_q + m * stride;
    const float *k_before = k + (m - 1) * stride, *decay_before = decay + (m - 1) * stride;
    Vec u_before[NUM], read_k[2][NUM], read_q[2][NUM];
    OUTRIDER_UNROLL
    for (int i = 0; i < NUM; ++i) {
      if (IS_LATER) u_before[i] = load(u + (m - 1) * stride + first + i * W);
      read_k[0][i] = read_k[1][i] = read_q[0][i] = read_q[1][i] = zero();
    }
    auto one_key = [&](std::int64_t key, Vec(&sum_k)[NUM], Vec(&sum_q)[NUM]) {
      // In registers before anything is stored: the compiler cannot know that `to` is none of these arrays.
      const Vec by_k = splat(k_m[key]), by_q = splat(q_m[key]);
      const Vec add = IS_LATER ? splat(k_before[key]) : zero(), keep = IS_LATER ? splat(decay_before[key]) : zero();
      OUTRIDER_UNROLL
      for (int i = 0; i < NUM; ++i) {
        Vec state = load_up_to(from + key * from_stride + i * W, i + 1 < NUM ? W : n);
        if (IS_LATER) {
          state = fma(u_before[i], add, state * keep);
          if (IS_KEPT) store(to + key * NUM * W + i * W, state);
        }
        sum_k[i] = fma(state, by_k, sum_k[i]);
        sum_q[i] = fma(state, by_q, sum_q[i]);
      }
    };
    std::int64_t key = 0;
    for (; key + 2 <= layer.width; key += 2) {
      one_key(key, read_k[0], read_q[0]);
      one_key(key + 1, read_k[1], read_q[1]);
    }
    if (key < layer.width) one_key(key, read_k[0], read_q[0]);
    OUTRIDER_UNROLL
    for (int i = 0; i < NUM; ++i) {
      std::int64_t at = m * stride + first + i * W;
      Vec u_m = splat(beta[m]) * (load(v + at) - (read_k[0][i] + read_k[1][i]));
      store(u + at, u_m);
      store(o + at, fma(splat(overlap[m]), u_m, read_q[0][i] + read_q[1][i]));
    }
  }

  // Advance the state by row m and put it into the seat.
  template <int NUM>
  void put_back(std::int64_t m, std::int64_t first, int n, const float* from, std::int64_t from_stride) const {
    const float *k_m = k + m * stride, *decay_m = decay + m * stride, *u_m = u + m * stride + first;
    for (std::int64_t key = 0; key < layer.width; ++key) {
      OUTRIDER_UNROLL
      for (int i = 0; i < NUM; ++i) {
        const int lanes = i + 1 < NUM ? W : n;
        Vec decayed = load_up_to(from + key * from_stride + i * W, lanes) * splat(decay_m[key]);
        store_up_to(state() + key * layer.width + first + i * W, fma(load(u_m + i * W), splat(k_m[key]), decayed), lanes);
      }
    }
  }

  // All rows for NUM vectors of values from first on.
  template <int NUM>
  void recur(std::int64_t first, int n, std::int64_t num_rows) const {
    const float* from = state() + first;
    std::int64_t from_stride = layer.width;
    advance<false, false, NUM>(0, first, n, from, from_stride, nullptr);
    for (std::int64_t m = 1; m < num_rows; ++m) {
      if (is_prompt || m + 1 < num_rows) {
        advance<true, true, NUM>(m, first, n, from, from_stride, copy);
        from = copy;
        from_stride = NUM * W;
      } else {
        advance<true, false, NUM>(m, first, n, from, from_stride, nullptr);
      }
    }
    if (is_prompt) put_back<NUM>(num_rows - 1, first, n, from, from_stride);
  }

  // Round the output, norm and gate it.
  void finish_row(std::int64_t m, bf16* out) const {
    std::int64_t width = layer.width, row = row_M[begin + m], place = (row * layer.num_heads + head) * width;
    const bf16* gate = rows.gate + row * rows.gate_stride + head * width;
    float* o_m = o + m * stride;
    Vec sum = zero(), scale = splat(layer.scale);
    for (std::int64_t c = 0; c < width; c += W) {
      Vec part = rounded_normal(load(o_m + c) * scale);
      store(o_m + c, part);
      // Lanes behind the width hold values of a state that is not there: zero, so they add nothing.
      sum = fma(part, part, sum);
    }
    Vec inverse = splat(1.0f / std::sqrt(reduce_add(sum) / static_cast<float>(width) + layer.eps));
    for (std::int64_t c = 0; c < width; c += W) {
      int n = lanes_from(c, width);
      Vec normed = load(o_m + c) * inverse * load_up_to(layer.o_norm_D + c, n);
      Vec gated = normed * sigmoid(load_up_to(gate + c, n));
      n == W ? store_bits(out + place + c, narrow_normal(gated)) : store_n(out + place + c, rounded_normal(gated), n);
    }
  }

  void piece(std::int64_t num_rows, bf16* out) const {
    layer.num_taps == 4 ? convolve<4>(num_rows) : convolve<0>(num_rows);
    for (std::int64_t m = 0; m < num_rows; ++m) prepare_row(m);
    std::int64_t first = 0;
    for (; first + BLOCK <= layer.width; first += BLOCK) recur<VECTORS>(first, W, num_rows);
    for (; first < layer.width; first += W) recur<1>(first, lanes_from(first, layer.width), num_rows);
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

// KEYS keys of a state, NUM vectors of values, through the committed rows; `n` lanes of the last vector live.
template <int KEYS, int NUM>
inline void fold(float* state, std::int64_t width, int n, const std::int64_t* row_M, std::int64_t num_committed,
                 std::int64_t row_stride, const float* u, const float* k, const float* decay) {
  auto lanes = [n](int i) { return i + 1 < NUM ? W : n; };
  Vec held[KEYS][NUM];
  OUTRIDER_UNROLL
  for (int r = 0; r < KEYS; ++r) {
    OUTRIDER_UNROLL
    for (int i = 0; i < NUM; ++i) held[r][i] = load_up_to(state + r * width + i * W, lanes(i));
  }
  for (std::int64_t m = 0; m < num_committed; ++m) {
    std::int64_t row = row_M[m] * row_stride;
    Vec value[NUM];
    OUTRIDER_UNROLL
    for (int i = 0; i < NUM; ++i) value[i] = load_up_to(u + row + i * W, lanes(i));
    OUTRIDER_UNROLL
    for (int r = 0; r < KEYS; ++r) {
      Vec key = splat(k[row + r]), factor = splat(decay[row + r]);
      OUTRIDER_UNROLL
      for (int i = 0; i < NUM; ++i) held[r][i] = fma(value[i], key, held[r][i] * factor);
    }
  }
  OUTRIDER_UNROLL
  for (int r = 0; r < KEYS; ++r) {
    OUTRIDER_UNROLL
    for (int i = 0; i < NUM; ++i) store_up_to(state + r * width + i * W, held[r][i], lanes(i));
  }
}

constexpr int FOLD_KEYS = 4;

// One head of one sequence and layer: its state, and the log at its head and key (k, decay) or value (u) 0.
struct Fold {
  float* state;
  const float *u, *k, *decay;
  const std::int64_t* row_M;
  std::int64_t width, row_stride, num_committed;

  template <int NUM>
  void values(std::int64_t first, int n) const {
    std::int64_t key = 0;
    for (; key + FOLD_KEYS <= width; key += FOLD_KEYS) {
      fold<FOLD_KEYS, NUM>(state + key * width + first, width, n, row_M, num_committed, row_stride, u + first, k + key,
                           decay + key);
    }
    for (; key < width; ++key) {
      fold<1, NUM>(state + key * width + first, width, n, row_M, num_committed, row_stride, u + first, k + key,
                   decay + key);
    }
  }

  void run() const {
    std::int64_t first = 0;
    for (; first + BLOCK <= width; first += BLOCK) values<VECTORS>(first, W);
    for (; first < width; first += W) values<1>(first, lanes_from(first, width));
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
    Head head(*layer, rows, *seats);
    head.is_prompt = is_prompt != 0;
    head.lay_out(memory, held_rows);
    auto turn_to = [&](std::int64_t task) {
      head.slot = slots_S[task / num_heads];
      head.head = task % num_heads;
    };
    turn_to(begin);
    head.fetch_state();
    for (std::int64_t task = begin; task < end; ++task) {
      if (task + 1 < end) {  // the state of the next task comes while this one is computed
        turn_to(task + 1);
        head.fetch_state();
      }
      turn_to(task);
      const std::uint8_t* valid_M = valid_SM + task / num_heads * max_length;
      for (head.length = 0; head.length < max_length && valid_M[head.length];) ++head.length;
      if (head.length == 0) continue;
      head.row_M = rows_SM + task / num_heads * max_length;
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
