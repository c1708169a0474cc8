// Products of bfloat16 rows with packed weights or keys, two values (a pair) of the inner dimension at a time.
//
// The right operand is packed in panels of PANEL columns: [columns / PANEL][inner / 2][PANEL][2], columns padded with
// zeros. An output element is one float32 accumulator that takes the pairs in ascending order, the odd value of a
// pair before the even one: neither the tile of rows and columns it is computed in nor the instruction set's lanes
// enter its bits. A build with another tile unit (AMX) replaces panel_tile for all callers.
#pragma once

#include <cstdlib>
#include <new>

#include "common.h"
#include "vec.h"

namespace outrider {

constexpr int PANEL = 16;               // columns of a panel
constexpr int STEP = 2 * PANEL;         // bfloat16 values of one pair of all its columns
constexpr int VECS = PANEL / Vec::W;    // vectors of a panel

#if !defined(__AVX512BF16__)
// The pair products of vec.h for instruction sets without them: widened to float32, two fused multiply-adds.
#if defined(__AVX512F__)
struct Pairs {
  __m512i v;
};
inline Pairs load_pairs(const bf16* p) { return {_mm512_loadu_si512(static_cast<const void*>(p))}; }
inline Pairs splat_pair(std::uint32_t pair) { return {_mm512_set1_epi32(static_cast<int>(pair))}; }
inline Vec odd_values(Pairs a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline Vec even_values(Pairs a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
#else
struct Pairs {
  __m256i v;
};
inline Pairs load_pairs(const bf16* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline Pairs splat_pair(std::uint32_t pair) { return {_mm256_set1_epi32(static_cast<int>(pair))}; }
inline Vec odd_values(Pairs a) {
  return {_mm256_castsi256_ps(_mm256_and_si256(a.v, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline Vec even_values(Pairs a) { return {_mm256_castsi256_ps(_mm256_slli_epi32(a.v, 16))}; }
#endif
inline Vec dot_pairs(Vec acc, Pairs a, Pairs b) {
  return fma(even_values(a), even_values(b), fma(odd_values(a), odd_values(b), acc));
}
#endif

// W bfloat16 values as bits.
#if defined(__AVX512F__)
using HalfBits = __m256i;
inline void store_bits(bf16* p, HalfBits bits) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bits); }
#else
using HalfBits = __m128i;
inline void store_bits(bf16* p, HalfBits bits) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bits); }
#endif

// As narrow, for values whose denormals mean nothing: the instruction that rounds in one step makes them zero.
inline HalfBits narrow_normal(Vec a) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(a.v);
#else
  return narrow(a);
#endif
}

inline std::uint32_t load_pair(const bf16* p) {
  std::uint32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return pair;
}

// out[q][c] = (accumulate ? out[q][c] : 0) + rows[q] . column c, for Q rows and NP panels that follow each other.
template <int Q, int NP>
inline void panel_tile(const bf16* const* rows, const bf16* panels, std::int64_t num_pairs, float* const* out,
                       std::int64_t first_column, bool accumulate) {
  constexpr int N = NP * VECS;
  const std::int64_t panel_size = num_pairs * STEP;
  Vec acc[Q][N];
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) acc[q][n] = accumulate ? load(out[q] + first_column + n * Vec::W) : zero();
  }
  for (std::int64_t p = 0; p < num_pairs; ++p) {
    Pairs b[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      b[n] = load_pairs(panels + (n / VECS) * panel_size + p * STEP + (n % VECS) * 2 * Vec::W);
    }
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
      Pairs a = splat_pair(load_pair(rows[q] + 2 * p));
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) acc[q][n] = dot_pairs(acc[q][n], a, b[n]);
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) store(out[q] + first_column + n * Vec::W, acc[q][n]);
  }
}

// Accumulators that a tile may hold: half of the registers, the rest are operands.
constexpr int MAX_ACCUMULATORS = Vec::W == 16 ? 16 : 8;

template <int Q, int NP>
inline void panel_run(const bf16* const* rows, const bf16*& panels, std::int64_t num_pairs, std::int64_t& num_panels,
                      float* const* out, std::int64_t& column, bool accumulate) {
  if constexpr (Q * NP * VECS <= MAX_ACCUMULATORS || NP == 1) {
    for (; num_panels >= NP; num_panels -= NP) {
      panel_tile<Q, NP>(rows, panels, num_pairs, out, column, accumulate);
      panels += NP * num_pairs * STEP;
      column += NP * PANEL;
    }
  }
}

template <int Q>
inline void panel_rows(const bf16* const* rows, const bf16* panels, std::int64_t num_pairs, std::int64_t num_panels,
                       float* const* out, bool accumulate) {
  std::int64_t column = 0;
  panel_run<Q, 8>(rows, panels, num_pairs, num_panels, out, column, accumulate);
  panel_run<Q, 4>(rows, panels, num_pairs, num_panels, out, column, accumulate);
  panel_run<Q, 2>(rows, panels, num_pairs, num_panels, out, column, accumulate);
  panel_run<Q, 1>(rows, panels, num_pairs, num_panels, out, column, accumulate);
}

// out[r][0 .. num_panels * PANEL) = (accumulate ? itself : 0) + rows[r] . columns, for any number of rows.
inline void multiply_panels(const bf16* const* rows, std::int64_t num_rows, const bf16* panels, std::int64_t num_pairs,
                            std::int64_t num_panels, float* const* out, bool accumulate) {
  std::int64_t r = 0;
  for (; r + 4 <= num_rows; r += 4) panel_rows<4>(rows + r, panels, num_pairs, num_panels, out + r, accumulate);
  for (; r + 2 <= num_rows; r += 2) panel_rows<2>(rows + r, panels, num_pairs, num_panels, out + r, accumulate);
  for (; r < num_rows; ++r) panel_rows<1>(rows + r, panels, num_pairs, num_panels, out + r, accumulate);
}

// Memory of one thread that grows and is kept. Contents are not.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  T* at_least(std::int64_t count) {
    if (count > size_) {
      std::free(data_);
      std::size_t bytes = static_cast<std::size_t>(ceil_div(count * static_cast<std::int64_t>(sizeof(T)), 64)) * 64;
      data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = count;
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  std::int64_t size_ = 0;
};

}  // namespace outrider
