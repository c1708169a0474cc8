// Rows that are copied or added, element by element: what would otherwise be the torch operations of a step.
#include "parallel.h"
#include "vec.h"

namespace outrider {
namespace {

constexpr bf16 NOT_A_NUMBER = 0x7fc0;

inline bf16* row_of(bf16* base, std::int64_t plane, std::int64_t plane_stride, std::int64_t row, std::int64_t stride) {
  return base + plane * plane_stride + row * stride;
}

}  // namespace

// out[p, t] = source[p, index[t]] for planes p; an index outside 0 .. num_source - 1 gives a row of NaN.
// out is contiguous inside a row only, as source is.
OUTRIDER_API void outrider_gather_rows(const bf16* source, std::int64_t source_plane, std::int64_t source_row,
                                       std::int64_t num_source, const std::int64_t* index, std::int64_t num_planes,
                                       std::int64_t num_rows, std::int64_t width, bf16* out, std::int64_t out_plane,
                                       std::int64_t out_row) {
  for (std::int64_t p = 0; p < num_planes; ++p) {
    for (std::int64_t t = 0; t < num_rows; ++t) {
      bf16* target = row_of(out, p, out_plane, t, out_row);
      const std::int64_t from = index[t];
      if (from < 0 || from >= num_source) {
        for (std::int64_t c = 0; c < width; ++c) target[c] = NOT_A_NUMBER;
      } else {
        std::memcpy(target, source + p * source_plane + from * source_row,
                    sizeof(bf16) * static_cast<std::size_t>(width));
      }
    }
  }
}
OUTRIDER_OP(gather_rows)

// out = source, rows of both any stride apart.
OUTRIDER_API void outrider_copy_rows(const bf16* source, std::int64_t source_row, std::int64_t num_rows,
                                     std::int64_t width, bf16* out, std::int64_t out_row) {
  for (std::int64_t t = 0; t < num_rows; ++t) {
    std::memcpy(out + t * out_row, source + t * source_row, sizeof(bf16) * static_cast<std::size_t>(width));
  }
}
OUTRIDER_OP(copy_rows)

// out = left + right, one rounding; out may be one of them.
OUTRIDER_API void outrider_add_rows(const bf16* left, std::int64_t left_row, const bf16* right, std::int64_t right_row,
                                    std::int64_t num_rows, std::int64_t width, bf16* out, std::int64_t out_row) {
  for (std::int64_t t = 0; t < num_rows; ++t) {
    const bf16 *a = left + t * left_row, *b = right + t * right_row;
    bf16* target = out + t * out_row;
    std::int64_t c = 0;
    for (; c + Vec::W <= width; c += Vec::W) store(target + c, load(a + c) + load(b + c));
    if (c < width) {
      int lanes = static_cast<int>(width - c);
      store_n(target + c, load_n(a + c, lanes) + load_n(b + c, lanes), lanes);
    }
  }
}
OUTRIDER_OP(add_rows)

}  // namespace outrider
