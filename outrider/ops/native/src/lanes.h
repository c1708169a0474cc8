// Softmax attention with queries in vector lanes: keys are read where they lie, nothing but the queries is packed.
//
// Up to LANES queries that see the same keys form a block. A key's scores are one vector of lanes: the pair of two
// neighbouring values of the key, in all lanes, times that pair of every query. So maximum, exponential and sum run
// down the keys, lane by lane, and a last tile of few keys costs as few. Tiles of KEYS keys are taken in ascending
// order with a running maximum (online softmax: Milakov, Gimelshein 2018, arXiv 1805.02867).
//
// Rounding, per query: products accumulate in float32, in ascending order of pairs; 2^(score - maximum so far) is
// rounded to bfloat16, and those rounded weights are summed (float32) as well as multiplied with the values. The
// result is values / sum, plus +0 so that a zero has one sign. A hidden key has weight zero, and NaN or infinite
// values count as zero, since 0 * NaN is NaN where the weight is a hidden key's; where such a key is visible its
// score says so. A lane's bits depend on its query and on the keys only.
#pragma once

#include <cfloat>

#include "common.h"
#include "pairs.h"
#include "tiles.h"
#include "vec.h"

namespace outrider {

constexpr int KEYS = 64;   // of a tile; even
constexpr int LANES = 32;  // queries of a block: two panels
constexpr float LOG2_E = 1.44269504088896341f;

namespace detail {

#if defined(__AVX512F__)
inline __m512i bits_of(Vec a) { return _mm512_castps_si512(a.v); }
// Rounded to the nearest bfloat16, ties to even, in the upper half of each lane; for numbers that are no denormals.
inline __m512i rounded_bits(Vec a) {
  __m512i bits = bits_of(a);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  bits = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  return _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
}
inline Vec as_values(__m512i bits) { return {_mm512_castsi512_ps(bits)}; }
// One bfloat16 pair per lane, the first value in the lower half.
inline void store_pairs(bf16* p, __m512i first, __m512i second) {
  _mm512_storeu_si512(static_cast<void*>(p), _mm512_or_si512(_mm512_srli_epi32(first, 16), second));
}
#else
inline __m256i rounded_bits(Vec a) {
  __m256i bits = _mm256_castps_si256(a.v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  bits = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  return _mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
}
inline Vec as_values(__m256i bits) { return {_mm256_castsi256_ps(bits)}; }
inline void store_pairs(bf16* p, __m256i first, __m256i second) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_or_si256(_mm256_srli_epi32(first, 16), second));
}
#endif

// 2^t for t of at most about 0, within 5e-5 of it (Taylor, degree 4), which is a tenth of what rounding to bfloat16
// loses; 0 below 2^-126, NaN for NaN.
inline Vec weight_of(Vec t) {
  Vec bounded = max(splat(-127.0f), t);
  Vec n = round_even(bounded);
  Vec f = bounded - n;
  Vec p = fma(splat(9.6181291e-3f), f, splat(5.5504109e-2f));
  p = fma(p, f, splat(2.4022651e-1f));
  p = fma(p, f, splat(6.9314718e-1f));
  p = fma(p, f, splat(1.0f));
  return where_less(bounded, splat(-126.0f), zero(), scale_by_power(p, n));
}

}  // namespace detail

// The keys of a tile and their values: where their rows lie.
struct Tile {
  const bf16 *keys[KEYS], *values[KEYS];
  int count = 0;

  // Bring rows first..last - 1, which will be read soon, as near as does not displace what is in use.
  void prefetch_keys(std::int64_t first, std::int64_t last, std::int64_t width) const {
    prefetch(keys, first, last, width);
  }
  void prefetch_values(std::int64_t first, std::int64_t last, std::int64_t width) const {
    prefetch(values, first, last, width);
  }

 private:
  void prefetch(const bf16* const* rows, std::int64_t first, std::int64_t last, std::int64_t width) const {
    for (std::int64_t row = first; row < last && row < count; ++row) {
      for (std::int64_t at = 0; at < width; at += 64 / static_cast<int>(sizeof(bf16))) {
        _mm_prefetch(reinterpret_cast<const char*>(rows[row] + at), _MM_HINT_T1);
      }
    }
  }
};

