// Softmax attention of one sequence over key tiles at absolute positions, in bfloat16 products.
//
// A tile is TILE keys: their rows are copied next to each other, then packed twice, as columns of the score product
// and as rows of the value product; all queries of the sequence share that. Tiles are taken in ascending order with a
// running maximum (online softmax: Milakov, Gimelshein 2018, arXiv 1805.02867).
//
// Rounding, per query: products accumulate in float32; scores are scaled in float32; exp(score - maximum so far) is
// rounded to bfloat16, and those rounded weights are summed (float32) as well as multiplied with the values, so they
// still sum to one. The result is values / sum, plus +0 so that a zero has one sign.
//
// A key that a query does not see adds exact zeros to it, and a tile without any such key none at all: a query's bits
// do not depend on who else looks at the tile. Values that are NaN or infinite count as zero, since 0 * NaN is NaN
// where the weight is a hidden key's; where such a key is visible its score is NaN, or infinite, and says so.
#pragma once

#include <cfloat>

#include "common.h"
#include "pairs.h"
#include "vec.h"

namespace outrider {

constexpr int TILE = 64;        // keys of a tile; KEY_TILE of outrider/ops/paged.py, part of the numerics
constexpr int QUERY_BLOCK = 32; // queries whose scores are held at a time
constexpr int KEY_PANELS = TILE / PANEL;
constexpr int STAGE = 32;       // staged rows are padded to this many values

inline std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

namespace detail {

// Keys 0..15 of stage, pairs 0..15 of each: out[pair][key] as 32 bits, out rows STEP values apart.
#if defined(__AVX512F__)
inline void transpose_pairs(const bf16* stage, std::int64_t stride, bf16* out) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(static_cast<const void*>(stage + i * stride));
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {  // r[4 i + k]: pairs k, 4 + k, 8 + k, 12 + k of keys 4 i .. 4 i + 3
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int k = 0; k < 4; ++k) {
    __m512i low_even = _mm512_shuffle_i32x4(r[k], r[4 + k], 0x88);        // pairs k, 8 + k of keys 0..7
    __m512i low_odd = _mm512_shuffle_i32x4(r[k], r[4 + k], 0xdd);         // pairs 4 + k, 12 + k
    __m512i high_even = _mm512_shuffle_i32x4(r[8 + k], r[12 + k], 0x88);  // of keys 8..15
    __m512i high_odd = _mm512_shuffle_i32x4(r[8 + k], r[12 + k], 0xdd);
    _mm512_storeu_si512(out + k * STEP, _mm512_shuffle_i32x4(low_even, high_even, 0x88));
    _mm512_storeu_si512(out + (4 + k) * STEP, _mm512_shuffle_i32x4(low_odd, high_odd, 0x88));
    _mm512_storeu_si512(out + (8 + k) * STEP, _mm512_shuffle_i32x4(low_even, high_even, 0xdd));
    _mm512_storeu_si512(out + (12 + k) * STEP, _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd));
  }
}

// Columns 0..31 of two rows as pairs: two panels of 16 columns, `panel` values apart.
inline void interleave(const bf16* even, const bf16* odd, bf16* out, std::int64_t panel) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  __m512i a = _mm512_loadu_si512(static_cast<const void*>(even));
  __m512i b = _mm512_loadu_si512(static_cast<const void*>(odd));
  a = _mm512_maskz_mov_epi16(_mm512_cmpneq_epi16_mask(_mm512_and_si512(a, exponent), exponent), a);
  b = _mm512_maskz_mov_epi16(_mm512_cmpneq_epi16_mask(_mm512_and_si512(b, exponent), exponent), b);
  _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, low, b));
  _mm512_storeu_si512(out + panel, _mm512_permutex2var_epi16(a, high, b));
}
#else
inline void transpose_pairs(const bf16* stage, std::int64_t stride, bf16* out) {
  for (int half = 0; half < 2; ++half) {     // keys 8 half .. 8 half + 7
    for (int side = 0; side < 2; ++side) {   // pairs 8 side .. 8 side + 7
      __m256i r[8], t[8];
      for (int i = 0; i < 8; ++i) {
        r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(stage + (8 * half + i) * stride + 16 * side));
      }
      for (int i = 0; i < 4; ++i) {
        t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
      }
      for (int i = 0; i < 2; ++i) {  // r[4 i + k]: pairs k and 4 + k of keys 4 i .. 4 i + 3
        r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
      }
      for (int k = 0; k < 4; ++k) {
        bf16* low = out + (8 * side + k) * STEP + 16 * half;
        bf16* high = low + 4 * STEP;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm256_permute2x128_si256(r[k], r[4 + k], 0x20));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm256_permute2x128_si256(r[k], r[4 + k], 0x31));
      }
    }
  }
}

