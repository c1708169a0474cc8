// Index of the largest value of one row, the lowest one among equals.
#pragma once

#include "vec.h"

namespace outrider {

struct Largest {
  float value;
  bool has_nan;
};

inline Largest largest_of(const bf16* row, std::int64_t width) {
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

inline std::int64_t first_with(const bf16* row, std::int64_t width, Largest largest) {
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

// A row with a NaN gives `width` or, with nan_is_largest, the index of its first NaN.
inline std::int64_t argmax(const bf16* row, std::int64_t width, bool nan_is_largest) {
  Largest largest = largest_of(row, width);
  return largest.has_nan && !nan_is_largest ? width : first_with(row, width, largest);
}

}  // namespace outrider
