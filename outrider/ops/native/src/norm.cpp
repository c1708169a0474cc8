// Norms of rows and the attention-residual mix; statistics in float32.
//
// A row's sum has one order: vector i of the row adds into partial sum i modulo 4, the four are added in pairs, then
// the lanes (reduce_add). It depends on the width and the instruction set only.
#include <cmath>
#include <vector>

#include "pairs.h"
#include "parallel.h"
#include "vec.h"

namespace outrider {
namespace {

constexpr int SUMS = 4;

struct RowSum {
  Vec partial[SUMS] = {zero(), zero(), zero(), zero()};
  float total() const { return reduce_add((partial[0] + partial[1]) + (partial[2] + partial[3])); }
};

// body(column, lanes, vector index modulo SUMS) over the vectors of a row
template <class Body>
inline void over_row(std::int64_t width, Body&& body) {
  std::int64_t column = 0;
  for (; column + SUMS * Vec::W <= width; column += SUMS * Vec::W) {
    OUTRIDER_UNROLL
    for (int index = 0; index < SUMS; ++index) body(column + index * Vec::W, Vec::W, index);
  }
  int index = 0;
  for (; column + Vec::W <= width; column += Vec::W, ++index) body(column, Vec::W, index);
  if (column < width) body(column, static_cast<int>(width - column), index);
}

template <class T>
inline Vec load_lanes(const T* p, int lanes) {
  return lanes == Vec::W ? load(p) : load_n(p, lanes);
}
template <class T>
inline void store_lanes(T* p, Vec a, int lanes) {
  if (lanes == Vec::W) {
    store(p, a);
  } else {
    store_n(p, a, lanes);
  }
}

inline float inverse_root(float sum_of_squares, std::int64_t width, float eps) {
  return 1.0f / std::sqrt(sum_of_squares / static_cast<float>(width) + eps);
}

inline Vec rounded(Vec a) { return widen(narrow(a)); }

// out = round(round(x * inverse) * weight), the two roundings of the vendor code
inline void normed_row(const bf16* x, const bf16* weight, float inverse, std::int64_t width, bf16* out) {
  Vec scale = splat(inverse);
  over_row(width, [&](std::int64_t column, int lanes, int) {
    Vec normed = rounded(load_lanes(x + column, lanes) * scale);
    store_lanes(out + column, normed * load_lanes(weight + column, lanes), lanes);
  });
}

void rms_norm_row(const bf16* x, const bf16* weight, float eps, std::int64_t width, bf16* out) {
  RowSum squares;
  over_row(width, [&](std::int64_t column, int lanes, int index) {
    Vec value = load_lanes(x + column, lanes);
    squares.partial[index] = fma(value, value, squares.partial[index]);
  });
  normed_row(x, weight, inverse_root(squares.total(), width, eps), width, out);
}

// Shares of the candidates: softmax of their scores, sums ascending.
void softmax(float* scores, std::int64_t count) {
  float largest = scores[0];
  for (std::int64_t b = 1; b < count; ++b) largest = scores[b] > largest ? scores[b] : largest;
  for (std::int64_t b = 0; b < count; b += Vec::W) {
    int lanes = static_cast<int>(min64(Vec::W, count - b));
    store_n(scores + b, exp(load_n(scores + b, lanes) - splat(largest)), lanes);
  }
  float sum = scores[0];
  for (std::int64_t b = 1; b < count; ++b) sum += scores[b];
  for (std::int64_t b = 0; b < count; ++b) scores[b] /= sum;
}

struct Mix {
  bf16* candidates;  // plane 0; the last plane is the prefix
  std::int64_t num_candidates, plane_stride, row_stride;
  const bf16* added;  // to the prefix first; may be null
  std::int64_t added_stride;
  const float* mix_weight;  // null: the prefix is taken as it is
  const bf16* norm_weight;
  float eps;
  std::int64_t width;
  bf16* mixed;  // may be null without a mix
  bf16* normed;
};

void mix_row(const Mix& m, std::int64_t row) {
  bf16* first = m.candidates + row * m.row_stride;
  bf16* prefix = first + (m.num_candidates - 1) * m.plane_stride;
  if (m.added != nullptr) {
    const bf16* added = m.added + row * m.added_stride;
    over_row(m.width, [&](std::int64_t column, int lanes, int) {
      store_lanes(prefix + column, load_lanes(prefix + column, lanes) + load_lanes(added + column, lanes), lanes);
    });
  }
  bf16* normed = m.normed + row * m.width;
  if (m.mix_weight == nullptr || m.num_candidates == 1) {
    rms_norm_row(prefix, m.norm_weight, m.eps, m.width, normed);
    return;
  }
  static thread_local std::vector<float> shares_of_row;
  shares_of_row.resize(static_cast<std::size_t>(m.num_candidates));
  float* shares = shares_of_row.data();
  for (std::int64_t b = 0; b < m.num_candidates; ++b) {
    const bf16* candidate = first + b * m.plane_stride;
    RowSum squares, product;
    over_row(m.width, [&](std::int64_t column, int lanes, int index) {
      Vec value = load_lanes(candidate + column, lanes);
      squares.partial[index] = fma(value, value, squares.partial[index]);
      product.partial[index] = fma(value, load_lanes(m.mix_weight + column, lanes), product.partial[index]);
    });
    shares[b] = product.total() * inverse_root(squares.total(), m.width, m.eps);
  }
  softmax(shares, m.num_candidates);
  bf16* mixed = m.mixed + row * m.width;
  RowSum squares;
  over_row(m.width, [&](std::int64_t column, int lanes, int index) {
    Vec sum = load_lanes(first + column, lanes) * splat(shares[0]);
    for (std::int64_t b = 1; b < m.num_candidates; ++b) {
      sum = fma(load_lanes(first + b * m.plane_stride + column, lanes), splat(shares[b]), sum);
    }
    const HalfBits bits = narrow(sum);
    sum = widen(bits);
    if (lanes == Vec::W) {
      store_bits(mixed + column, bits);
    } else {
      store_n(mixed + column, sum, lanes);
    }
    squares.partial[index] = fma(sum, sum, squares.partial[index]);
  });
  normed_row(mixed, m.norm_weight, inverse_root(squares.total(), m.width, m.eps), m.width, normed);
}

}  // namespace

// x: [n0, n1, n2, width] with strides of the first three dims; weight with strides of dims 1 and 2; out contiguous.
OUTRIDER_API void outrider_rms_norm(const bf16* x, std::int64_t n0, std::int64_t n1, std::int64_t n2, std::int64_t s0,
                                    std::int64_t s1, std::int64_t s2, const bf16* weight, std::int64_t w1,
                                    std::int64_t w2, float eps, std::int64_t width, bf16* out,
                                    std::int64_t num_threads) {
  std::int64_t inner = n1 * n2;
  parallel_ranges(static_cast<int>(num_threads), n0, 1, n0 * inner * width, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i0 = begin; i0 < end; ++i0) {
      for (std::int64_t i1 = 0; i1 < n1; ++i1) {
        for (std::int64_t i2 = 0; i2 < n2; ++i2) {
          rms_norm_row(x + i0 * s0 + i1 * s1 + i2 * s2, weight + i1 * w1 + i2 * w2, eps, width,
                       out + (i0 * inner + i1 * n2 + i2) * width);
        }
      }
    }
  });
}
OUTRIDER_OP(rms_norm)

// Add to the prefix, mix the candidates, norm the mixture; see residual_mix_norm in outrider/ops/residual.py.
OUTRIDER_API void outrider_mix_norm(bf16* candidates, std::int64_t num_candidates, std::int64_t plane_stride,
                                    std::int64_t row_stride, std::int64_t num_rows, std::int64_t width,
                                    const bf16* added, std::int64_t added_stride, const float* mix_weight,
                                    const bf16* norm_weight, float eps, bf16* mixed, bf16* normed,
                                    std::int64_t num_threads) {
  const Mix m{candidates, num_candidates, plane_stride, row_stride, added, added_stride,
              mix_weight, norm_weight,    eps,          width,      mixed, normed};
  std::int64_t work = num_rows * num_candidates * width;
  parallel_ranges(static_cast<int>(num_threads), num_rows, 1, work, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) mix_row(m, row);
  });
}
OUTRIDER_OP(mix_norm)

}  // namespace outrider
