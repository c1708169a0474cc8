// Index of the largest value of a row, the lowest one among equals.
#include "parallel.h"
#include "vec.h"

namespace outrider {
namespace {

struct Largest {
  float value;
  bool has_nan;
};

Largest largest_of(const bf16* row, std::int64_t width) {
  Vec largest = splat(to_float(row[0])), nans = zero();
  std::int64_t column = 0;
  auto take = [&](Vec value) {
    largest = max(value, largest);  // a NaN leaves what is there
    nans = where_nan(value, splat(1.0f), nans);
  };
  for (; column + Vec::W <= width; column += Vec::W) take(load(row + column));
  float value = reduce_max(largest);
  bool has_nan = reduce_add(nans) != 0.0f;
  for (; column < width; ++column) {
    float single = to_float(row[column]);
    value = single > value ? single : value;
    has_nan = has_nan || single != single;
  }
  return {value, has_nan};
}

std::int64_t first_with(const bf16* row, std::int64_t width, Largest largest) {
  std::int64_t column = 0;
  if (!largest.has_nan) {
    Vec wanted = splat(largest.value);
    while (column + Vec::W <= width && !any_equal(load(row + column), wanted)) column += Vec::W;
  }
  for (; column < width; ++column) {
    float value = to_float(row[column]);
    if (largest.has_nan ? value != value : value == largest.value) return column;
  }
  return width;
}

}  // namespace

// out[row]: as above. A row with a NaN gives `width` or, with nan_is_largest, the index of its first NaN.
OUTRIDER_API void outrider_argmax(const bf16* x, std::int64_t stride, std::int64_t num_rows, std::int64_t width,
                                  std::int64_t nan_is_largest, std::int64_t* out, std::int64_t num_threads) {
  auto body = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const bf16* values = x + row * stride;
      Largest largest = largest_of(values, width);
      out[row] = largest.has_nan && !nan_is_largest ? width : first_with(values, width, largest);
    }
  };
  parallel_ranges(static_cast<int>(num_threads), num_rows, 1, num_rows * width, body);
}
OUTRIDER_OP(argmax)

}  // namespace outrider
