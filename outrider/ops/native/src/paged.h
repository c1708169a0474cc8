// Which cache row holds the key at a position of a sequence.
#pragma once

#include "common.h"

namespace outrider {

struct PageTable {
  const std::int64_t* pages;  // [sequences, row_size] page ids in order
  std::int64_t row_size;
  std::int64_t page_size;  // tokens of a page

  // body(key, row) for positions first..last - 1 of a sequence, key counted from first.
  template <class Body>
  void for_rows(std::int64_t sequence, std::int64_t first, std::int64_t last, Body&& body) const {
    const std::int64_t* own = pages + sequence * row_size;
    for (std::int64_t position = first; position < last;) {
      std::int64_t row = own[position / page_size] * page_size + position % page_size;
      std::int64_t end = min64(last, (position / page_size + 1) * page_size);
      for (; position < end; ++position, ++row) body(position - first, row);
    }
  }
};

}  // namespace outrider