// Attention of the queries of one key head of one sequence. One per thread.
class LaneAttention {
 public:
  // Room for queries of `width` values, an even number.
  void start(std::int64_t num_queries, std::int64_t width) {
    width_ = width;
    num_pairs_ = width / 2;
    num_queries_ = num_queries;
    num_blocks_ = ceil_div(num_queries, LANES);
    stride_ = round_up(width, STAGE);
    stage_ = stage_buffer_.at_least(num_blocks_ * LANES * stride_);
    packed_ = packed_buffer_.at_least(num_blocks_ * 2 * stride_ / 2 * STEP);
    sums_ = sum_buffer_.at_least(num_blocks_ * stride_ * LANES);
    std::memset(sums_, 0, sizeof(float) * static_cast<std::size_t>(num_blocks_ * stride_ * LANES));
    maximum_ = maximum_buffer_.at_least(num_blocks_ * LANES);
    total_ = total_buffer_.at_least(num_blocks_ * LANES);
    for (std::int64_t lane = 0; lane < num_blocks_ * LANES; ++lane) {
      maximum_[lane] = -FLT_MAX;  // finite: a query that sees no key of a tile then gives it weights of zero
      total_[lane] = 0.0f;
    }
    scores_ = score_buffer_.at_least(KEYS * LANES);
    weights_ = weight_buffer_.at_least(KEYS * LANES);
    values_ = value_buffer_.at_least(KEYS * stride_);
  }

  // Where a query goes, before pack_queries.
  bf16* query_row(std::int64_t query) { return stage_ + query * stride_; }

  void pack_queries() {
    for (std::int64_t q = num_queries_; q < num_blocks_ * LANES; ++q) {
      std::memset(query_row(q), 0, sizeof(bf16) * static_cast<std::size_t>(width_));
    }
    for (std::int64_t panel = 0; panel < 2 * num_blocks_; ++panel) {
      // What lies behind a row's width becomes padding behind the panel's pairs.
      for (std::int64_t pair = 0; pair < num_pairs_; pair += PANEL) {
        detail::transpose_pairs(query_row(panel * PANEL) + 2 * pair, stride_,
                                packed_ + (panel * stride_ / 2 + pair) * STEP);
      }
    }
  }

  // Take in the keys of a tile. Query q sees keys lowest[q]..highest[q] - 1 of it; null: all queries see all. The rows
  // of the next tile come nearer meanwhile, a few at a time: the processor waits for no more than a few dozen.
  void attend(const Tile& tile, const Tile& next, const float* lowest, const float* highest, float scale) {
    pack_values(tile.values, tile.count);
    for (std::int64_t block = 0; block < num_blocks_; ++block) {
      const std::int64_t lane = block * LANES;
      const float* low = lowest == nullptr ? nullptr : lowest + lane;
      const float* high = highest == nullptr ? nullptr : highest + lane;
      if (num_queries_ - lane <= PANEL) {
        attend_block<1>(block, tile, block == 0 ? next : Tile(), low, high, scale);
      } else {
        attend_block<2>(block, tile, block == 0 ? next : Tile(), low, high, scale);
      }
    }
  }

  // store(query, its attended values in bfloat16): `width` of them are meant.
  template <class Store>
  void results(Store&& store_query) {
    for (std::int64_t panel = 0; panel < 2 * num_blocks_; ++panel) {
      const std::int64_t first = panel * PANEL, count = min64(PANEL, num_queries_ - first);
      if (count <= 0) break;
      const float* sums = sums_ + panel / 2 * stride_ * LANES + panel % 2 * PANEL;
      Vec total[VECS];
      for (int v = 0; v < VECS; ++v) total[v] = load(total_ + first + v * Vec::W);
      alignas(64) bf16 pairs[PANEL * STEP], rows[PANEL * STEP];
      for (std::int64_t column = 0; column < width_; column += STAGE) {
        for (int pair = 0; pair < PANEL; ++pair) {
          const float* even = sums + (column + 2 * pair) * LANES;
          for (int v = 0; v < VECS; ++v) {
            detail::store_pairs(pairs + pair * STEP + 2 * v * Vec::W,
                                detail::rounded_bits(load(even + v * Vec::W) / total[v] + zero()),
                                detail::rounded_bits(load(even + LANES + v * Vec::W) / total[v] + zero()));
          }
        }
        detail::transpose_pairs(pairs, STEP, rows);
        for (std::int64_t q = 0; q < count; ++q) {
          std::memcpy(stage_ + (first + q) * stride_ + column, rows + q * STEP, sizeof(bf16) * STAGE);
        }
      }
      for (std::int64_t q = 0; q < count; ++q) store_query(first + q, stage_ + (first + q) * stride_);
    }
  }

