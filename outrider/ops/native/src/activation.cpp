// Gated activations: element by element, in float32, one rounding.
#include "parallel.h"
#include "vec.h"

namespace outrider {
namespace {

// Elements cost about this many multiply-adds each.
constexpr std::int64_t ELEMENT_WORK = 8;

// out[c] = body(a[c], b[c]) over rows of two tensors
template <class Body>
void over_rows(const bf16* a, std::int64_t a_stride, const bf16* b, std::int64_t b_stride, std::int64_t num_rows,
               std::int64_t width, bf16* out, std::int64_t num_threads, Body&& body) {
  std::int64_t work = ELEMENT_WORK * num_rows * width;
  parallel_ranges(static_cast<int>(num_threads), num_rows, 1, work, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const bf16 *left = a + row * a_stride, *right = b + row * b_stride;
      bf16* result = out + row * width;
      std::int64_t column = 0;
      for (; column + Vec::W <= width; column += Vec::W) {
        store(result + column, body(load(left + column), load(right + column)));
      }
      if (column < width) {
        int lanes = static_cast<int>(width - column);
        store_n(result + column, body(load_n(left + column, lanes), load_n(right + column, lanes)), lanes);
      }
    }
  });
}

}  // namespace

// SiTU of rows [gate | up], each of `width`; linear_beta 0 leaves up unbounded.
OUTRIDER_API void outrider_situ(const bf16* gate_up, std::int64_t stride, std::int64_t num_rows, std::int64_t width,
                                float beta, float linear_beta, bf16* out, std::int64_t num_threads) {
  Vec bound = splat(beta), inverse = splat(1.0f / beta);
  const bf16* up = gate_up + width;
  if (linear_beta == 0.0f) {
    over_rows(gate_up, stride, up, stride, num_rows, width, out, num_threads,
              [&](Vec g, Vec u) { return tanh(g * inverse) * bound * sigmoid(g) * u; });
    return;
  }
  Vec up_bound = splat(linear_beta), up_inverse = splat(1.0f / linear_beta);
  over_rows(gate_up, stride, up, stride, num_rows, width, out, num_threads, [&](Vec g, Vec u) {
    return tanh(g * inverse) * bound * sigmoid(g) * (tanh(u * up_inverse) * up_bound);
  });
}
OUTRIDER_OP(situ)

// silu(gate) * up of rows [gate | up], each of `width`.
OUTRIDER_API void outrider_silu_mul(const bf16* gate_up, std::int64_t stride, std::int64_t num_rows,
                                    std::int64_t width, bf16* out, std::int64_t num_threads) {
  over_rows(gate_up, stride, gate_up + width, stride, num_rows, width, out, num_threads,
            [](Vec g, Vec u) { return g * sigmoid(g) * u; });
}
OUTRIDER_OP(silu_mul)

}  // namespace outrider
