// Tap rows that wait in a ring of each slot. See outrider/ops/waiting.py.
#include "common.h"

namespace outrider {
namespace {

struct Ring {
  bf16* rows;
  std::int64_t num_rows, width;
  bf16* at(std::int64_t slot, std::int64_t position) const {
    return rows + (slot * num_rows + position % num_rows) * width;
  }
  std::size_t row_bytes() const { return sizeof(bf16) * static_cast<std::size_t>(width); }
};

}  // namespace

// columns [4, spans]: slot, first row of taps, its position, number of rows.
OUTRIDER_API void outrider_keep_rows(const bf16* taps, const std::int64_t* columns, std::int64_t spans, bf16* ring,
                                     std::int64_t ring_rows, std::int64_t width) {
  const Ring to{ring, ring_rows, width};
  for (std::int64_t s = 0; s < spans; ++s) {
    const std::int64_t slot = columns[s], begin = columns[spans + s], start = columns[2 * spans + s];
    for (std::int64_t i = 0; i < columns[3 * spans + s]; ++i) {
      std::memcpy(to.at(slot, start + i), taps + (begin + i) * width, to.row_bytes());
    }
  }
}
OUTRIDER_OP(keep_rows)

// columns [3, spans]: slot, first position, number of rows. Rows of the results that no span has are zeros at position
// 0, for cache row -1.
OUTRIDER_API void outrider_take_rows(bf16* ring, std::int64_t ring_rows, std::int64_t width,
                                     const std::int64_t* columns, std::int64_t spans, const std::int64_t* pages,
                                     std::int64_t pages_row, std::int64_t page_size, std::int64_t rows, bf16* taps,
                                     std::int64_t* positions, std::int64_t* cache_rows) {
  const Ring from{ring, ring_rows, width};
  std::int64_t t = 0;
  for (std::int64_t s = 0; s < spans; ++s) {
    const std::int64_t start = columns[spans + s];
    for (std::int64_t at = start; at < start + columns[2 * spans + s] && t < rows; ++at, ++t) {
      std::memcpy(taps + t * width, from.at(columns[s], at), from.row_bytes());
      positions[t] = at;
      cache_rows[t] = pages[s * pages_row + at / page_size] * page_size + at % page_size;
    }
  }
  for (; t < rows; ++t) {
    std::memset(taps + t * width, 0, from.row_bytes());
    positions[t] = 0;
    cache_rows[t] = -1;
  }
}
OUTRIDER_OP(take_rows)

}  // namespace outrider