 private:
  // Rows 2 i and 2 i + 1 as pairs of neighbouring columns; a missing last row counts as the one before it, whose
  // weight is zero there.
  void pack_values(const bf16* const* values, int count) {
    alignas(64) bf16 even[STAGE], odd[STAGE], pairs[2 * STEP];
    for (int key = 0; key < count; key += 2) {
      const bf16 *first = values[key], *second = values[key + 1 < count ? key + 1 : key];
      bf16* out = values_ + key * stride_;
      std::int64_t column = 0;
      for (; column + STAGE <= width_; column += STAGE) {
        detail::interleave(first + column, second + column, out + 2 * column, STEP);
      }
      if (column < width_) {
        std::size_t bytes = sizeof(bf16) * static_cast<std::size_t>(width_ - column);
        std::memset(even, 0, sizeof even);
        std::memset(odd, 0, sizeof odd);
        std::memcpy(even, first + column, bytes);
        std::memcpy(odd, second + column, bytes);
        detail::interleave(even, odd, pairs, STEP);
        std::memcpy(out + 2 * column, pairs, 2 * sizeof(bf16) * STAGE);
      }
    }
  }

  template <int NP>
  void attend_block(std::int64_t block, const Tile& tile, const Tile& next, const float* lowest, const float* highest,
                    float scale) {
    constexpr int AT_ONCE = MAX_ACCUMULATORS / (NP * VECS);
    const bf16* queries = packed_ + block * stride_ * STEP;
    for (int first = 0; first < tile.count; first += AT_ONCE) {
      const int last = static_cast<int>(min64(first + AT_ONCE, tile.count));
      next.prefetch_keys(first, last, width_);
      score_keys<NP, AT_ONCE>(queries, tile.keys, first, last);
    }
    Vec factors[NP * VECS];
    weigh<NP>(block, tile.count, lowest, highest, scale, factors);
    for (std::int64_t first = 0; first < width_; first += AT_ONCE) {
      const std::int64_t last = min64(first + AT_ONCE, width_);
      next.prefetch_values(KEYS * first / width_, KEYS * last / width_, width_);
      add_values<NP, AT_ONCE>(block, tile.count, factors, first, last);
    }
  }

  // Scores of keys first..count - 1, KB at a time, then fewer.
  template <int NP, int KB>
  void score_keys(const bf16* queries, const bf16* const* keys, int first, int count) {
    constexpr int N = NP * VECS;
    for (; first + KB <= count; first += KB) {
      const bf16* key[KB];
      Vec acc[KB][N];
      OUTRIDER_UNROLL
      for (int k = 0; k < KB; ++k) {
        key[k] = keys[first + k];
        OUTRIDER_UNROLL
        for (int n = 0; n < N; ++n) acc[k][n] = zero();
      }
      for (std::int64_t p = 0; p < num_pairs_; ++p) {
        Pairs query[N];
        OUTRIDER_UNROLL
        for (int n = 0; n < N; ++n) {
          query[n] = load_pairs(queries + (n / VECS * stride_ / 2 + p) * STEP + n % VECS * 2 * Vec::W);
        }
        OUTRIDER_UNROLL
        for (int k = 0; k < KB; ++k) {
          Pairs pair = splat_pair(load_pair(key[k] + 2 * p));
          OUTRIDER_UNROLL
          for (int n = 0; n < N; ++n) acc[k][n] = dot_pairs(acc[k][n], query[n], pair);
        }
      }
      OUTRIDER_UNROLL
      for (int k = 0; k < KB; ++k) {
        OUTRIDER_UNROLL
        for (int n = 0; n < N; ++n) store(scores_ + (first + k) * LANES + n * Vec::W, acc[k][n]);
      }
    }
    if constexpr (KB > 1) {
      if (first < count) score_keys<NP, KB / 2>(queries, keys, first, count);
    }
  }

