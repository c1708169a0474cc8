// Attention of DSpark's blocks and the rows of its context cache. See outrider/ops/block_attention.py.
//
// Rounding to bfloat16 beyond that of the torch form: the softmax weights (lanes.h).

#include <vector>

#include "common.h"
#include "heads.h"
#include "lanes.h"
#include "paged.h"
#include "parallel.h"
#include "pairs.h"
#include "vec.h"

namespace outrider {
namespace {

struct Rotation {
  const float *cosine, *sine;  // [positions, half]
  std::int64_t half;
  void apply(bf16* row, std::int64_t position) const {
    rotate_row(row, cosine + position * half, sine + position * half, half);
  }
};

struct Block {
  const bf16* qkv_TNK;   // rows of all blocks: query heads, key heads, value heads
  const bf16* gain_NK;   // of query and key heads
  const std::int64_t* num_keys_S;
  std::int64_t rows, heads, kv_heads, width;  // rows of one block
  float eps, scale;
  std::int64_t row_size() const { return (heads + 2 * kv_heads) * width; }
};

// Keys in order: the context, then the block, so a key's number is its absolute position.
struct Mask {
  bool causal, from_anchor;
  std::int64_t window;  // 0 = none

  // First key that block row g sees, and the one after the last.
  std::int64_t begin(std::int64_t num_context, std::int64_t g) const {
    return window == 0 ? 0 : max64(0, num_context + (from_anchor ? -1 : g) - window + 1);
  }
  std::int64_t end(std::int64_t num_context, std::int64_t g, std::int64_t rows) const {
    return num_context + (causal ? g + 1 : rows);
  }
};

// Which keys of a tile each query sees, as lanes.h wants it.
class Visible {
 public:
  void start(const Mask& mask, std::int64_t num_context, std::int64_t rows, std::int64_t group) {
    mask_ = mask;
    num_context_ = num_context;
    rows_ = rows;
    group_ = group;
    std::int64_t lanes = ceil_div(rows * group, LANES) * LANES;
    lowest_.assign(static_cast<std::size_t>(lanes), 0.0f);
    highest_.assign(static_cast<std::size_t>(lanes), 0.0f);
  }
  // For keys first..last - 1; false if every query sees all of them.
  bool limit(std::int64_t first, std::int64_t last) {
    // Later rows see the same or later keys.
    if (mask_.begin(num_context_, rows_ - 1) <= first && last <= mask_.end(num_context_, 0, rows_)) return false;
    for (std::int64_t q = 0; q < rows_ * group_; ++q) {
      std::int64_t g = q / group_;
      lowest_[q] = static_cast<float>(max64(mask_.begin(num_context_, g) - first, 0));
      highest_[q] = static_cast<float>(max64(mask_.end(num_context_, g, rows_) - first, 0));
    }
    return true;
  }
  const float* lowest() const { return lowest_.data(); }
  const float* highest() const { return highest_.data(); }