inline void interleave(const bf16* even, const bf16* odd, bf16* out, std::int64_t panel) {
  const __m256i exponent = _mm256_set1_epi16(0x7f80);
  for (int side = 0; side < 2; ++side) {
    __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + 16 * side));
    __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd + 16 * side));
    a = _mm256_andnot_si256(_mm256_cmpeq_epi16(_mm256_and_si256(a, exponent), exponent), a);
    b = _mm256_andnot_si256(_mm256_cmpeq_epi16(_mm256_and_si256(b, exponent), exponent), b);
    __m256i low = _mm256_unpacklo_epi16(a, b);   // columns 0..3 and 8..11
    __m256i high = _mm256_unpackhi_epi16(a, b);  // columns 4..7 and 12..15
    bf16* target = out + side * panel;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + 16), _mm256_permute2x128_si256(low, high, 0x31));
  }
}
#endif

}  // namespace detail

// One tile of keys and values, and the running softmax of the queries of one sequence. One per thread.
class TileAttention {
 public:
  // Room for a sequence; widths in values, the key width even. Without own values, the first columns of a key are
  // its value.
  void start(std::int64_t num_queries, std::int64_t key_width, std::int64_t value_width, bool own_values) {
    num_queries_ = num_queries;
    key_pairs_ = key_width / 2;
    own_values_ = own_values;
    key_stride_ = round_up(key_width, STAGE);
    value_stride_ = round_up(value_width, STAGE);
    keys_ = start_stage(key_stage_, key_width, key_stride_);
    values_ = own_values ? start_stage(value_stage_, value_width, value_stride_) : keys_;
    key_panels_ = key_panel_buffer_.at_least(TILE * key_stride_);
    value_panels_ = value_panel_buffer_.at_least(TILE * value_stride_);
    sums_ = sum_buffer_.at_least(num_queries * value_stride_);
    std::memset(sums_, 0, sizeof(float) * static_cast<std::size_t>(num_queries * value_stride_));
    maximum_ = maximum_buffer_.at_least(num_queries);
    total_ = total_buffer_.at_least(num_queries);
    for (std::int64_t q = 0; q < num_queries; ++q) {
      maximum_[q] = -FLT_MAX;  // finite: a tile of hidden keys then leaves exp(0) = 1 and changes nothing
      total_[q] = 0.0f;
    }
    scores_ = score_buffer_.at_least(QUERY_BLOCK * TILE);
    weights_ = weight_buffer_.at_least(QUERY_BLOCK * TILE);
  }

  // Where the rows of the next tile go; padding behind a row is zero and stays so.
  bf16* key_row(std::int64_t key) { return keys_ + key * key_stride_; }
  bf16* value_row(std::int64_t key) { return values_ + key * value_stride_; }

  // Rows first..TILE - 1 do not exist: zeros, which every query must have hidden.
  void clear_rows(std::int64_t first) {
    if (first >= TILE) return;
    std::size_t bytes = sizeof(bf16) * static_cast<std::size_t>(TILE - first);
    std::memset(key_row(first), 0, bytes * static_cast<std::size_t>(key_stride_));
    if (own_values_) std::memset(value_row(first), 0, bytes * static_cast<std::size_t>(value_stride_));
  }

  // After all rows are in place.
  void pack() {
    for (int panel = 0; panel < KEY_PANELS; ++panel) {
      bf16* out = key_panels_ + panel * key_pairs_ * STEP;
      // The last block may run into the next panel, which is written after it, or into the room behind the last one.
      for (std::int64_t pair = 0; pair < key_pairs_; pair += PANEL) {
        detail::transpose_pairs(key_row(panel * PANEL) + 2 * pair, key_stride_, out + pair * STEP);
      }
    }
    const std::int64_t stride = own_values_ ? value_stride_ : key_stride_;
    constexpr std::int64_t PANEL_SIZE = TILE / 2 * STEP;
    for (std::int64_t column = 0; column < value_stride_; column += STAGE) {
      bf16* out = value_panels_ + column / PANEL * PANEL_SIZE;
      for (int pair = 0; pair < TILE / 2; ++pair) {
        const bf16* even = values_ + 2 * pair * stride + column;
        detail::interleave(even, even + stride, out + pair * STEP, PANEL_SIZE);
      }
    }
  }