  // Scores to rounded weights; what the sums so far are worth now goes to `factors`.
  template <int NP>
  void weigh(std::int64_t block, int count, const float* lowest, const float* highest, float scale, Vec* factors) {
    const Vec hidden = splat(-__builtin_inff()), base = splat(scale * LOG2_E);
    for (int n = 0; n < NP * VECS; ++n) {
      float* scores = scores_ + n * Vec::W;
      if (lowest != nullptr) {
        const Vec low = load(lowest + n * Vec::W), high = load(highest + n * Vec::W);
        for (int k = 0; k < count; ++k) {
          const Vec key = splat(static_cast<float>(k));
          Vec seen = where_less(key, high, load(scores + k * LANES), hidden);
          store(scores + k * LANES, where_less(key, low, hidden, seen));
        }
      }
      Vec first = hidden, second = hidden;
      for (int k = 0; k + 1 < count; k += 2) {
        first = max(load(scores + k * LANES), first);
        second = max(load(scores + (k + 1) * LANES), second);
      }
      if (count % 2 != 0) {
        first = max(load(scores + (count - 1) * LANES), first);
        if (count < KEYS) store(scores + count * LANES, hidden);
      }
      float* maximum = maximum_ + block * LANES + n * Vec::W;
      float* total = total_ + block * LANES + n * Vec::W;
      const Vec before = load(maximum), now = max(max(first, second) * base, before);
      Vec even = zero(), odd = zero();
      for (int k = 0; k < count; k += 2) {
        const Vec a = detail::weight_of(fma(load(scores + k * LANES), base, neg(now)));
        const Vec b = detail::weight_of(fma(load(scores + (k + 1) * LANES), base, neg(now)));
        const auto a_bits = detail::rounded_bits(a), b_bits = detail::rounded_bits(b);
        even = even + detail::as_values(a_bits);
        odd = odd + detail::as_values(b_bits);
        detail::store_pairs(weights_ + k * LANES + 2 * n * Vec::W, a_bits, b_bits);
      }
      factors[n] = detail::weight_of(before - now);
      store(total, fma(load(total), factors[n], even + odd));
      store(maximum, now);
    }
  }

  // Columns first..last - 1 of the weighted values, CB at a time, then fewer.
  template <int NP, int CB>
  void add_values(std::int64_t block, int count, const Vec* factors, std::int64_t first, std::int64_t last) {
    constexpr int N = NP * VECS;
    for (; first + CB <= last; first += CB) {
      float* sums = sums_ + (block * stride_ + first) * LANES;
      Vec acc[CB][N];
      OUTRIDER_UNROLL
      for (int c = 0; c < CB; ++c) {
        OUTRIDER_UNROLL
        for (int n = 0; n < N; ++n) acc[c][n] = load(sums + c * LANES + n * Vec::W) * factors[n];
      }
      for (int k = 0; k < count; k += 2) {
        Pairs weight[N];
        OUTRIDER_UNROLL
        for (int n = 0; n < N; ++n) weight[n] = load_pairs(weights_ + k * LANES + 2 * n * Vec::W);
        const bf16* value = values_ + k * stride_ + 2 * first;
        OUTRIDER_UNROLL
        for (int c = 0; c < CB; ++c) {
          Pairs pair = splat_pair(load_pair(value + 2 * c));
          OUTRIDER_UNROLL
          for (int n = 0; n < N; ++n) acc[c][n] = dot_pairs(acc[c][n], weight[n], pair);
        }
      }
      OUTRIDER_UNROLL
      for (int c = 0; c < CB; ++c) {
        OUTRIDER_UNROLL
        for (int n = 0; n < N; ++n) store(sums + c * LANES + n * Vec::W, acc[c][n]);
      }
    }
    if constexpr (CB > 1) {
      if (first < last) add_values<NP, CB / 2>(block, count, factors, first, last);
    }
  }

  std::int64_t num_queries_ = 0, num_blocks_ = 0, width_ = 0, num_pairs_ = 0, stride_ = 0;
  bf16 *stage_ = nullptr, *packed_ = nullptr, *weights_ = nullptr, *values_ = nullptr;
  float *sums_ = nullptr, *maximum_ = nullptr, *total_ = nullptr, *scores_ = nullptr;
  Buffer<bf16> stage_buffer_, packed_buffer_, weight_buffer_, value_buffer_;
  Buffer<float> sum_buffer_, maximum_buffer_, total_buffer_, score_buffer_;
};

}  // namespace outrider
