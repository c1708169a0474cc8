// What happens to one head's values before attention: norm and rotation, rounded as outrider/ops does.
#pragma once

#include <cmath>

#include "common.h"
#include "vec.h"

namespace outrider {

inline Vec rounded(Vec a) { return widen(narrow(a)); }

// out = round(round(x / rms(x)) * gain): outrider/ops/norm.py. out may be x.
inline void norm_row(const bf16* x, const bf16* gain, float eps, std::int64_t count, bf16* out) {
  Vec square = zero();
  for (std::int64_t c = 0; c < count; c += Vec::W) {
    Vec part = load_n(x + c, static_cast<int>(min64(Vec::W, count - c)));
    square = fma(part, part, square);
  }
  const Vec inverse = splat(1.0f / std::sqrt(reduce_add(square) / static_cast<float>(count) + eps));
  for (std::int64_t c = 0; c < count; c += Vec::W) {
    int n = static_cast<int>(min64(Vec::W, count - c));
    store_n(out + c, rounded(load_n(x + c, n) * inverse) * load_n(gain + c, n), n);
  }
}

// Rotate the pairs (i, i + half) in place: outrider/ops/rope.py. Products round before they are added, as there.
inline void rotate_row(bf16* x, const float* cosine, const float* sine, std::int64_t half) {
  for (std::int64_t f = 0; f < half; f += Vec::W) {
    int n = static_cast<int>(min64(Vec::W, half - f));
    Vec first = load_n(x + f, n), second = load_n(x + half + f, n);
    Vec turn = load_n(cosine + f, n), lift = load_n(sine + f, n);
    store_n(x + f, first * turn - second * lift, n);
    store_n(x + half + f, second * turn + first * lift, n);
  }
}

}  // namespace outrider
