// Index of the largest value of each row.
#include "argmax.h"
#include "parallel.h"

namespace outrider {

// out[row]: see argmax.h.
OUTRIDER_API void outrider_argmax(const bf16* x, std::int64_t stride, std::int64_t num_rows, std::int64_t width,
                                  std::int64_t nan_is_largest, std::int64_t* out, std::int64_t num_threads) {
  auto body = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) out[row] = argmax(x + row * stride, width, nan_is_largest != 0);
  };
  parallel_ranges(static_cast<int>(num_threads), num_rows, 1, num_rows * width, body);
}
OUTRIDER_OP(argmax)

}  // namespace outrider