 private:
  Mask mask_{};
  std::int64_t num_context_ = 0, rows_ = 0, group_ = 0;
  std::vector<float> lowest_, highest_;
};

// All query heads of one key head of one sequence.
void attend_group(const Block& block, const Mask& mask, const Rotation& rotation, const PageTable& table,
                  const bf16* context_keys, const bf16* context_values, std::int64_t sequence, std::int64_t kv_head,
                  bf16* out_THK) {
  static thread_local LaneAttention attention;
  static thread_local Visible visible;
  static thread_local Buffer<bf16> key_buffer;
  const std::int64_t group = block.heads / block.kv_heads, width = block.width;
  const std::int64_t num_queries = block.rows * group, num_context = block.num_keys_S[sequence];
  const bf16* rows = block.qkv_TNK + sequence * block.rows * block.row_size();
  bf16* block_keys = key_buffer.at_least(block.rows * width);
  const std::int64_t key_head = block.heads + kv_head;
  const std::int64_t num_keys = num_context + block.rows;
  auto tile_at = [&](std::int64_t first, Tile& tile) {
    const std::int64_t last = min64(first + KEYS, num_keys);
    table.for_rows(sequence, first, min64(last, num_context), [&](std::int64_t i, std::int64_t row) {
      std::int64_t offset = (row * block.kv_heads + kv_head) * width;
      tile.keys[i] = context_keys + offset;
      tile.values[i] = context_values + offset;
    });
    for (std::int64_t at = max64(first, num_context); at < last; ++at) {
      tile.keys[at - first] = block_keys + (at - num_context) * width;
      tile.values[at - first] = rows + (at - num_context) * block.row_size() + (key_head + block.kv_heads) * width;
    }
    tile.count = static_cast<int>(max64(last - first, 0));
  };
  Tile tiles[2];
  std::int64_t first = mask.begin(num_context, 0) / KEYS * KEYS;
  tile_at(first, tiles[0]);
  tiles[0].prefetch_keys(0, KEYS, width);  // while queries and the block's keys are made
  attention.start(num_queries, width);
  for (std::int64_t q = 0; q < num_queries; ++q) {
    std::int64_t g = q / group, head = kv_head * group + q % group;
    bf16* query = attention.query_row(q);
    norm_row(rows + g * block.row_size() + head * width, block.gain_NK + head * width, block.eps, width, query);
    rotation.apply(query, num_context + g);
  }
  attention.pack_queries();
  for (std::int64_t g = 0; g < block.rows; ++g) {
    bf16* key = block_keys + g * width;
    norm_row(rows + g * block.row_size() + key_head * width, block.gain_NK + key_head * width, block.eps, width, key);
    rotation.apply(key, num_context + g);
  }

  visible.start(mask, num_context, block.rows, group);
  for (int now = 0; first < num_keys; first += KEYS, now = 1 - now) {
    tile_at(first + KEYS, tiles[1 - now]);
    const bool limited = visible.limit(first, first + tiles[now].count);
    attention.attend(tiles[now], tiles[1 - now], limited ? visible.lowest() : nullptr,
                     limited ? visible.highest() : nullptr, block.scale);
  }
  attention.results([&](std::int64_t q, const bf16* values) {
    std::int64_t t = sequence * block.rows + q / group, head = kv_head * group + q % group;
    std::memcpy(out_THK + (t * block.heads + head) * width, values, sizeof(bf16) * static_cast<std::size_t>(width));
  });
}

}  // namespace

// out[t, h] of all block rows of all sequences. window 0 = none.
OUTRIDER_API void outrider_attend_block(
    const bf16* qkv_TNK, const bf16* gain_NK, const float* cosine, const float* sine, const bf16* context_keys,
    const bf16* context_values, const std::int64_t* num_keys_S, const std::int64_t* pages,
    std::int64_t pages_row, std::int64_t page_size, std::int64_t sequences, std::int64_t rows, std::int64_t heads,
    std::int64_t kv_heads, std::int64_t width, float eps, float scale, std::int64_t causal, std::int64_t window,
    std::int64_t from_anchor, bf16* out_THK, std::int64_t num_threads) {
  const Block block{qkv_TNK, gain_NK, num_keys_S, rows, heads, kv_heads, width, eps, scale};
  const Mask mask{causal != 0, from_anchor != 0, window};
  const Rotation rotation{cosine, sine, width / 2};
  const PageTable table{pages, pages_row, page_size};
  std::int64_t num_keys = 0;  // of all sequences, those of their own block included
  for (std::int64_t s = 0; s < sequences; ++s) num_keys += num_keys_S[s] + rows;
  const std::int64_t work = rows * heads * num_keys * 2 * width;
  parallel_parts(work < MIN_PARALLEL_WORK ? 1 : static_cast<int>(num_threads), static_cast<int>(sequences * kv_heads),
                 [&](int part) {
                   attend_group(block, mask, rotation, table, context_keys, context_values, part / kv_heads,
                                part % kv_heads, out_THK);
                 });
}
OUTRIDER_OP(attend_block)

// Normed, rotated keys and plain values of context rows into the cache [2, layers, cache rows, kv heads, width].
// kv: [rows, layers, 2, kv heads, width]; gain: [layers, width]. Rows for cache row -1 go nowhere.
OUTRIDER_API void outrider_store_context(const bf16* kv, const bf16* gain, const std::int64_t* position_T,
                                         const float* cosine, const float* sine, const std::int64_t* cache_row_T,
                                         std::int64_t rows, std::int64_t layers, std::int64_t kv_heads,
                                         std::int64_t width, float eps, std::int64_t cache_rows, bf16* cache,
                                         std::int64_t num_threads) {
  const Rotation rotation{cosine, sine, width / 2};
  const std::int64_t part = kv_heads * width;
  parallel_ranges(static_cast<int>(num_threads), rows, 1, rows * layers * part * 8,
                  [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t t = begin; t < end; ++t) {
                      if (cache_row_T[t] < 0) continue;
                      for (std::int64_t l = 0; l < layers; ++l) {
                        const bf16* source = kv + (t * layers + l) * 2 * part;
                        bf16* keys = cache + (l * cache_rows + cache_row_T[t]) * part;
                        for (std::int64_t j = 0; j < kv_heads; ++j) {
                          norm_row(source + j * width, gain + l * width, eps, width, keys + j * width);
                          rotation.apply(keys + j * width, position_T[t]);
                        }
                        std::memcpy(keys + layers * cache_rows * part, source + part,
                                    sizeof(bf16) * static_cast<std::size_t>(part));
                      }
                    }
                  });
}
OUTRIDER_OP(store_context)

}  // namespace outrider
