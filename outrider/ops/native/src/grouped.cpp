// Grouped-query attention over pages and the rows that it reads. See outrider/ops/grouped_attention.py.
//
// A cache row holds the keys of a token, normed and rotated, then its values. Rounding to bfloat16 beyond that of the
// torch form: the softmax weights (lanes.h).
#include <cstring>
#include <vector>

#include "common.h"
#include "heads.h"
#include "lanes.h"
#include "paged.h"
#include "parallel.h"
#include "vec.h"

namespace outrider {
namespace {

struct Heads {
  std::int64_t queries, keys, width;  // heads of queries, heads of keys, values of a head
  std::int64_t group() const { return queries / keys; }
  std::int64_t cache_row() const { return 2 * keys * width; }
};

// The rows of one sequence and the keys that each sees.
struct Span {
  std::vector<std::int64_t> rows, limits;
  std::int64_t num_keys = 0;

  void of(std::int64_t sequence, std::int64_t longest, const std::int64_t* row_SM, const std::uint8_t* valid_SM,
          const std::int64_t* limit_SM) {
    rows.clear();
    limits.clear();
    num_keys = 0;
    for (std::int64_t cell = sequence * longest; cell < (sequence + 1) * longest; ++cell) {
      if (!valid_SM[cell]) continue;
      rows.push_back(row_SM[cell]);
      limits.push_back(limit_SM[cell]);
      num_keys = max64(num_keys, limit_SM[cell]);
    }
  }
};

// All rows of one sequence, all query heads of one key head.
void attend_span(const Heads& heads, const Span& span, const PageTable& table, const bf16* cache, float scale,
                 std::int64_t sequence, std::int64_t kv_head, const bf16* q_THK, bf16* out_THK) {
  static thread_local LaneAttention attention;
  static thread_local std::vector<float> lowest, highest;
  const std::int64_t group = heads.group(), width = heads.width;
  const std::int64_t num_queries = static_cast<std::int64_t>(span.rows.size()) * group;
  const std::size_t bytes = sizeof(bf16) * static_cast<std::size_t>(width);
  auto head_of = [&](std::int64_t q) { return (span.rows[q / group] * heads.queries + kv_head * group + q % group) * width; };
  attention.start(num_queries, width);
  for (std::int64_t q = 0; q < num_queries; ++q) std::memcpy(attention.query_row(q), q_THK + head_of(q), bytes);
  attention.pack_queries();

  const std::size_t lanes = static_cast<std::size_t>(ceil_div(num_queries, LANES) * LANES);
  lowest.assign(lanes, 0.0f);
  highest.assign(lanes, 0.0f);
  auto tile_at = [&](std::int64_t first, Tile& tile) {
    const std::int64_t last = min64(first + KEYS, span.num_keys);
    tile.count = static_cast<int>(max64(last - first, 0));
    table.for_rows(sequence, first, last, [&](std::int64_t i, std::int64_t row) {
      tile.keys[i] = cache + row * heads.cache_row() + kv_head * width;
      tile.values[i] = tile.keys[i] + heads.keys * width;
    });
  };
  Tile tiles[2];
  tile_at(0, tiles[0]);
  int now = 0;
  for (std::int64_t first = 0; first < span.num_keys; first += KEYS, now = 1 - now) {
    tile_at(first + KEYS, tiles[1 - now]);
    bool limited = false;
    for (std::int64_t q = 0; q < num_queries; ++q) {
      std::int64_t seen = min64(max64(span.limits[q / group] - first, 0), tiles[now].count);
      limited = limited || seen < tiles[now].count;
      highest[static_cast<std::size_t>(q)] = static_cast<float>(seen);
    }
    attention.attend(tiles[now], tiles[1 - now], limited ? lowest.data() : nullptr, limited ? highest.data() : nullptr,
                     scale);
  }
  attention.results([&](std::int64_t q, const bf16* values) { std::memcpy(out_THK + head_of(q), values, bytes); });
}

}  // namespace

// Attention of every row; out[t, h]. Nothing but limit_SM says how long the contexts are.
OUTRIDER_API void outrider_grouped_attention(const bf16* q_THK, const bf16* cache, const std::int64_t* row_SM,
                                             const std::uint8_t* valid_SM, const std::int64_t* limit_SM,
                                             const std::int64_t* pages, std::int64_t pages_row, std::int64_t page_size,
                                             std::int64_t sequences, std::int64_t longest, std::int64_t query_heads,
                                             std::int64_t kv_heads, std::int64_t width, float scale, bf16* out_THK,
                                             std::int64_t num_threads) {
  const Heads heads{query_heads, kv_heads, width};
  const PageTable table{pages, pages_row, page_size};
  std::int64_t num_scores = 0;
  for (std::int64_t cell = 0; cell < sequences * longest; ++cell) num_scores += valid_SM[cell] ? limit_SM[cell] : 0;
  const bool small = num_scores * query_heads * 2 * width < MIN_PARALLEL_WORK;
  parallel_parts(small ? 1 : static_cast<int>(num_threads), static_cast<int>(sequences * kv_heads), [&](int part) {
    static thread_local Span span;
    span.of(part / kv_heads, longest, row_SM, valid_SM, limit_SM);
    if (!span.rows.empty()) {
      attend_span(heads, span, table, cache, scale, part / kv_heads, part % kv_heads, q_THK, out_THK);
    }
  });
}
OUTRIDER_OP(grouped_attention)

// Norm (where there are gains) and rotate queries and keys; keys and values of row t go to cache row slots[t].
// qkv: [rows, (query_heads + 2 kv_heads) * width]; gain: of every query head, then of every key head.
OUTRIDER_API void outrider_append_keys(const bf16* qkv, std::int64_t qkv_row, const bf16* gain, const float* cosine,
                                       const float* sine, const std::int64_t* position_T, const std::int64_t* slot_T,
                                       std::int64_t rows, std::int64_t query_heads, std::int64_t kv_heads,
                                       std::int64_t width, float eps, bf16* cache, bf16* q_THK,
                                       std::int64_t num_threads) {
  const Heads heads{query_heads, kv_heads, width};
  const std::int64_t half = width / 2;
  const std::size_t bytes = sizeof(bf16) * static_cast<std::size_t>(width);
  parallel_ranges(static_cast<int>(num_threads), rows, 1, rows * (query_heads + kv_heads) * width * 8,
                  [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t t = begin; t < end; ++t) {
                      const bf16* source = qkv + t * qkv_row;
                      bf16* keys = cache + slot_T[t] * heads.cache_row();
                      const float *turn = cosine + position_T[t] * half, *lift = sine + position_T[t] * half;
                      for (std::int64_t h = 0; h < query_heads + kv_heads; ++h) {
                        bf16* out = h < query_heads ? q_THK + (t * query_heads + h) * width
                                                    : keys + (h - query_heads) * width;
                        if (gain != nullptr) {
                          norm_row(source + h * width, gain + h * width, eps, width, out);
                        } else {
                          std::memcpy(out, source + h * width, bytes);
                        }
                        rotate_row(out, turn, lift, half);
                      }
                      std::memcpy(keys + kv_heads * width, source + (query_heads + kv_heads) * width,
                                  bytes * static_cast<std::size_t>(kv_heads));
                    }
                  });
}
OUTRIDER_OP(append_keys)

}  // namespace outrider