  // Take the packed tile in, for queries first..num_queries - 1. Query q sees keys lowest[q]..highest[q] - 1 of it.
  void attend(const bf16* const* queries, const int* lowest, const int* highest, float scale, std::int64_t first) {
    const std::int64_t value_panels = value_stride_ / PANEL;
    for (std::int64_t begin = first; begin < num_queries_; begin += QUERY_BLOCK) {
      std::int64_t count = min64(QUERY_BLOCK, num_queries_ - begin);
      float* score_rows[QUERY_BLOCK];
      const bf16* weight_rows[QUERY_BLOCK];
      float* sum_rows[QUERY_BLOCK];
      for (std::int64_t i = 0; i < count; ++i) {
        score_rows[i] = scores_ + i * TILE;
        weight_rows[i] = weights_ + i * TILE;
        sum_rows[i] = sums_ + (begin + i) * value_stride_;
      }
      multiply_panels(queries + begin, count, key_panels_, key_pairs_, KEY_PANELS, score_rows, false);
      for (std::int64_t i = 0; i < count; ++i) {
        float factor = weigh(begin + i, scores_ + i * TILE, weights_ + i * TILE, lowest[begin + i], highest[begin + i],
                             scale);
        if (factor != 1.0f) {  // times one would change no bit
          for (std::int64_t c = 0; c < value_stride_; c += Vec::W) {
            store(sum_rows[i] + c, load(sum_rows[i] + c) * splat(factor));
          }
        }
      }
      multiply_panels(weight_rows, count, value_panels_, TILE / 2, value_panels, sum_rows, true);
    }
  }

  // Attended values of a query, rounded to bfloat16.
  void result(std::int64_t query, bf16* out, std::int64_t value_width) const {
    const float* sum = sums_ + query * value_stride_;
    Vec total = splat(total_[query]);
    std::int64_t c = 0;
    for (; c + Vec::W <= value_width; c += Vec::W) store(out + c, load(sum + c) / total + zero());
    if (c < value_width) store_n(out + c, load(sum + c) / total + zero(), static_cast<int>(value_width - c));
  }

 private:
  static bf16* start_stage(Buffer<bf16>& buffer, std::int64_t width, std::int64_t stride) {
    bf16* rows = buffer.at_least(TILE * stride);
    std::size_t padding = sizeof(bf16) * static_cast<std::size_t>(stride - width);
    for (int row = 0; padding != 0 && row < TILE; ++row) std::memset(rows + row * stride + width, 0, padding);
    return rows;
  }

  // Scores to rounded weights; updates maximum and total; returns what earlier sums are worth now.
  float weigh(std::int64_t query, float* scores, bf16* weights, int lowest, int highest, float scale) {
    constexpr int N = TILE / Vec::W;
    alignas(64) static const float LANES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Vec hidden = splat(-__builtin_inff());
    Vec score[N], largest = hidden;
    for (int n = 0; n < N; ++n) {
      score[n] = load(scores + n * Vec::W) * splat(scale);
      if (highest < TILE || lowest > 0) {
        Vec key = load(LANES) + splat(static_cast<float>(n * Vec::W));
        score[n] = where_less(key, splat(static_cast<float>(highest)), score[n], hidden);
        score[n] = where_less(key, splat(static_cast<float>(lowest)), hidden, score[n]);
      }
      largest = max(largest, score[n]);
    }
    float before = maximum_[query], tile = reduce_max(largest);
    float now = tile > before ? tile : before;
    Vec sum = zero();
    for (int n = 0; n < N; ++n) {
      HalfBits weight = narrow_normal(exp(score[n] - splat(now)));
      store_bits(weights + n * Vec::W, weight);
      sum = sum + widen(weight);
    }
    float factor = 1.0f;
    if (now != before) {
      alignas(64) float factors[Vec::W];
      store(factors, exp(splat(before - now)));
      factor = factors[0];
    }
    total_[query] = total_[query] * factor + reduce_add(sum);
    maximum_[query] = now;
    return factor;
  }

  std::int64_t num_queries_ = 0, key_pairs_ = 0, key_stride_ = 0, value_stride_ = 0;
  bool own_values_ = false;
  bf16 *keys_ = nullptr, *values_ = nullptr, *key_panels_ = nullptr, *value_panels_ = nullptr, *weights_ = nullptr;
  float *sums_ = nullptr, *maximum_ = nullptr, *total_ = nullptr, *scores_ = nullptr;
  Buffer<bf16> key_stage_, value_stage_, key_panel_buffer_, value_panel_buffer_, weight_buffer_;
  Buffer<float> sum_buffer_, maximum_buffer_, total_buffer_, score_buffer_;
};

}  // namespace outrider
