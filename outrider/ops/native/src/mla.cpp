// Absorbed latent attention over paged latent rows [c | r], and writing such rows. See outrider/ops/attention.py.
//
// Rounding to bfloat16 beyond that of the arguments and the result: the query in the latent space, the softmax weights
// (tiles.h), the attended latent. Everything else accumulates in float32.

#include <vector>

#include "common.h"
#include "heads.h"
#include "paged.h"
#include "parallel.h"
#include "pairs.h"
#include "tiles.h"
#include "vec.h"

namespace outrider {
namespace {

constexpr int ROW_BLOCK = 16;  // rows of a projection whose results are held at a time

struct Sizes {
  std::int64_t sequences, longest, rows, heads, nope, rope, latent, value;
  std::int64_t key() const { return latent + rope; }
};

struct Strided {
  const bf16* data;
  std::int64_t row, head;  // strides in values
  const bf16* at(std::int64_t t, std::int64_t h) const { return data + t * row + h * head; }
};

struct Spans {
  const std::int64_t* row_SM;    // row of the group
  const std::uint8_t* valid_SM;  // 0 where the span is shorter
  const std::int64_t* limit_SM;  // keys the row sees

  // Keys that all rows see, added up.
  std::int64_t num_scores(std::int64_t num_cells) const {
    std::int64_t sum = 0;
    for (std::int64_t cell = 0; cell < num_cells; ++cell) sum += valid_SM[cell] ? limit_SM[cell] : 0;
    return sum;
  }
};

// Projected rows of one head: store(row, its float32 result).
template <class RowOf, class Store>
void project(std::int64_t num_rows, const bf16* panels, std::int64_t inner, std::int64_t outer, RowOf&& row_of,
             Store&& store_row) {
  static thread_local Buffer<float> buffer;
  const std::int64_t num_panels = ceil_div(outer, PANEL), stride = num_panels * PANEL;
  float* results = buffer.at_least(ROW_BLOCK * stride);
  const bf16* rows[ROW_BLOCK];
  float* outs[ROW_BLOCK];
  for (int i = 0; i < ROW_BLOCK; ++i) outs[i] = results + i * stride;
  for (std::int64_t begin = 0; begin < num_rows; begin += ROW_BLOCK) {
    std::int64_t count = min64(ROW_BLOCK, num_rows - begin);
    for (std::int64_t i = 0; i < count; ++i) rows[i] = row_of(begin + i);
    multiply_panels(rows, count, panels, inner / 2, num_panels, outs, false);
    for (std::int64_t i = 0; i < count; ++i) store_row(begin + i, outs[i]);
  }
}

inline void store_row(bf16* out, const float* values, std::int64_t count) {
  std::int64_t c = 0;
  for (; c + Vec::W <= count; c += Vec::W) store(out + c, load(values + c));
  if (c < count) store_n(out + c, load(values + c), static_cast<int>(count - c));
}

// out = values * sigmoid(gate): the sigmoid rounds first, then the value, then their product.
inline void store_gated(bf16* out, const float* values, const bf16* gate, std::int64_t count) {
  for (std::int64_t c = 0; c < count; c += Vec::W) {
    int n = static_cast<int>(min64(Vec::W, count - c));
    store_n(out + c, rounded(load(values + c)) * rounded(sigmoid(load_n(gate + c, n))), n);
  }
}

// Rows of one sequence, heads first_head..last_head - 1.
void attend_sequence(const Sizes& sizes, const Spans& spans, const PageTable& table, const bf16* cache, float scale,
                     std::int64_t sequence, std::int64_t first_head, std::int64_t last_head, const bf16* q_THK,
                     bf16* latent_THC) {
  static thread_local TileAttention tiles;
  static thread_local std::vector<const bf16*> queries;
  static thread_local std::vector<int> lowest, highest;
  static thread_local std::vector<std::int64_t> rows, limits;
  const std::int64_t heads = last_head - first_head, key = sizes.key();
  rows.clear();
  limits.clear();
  std::int64_t num_keys = 0;
  for (std::int64_t m = 0; m < sizes.longest; ++m) {
    std::int64_t cell = sequence * sizes.longest + m;
    if (!spans.valid_SM[cell]) continue;
    rows.push_back(spans.row_SM[cell]);
    limits.push_back(spans.limit_SM[cell]);
    num_keys = max64(num_keys, spans.limit_SM[cell]);
  }
  const std::int64_t num_rows = static_cast<std::int64_t>(rows.size()), num_queries = num_rows * heads;
  queries.resize(static_cast<std::size_t>(num_queries));
  lowest.assign(static_cast<std::size_t>(num_queries), 0);
  highest.resize(static_cast<std::size_t>(num_queries));
  for (std::int64_t q = 0; q < num_queries; ++q) {
    queries[q] = q_THK + (rows[q / heads] * sizes.heads + first_head + q % heads) * key;
  }
  tiles.start(num_queries, key, sizes.latent, false);
  for (std::int64_t begin = 0; begin < num_keys; begin += TILE) {
    const std::int64_t end = min64(begin + TILE, num_keys);
    table.for_rows(sequence, end, min64(end + TILE, num_keys), [&](std::int64_t, std::int64_t row) {
      prefetch(cache + row * key, sizeof(bf16) * key);  // the next tile comes while this one is computed
    });
    table.for_rows(sequence, begin, end, [&](std::int64_t i, std::int64_t row) {
      std::memcpy(tiles.key_row(i), cache + row * key, sizeof(bf16) * static_cast<std::size_t>(key));
    });
    tiles.clear_rows(end - begin);
    tiles.pack();
    std::int64_t first = 0;
    while (limits[first] <= begin) ++first;  // some row sees the tile, as it holds a key
    for (std::int64_t q = 0; q < num_queries; ++q) {
      highest[q] = static_cast<int>(min64(max64(limits[q / heads] - begin, 0), TILE));
    }
    tiles.attend(queries.data(), lowest.data(), highest.data(), scale, first * heads);
  }
  for (std::int64_t q = 0; q < num_queries; ++q) {
    tiles.result(q, latent_THC + (rows[q / heads] * sizes.heads + first_head + q % heads) * sizes.latent,
                 sizes.latent);
  }
}

}  // namespace

// out[t, h] = attention of row t, head h. Panels: per head, packed as pairs.h says, w_uk [nope -> latent] and
// w_uv [latent -> value]. gate: [rows, heads * value] before its sigmoid, or null. Nothing but limit_SM says how long the
// contexts are, so one set of arguments serves contexts that grow.
OUTRIDER_API void outrider_mla_absorbed(
    const bf16* q_nope, std::int64_t q_nope_row, std::int64_t q_nope_head, const bf16* q_rope, std::int64_t q_rope_row,
    std::int64_t q_rope_head, const bf16* uk_panels, const bf16* uv_panels, const bf16* cache,
    const std::int64_t* row_SM, const std::uint8_t* valid_SM, const std::int64_t* limit_SM, const std::int64_t* pages,
    std::int64_t pages_row, std::int64_t page_size, std::int64_t sequences, std::int64_t longest, std::int64_t rows,
    std::int64_t heads, std::int64_t nope, std::int64_t rope, std::int64_t latent, std::int64_t value, float scale,
    const bf16* gate, std::int64_t gate_row, bf16* out, std::int64_t num_threads_wanted) {
  static thread_local Buffer<bf16> query_buffer, latent_buffer;
  const Sizes sizes{sequences, longest, rows, heads, nope, rope, latent, value};
  const Strided nope_part{q_nope, q_nope_row, q_nope_head}, rope_part{q_rope, q_rope_row, q_rope_head};
  const int num_threads = static_cast<int>(num_threads_wanted);
  const std::int64_t key = sizes.key();
  bf16* q_THK = query_buffer.at_least(rows * heads * key);
  bf16* latent_THC = latent_buffer.at_least(rows * heads * latent);

  const std::int64_t uk_size = nope / 2 * STEP * ceil_div(latent, PANEL);
  parallel_ranges(num_threads, heads, 1, rows * heads * nope * latent, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t h = begin; h < end; ++h) {
      project(
          rows, uk_panels + h * uk_size, nope, latent, [&](std::int64_t t) { return nope_part.at(t, h); },
          [&](std::int64_t t, const float* values) {
            bf16* query = q_THK + (t * heads + h) * key;
            store_row(query, values, latent);
            std::memcpy(query + latent, rope_part.at(t, h), sizeof(bf16) * static_cast<std::size_t>(rope));
          });
    }
  });

  const Spans spans{row_SM, valid_SM, limit_SM};
  const PageTable table{pages, pages_row, page_size};
  const bool small = heads * spans.num_scores(sequences * longest) * (key + latent) < MIN_PARALLEL_WORK;
  const std::int64_t groups = small ? 1 : min64(heads, ceil_div(num_threads, max64(sequences, 1)));
  parallel_parts(small ? 1 : num_threads, static_cast<int>(sequences * groups), [&](int part) {
    std::int64_t sequence = part / groups, group = part % groups;
    attend_sequence(sizes, spans, table, cache, scale, sequence, heads * group / groups, heads * (group + 1) / groups,
                    q_THK, latent_THC);
  });

  const std::int64_t uv_size = latent / 2 * STEP * ceil_div(value, PANEL);
  parallel_ranges(num_threads, heads, 1, rows * heads * latent * value, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t h = begin; h < end; ++h) {
      project(
          rows, uv_panels + h * uv_size, latent, value,
          [&](std::int64_t t) { return latent_THC + (t * heads + h) * latent; },
          [&](std::int64_t t, const float* values) {
            bf16* target = out + (t * heads + h) * value;
            if (gate != nullptr) {
              store_gated(target, values, gate + t * gate_row + h * value, value);
            } else {
              store_row(target, values, value);
            }
          });
    }
  });
}
OUTRIDER_OP(mla_absorbed)

// cache[slots[t]] = [rms_norm(row[0 .. latent)) * weight | row[latent ..)], rounded as outrider/ops/norm.py does.
OUTRIDER_API void outrider_append_latents(const bf16* row_TC, std::int64_t row_stride, const bf16* weight,
                                          std::int64_t rows, std::int64_t latent, std::int64_t rope, float eps,
                                          const std::int64_t* slots, bf16* cache) {
  const std::int64_t key = latent + rope;
  for (std::int64_t t = 0; t < rows; ++t) {
    const bf16* row = row_TC + t * row_stride;
    bf16* target = cache + slots[t] * key;
    norm_row(row, weight, eps, latent, target);
    std::memcpy(target + latent, row + latent, sizeof(bf16) * static_cast<std::size_t>(rope));
  }
}
OUTRIDER_OP(append_latents)

}  // namespace outrider
