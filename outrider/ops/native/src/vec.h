// A vector of W float lanes over the instruction set of this build: 16 lanes with AVX-512, 8 with AVX2.
//
// Every function treats each lane alike, so an element's bits do not depend on its lane, and a partial load or
// store (first n lanes) gives the bits of a whole one. Partial loads put zero into the other lanes and touch no
// memory behind the n elements. Reductions have one fixed order.
#pragma once

#include <immintrin.h>

#include "common.h"

namespace outrider {

#if defined(__AVX512F__)

struct Vec {
  static constexpr int W = 16;
  __m512 v;
};

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec splat(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store_n(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
inline Vec widen(__m256i bits) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))}; }
inline Vec load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec load_n(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
// W successive pairs, the first and the second of each.
inline void load_even_odd(const bf16* p, Vec& even, Vec& odd) {
  __m512i bits = _mm512_loadu_si512(static_cast<const void*>(p));
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Nearest, ties to even, as scalar to_bf16.
inline __m256i narrow(Vec a) {
#if defined(__AVX512BF16__)
  // The same in one instruction, but for denormals, which it takes for zeros.
  constexpr int DENORMAL = 0x20;
  if (__builtin_expect(_mm512_fpclass_ps_mask(a.v, DENORMAL) == 0, 1)) return (__m256i)_mm512_cvtneps_pbh(a.v);
#endif
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
inline void store(bf16* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }
inline void store_n(bf16* p, Vec a, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(a)); }

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }    // a b + c
inline Vec fnma(Vec a, Vec b, Vec c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a b
inline Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
inline Vec neg(Vec a) { return zero() - a; }
inline Vec round_even(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// yes where a < b, else no (also where either is NaN)
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
// Whether a < b in every lane; false where either is NaN.
inline bool all_less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ) == 0xffff; }
inline Vec where_nan(Vec a, Vec yes, Vec no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), no.v, yes.v)};
}
inline bool any_equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ) != 0; }
// a with the sign bit of b added (exclusive or)
inline Vec xor_sign(Vec a, Vec b) {
  __m512i sign = _mm512_and_si512(_mm512_castps_si512(b.v), _mm512_set1_epi32(INT32_MIN));
  return {_mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a.v), sign))};
}
// a 2^n for whole n
inline Vec scale_by_power(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }

namespace detail {
inline __m256 halves_added(__m512 v) {
  return _mm256_add_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
}
inline __m256 halves_max(__m512 v) {
  return _mm256_max_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
}
}  // namespace detail

#elif defined(__AVX2__)

struct Vec {
  static constexpr int W = 8;
  __m256 v;
};

namespace detail {
inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline __m256 halves_added(__m256 v) { return v; }
inline __m256 halves_max(__m256 v) { return v; }
}  // namespace detail

inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec splat(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec load_n(const float* p, int n) { return {_mm256_maskload_ps(p, detail::first_lanes(n))}; }
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline void store_n(float* p, Vec a, int n) { _mm256_maskstore_ps(p, detail::first_lanes(n), a.v); }
inline Vec widen(__m128i bits) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))}; }
inline Vec load(const bf16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load_n(const bf16* p, int n) {
  bf16 lanes[8] = {};
  std::memcpy(lanes, p, sizeof(bf16) * static_cast<std::size_t>(n));
  return load(lanes);
}
// W successive pairs, the first and the second of each.
inline void load_even_odd(const bf16* p, Vec& even, Vec& odd) {
  __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even.v = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  odd.v = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Nearest, ties to even, as scalar to_bf16.
inline __m128i narrow(Vec a) {
  __m256i bits = _mm256_castps_si256(a.v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  __m256i packed = _mm256_packus_epi32(rounded, rounded);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
inline void store(bf16* p, Vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(a)); }
inline void store_n(bf16* p, Vec a, int n) {
  bf16 lanes[8];
  store(lanes, a);
  std::memcpy(p, lanes, sizeof(bf16) * static_cast<std::size_t>(n));
}

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }    // a b + c
inline Vec fnma(Vec a, Vec b, Vec c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a b
inline Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }  // b where either is NaN
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline Vec neg(Vec a) { return zero() - a; }
inline Vec round_even(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// yes where a < b, else no (also where either is NaN)
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
// Whether a < b in every lane; false where either is NaN.
inline bool all_less(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)) == 0xff; }
inline Vec where_nan(Vec a, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q))};
}
inline bool any_equal(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)) != 0; }
// a with the sign bit of b added (exclusive or)
inline Vec xor_sign(Vec a, Vec b) { return {_mm256_xor_ps(a.v, _mm256_and_ps(b.v, _mm256_set1_ps(-0.0f)))}; }
// a 2^n for whole n in -252..252, in two steps so that neither factor leaves the range
inline Vec scale_by_power(Vec a, Vec n) {
  __m256i whole = _mm256_cvtps_epi32(n.v);
  __m256i half = _mm256_srai_epi32(whole, 1);
  __m256i rest = _mm256_sub_epi32(whole, half);
  __m256i bias = _mm256_set1_epi32(127);
  __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return {_mm256_mul_ps(_mm256_mul_ps(a.v, first), second)};
}

#else
#error "build with -mavx2 -mfma -mf16c or with AVX-512; see outrider/ops/native/build.py"
#endif

// Sum of all lanes: halves, then quarters, pairs, neighbours.
inline float reduce_add(Vec a) {
  __m256 eight = detail::halves_added(a.v);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// Largest lane; what a NaN gives is not defined.
inline float reduce_max(Vec a) {
  __m256 eight = detail::halves_max(a.v);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// exp(x), about 1 ulp; 0 below -104, infinity above 88.8, NaN for NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; Cephes' polynomial (Moshier, expf) for exp(r), then 2^n.
inline Vec exp(Vec x) {
  Vec bounded = min(splat(89.0f), max(splat(-104.0f), x));  // this way round a NaN stays one
  Vec n = round_even(bounded * splat(1.44269504088896341f));
  Vec r = fnma(n, splat(0.693359375f), bounded);
  r = fnma(n, splat(-2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.0f));
  return scale_by_power(p, n);
}

// 1 / (1 + exp(-x))
inline Vec sigmoid(Vec x) { return splat(1.0f) / (splat(1.0f) + exp(neg(x))); }

// tanh(x) within 2 ulp: Cephes' polynomial (Moshier, tanhf) below 0.625, 1 - 2 / (exp(2|x|) + 1) above.
inline Vec tanh(Vec x) {
  Vec z = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  Vec small = fma(p * z, x, x);
  Vec size = abs(x);
  if (all_less(size, splat(0.625f))) return small;  // no lane needs the rest, which costs more than all of this
  Vec large = splat(1.0f) - splat(2.0f) / (exp(size + size) + splat(1.0f));
  return where_less(size, splat(0.625f), small, xor_sign(large, x));
}

#if defined(__AVX512BF16__)
// 32 bfloat16 values as 16 pairs.
struct Pairs {
  __m512bh v;
};
inline Pairs load_pairs(const bf16* p) {
  return {(__m512bh)_mm512_loadu_si512(static_cast<const void*>(p))};
}
// One pair, two neighbouring bfloat16 values given as 32 bits, in all lanes.
inline Pairs splat_pair(std::uint32_t pair) { return {(__m512bh)_mm512_set1_epi32(static_cast<int>(pair))}; }
// acc + a_odd b_odd + a_even b_even per lane, in the rounding of vdpbf16ps (denormals count as zero).
inline Vec dot_pairs(Vec acc, Pairs a, Pairs b) { return {_mm512_dpbf16_ps(acc.v, a.v, b.v)}; }
#endif

}  // namespace outrider
