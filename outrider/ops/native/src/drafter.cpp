// Attention of DSpark's blocks and the rows of its context cache. See outrider/ops/block_attention.py.
//
// Rounding to bfloat16 beyond that of the torch form: the softmax weights (tiles.h).

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
  const std::int64_t* position_T;
  const std::int64_t* num_keys_S;
  std::int64_t rows, heads, kv_heads, width;  // rows of one block
  float eps, scale;
  std::int64_t row_size() const { return (heads + 2 * kv_heads) * width; }
};

struct Mask {
  bool causal, from_anchor;
  std::int64_t window;  // 0 = none

  // First context position that block row g sees.
  std::int64_t context_begin(std::int64_t num_keys, std::int64_t g) const {
    return window == 0 ? 0 : max64(0, num_keys + (from_anchor ? -1 : g) - window + 1);
  }
  // Block rows that row g sees.
  int block_begin(std::int64_t g) const {
    return window == 0 || from_anchor ? 0 : static_cast<int>(max64(0, g - window + 1));
  }
  int block_end(std::int64_t g, std::int64_t rows) const { return static_cast<int>(causal ? g + 1 : rows); }
};

// All query heads of one key head of one sequence.
void attend_group(const Block& block, const Mask& mask, const Rotation& rotation, const PageTable& table,
                  const bf16* context_keys, const bf16* context_values, std::int64_t sequence, std::int64_t kv_head,
                  bf16* out_THK) {
  static thread_local TileAttention tiles;
  static thread_local Buffer<bf16> query_buffer;
  static thread_local std::vector<const bf16*> queries;
  static thread_local std::vector<int> lowest, highest;
  const std::int64_t group = block.heads / block.kv_heads, width = block.width;
  const std::int64_t num_queries = block.rows * group, num_keys = block.num_keys_S[sequence];
  const std::size_t bytes = sizeof(bf16) * static_cast<std::size_t>(width);
  const bf16* rows = block.qkv_TNK + sequence * block.rows * block.row_size();
  const std::int64_t* positions = block.position_T + sequence * block.rows;
  bf16* rotated = query_buffer.at_least(num_queries * width);
  queries.resize(static_cast<std::size_t>(num_queries));
  lowest.resize(static_cast<std::size_t>(num_queries));
  highest.resize(static_cast<std::size_t>(num_queries));
  for (std::int64_t q = 0; q < num_queries; ++q) {
    std::int64_t g = q / group, head = kv_head * group + q % group;
    bf16* query = rotated + q * width;
    norm_row(rows + g * block.row_size() + head * width, block.gain_NK + head * width, block.eps, width, query);
    rotation.apply(query, positions[g]);
    queries[q] = query;
  }
  tiles.start(num_queries, width, width, true);

  std::int64_t first_seen = mask.context_begin(num_keys, 0);  // later rows see no earlier keys
  for (std::int64_t begin = first_seen / TILE * TILE; begin < num_keys; begin += TILE) {
    const std::int64_t end = min64(begin + TILE, num_keys);
    table.for_rows(sequence, begin, end, [&](std::int64_t i, std::int64_t row) {
      std::int64_t offset = (row * block.kv_heads + kv_head) * width;
      std::memcpy(tiles.key_row(i), context_keys + offset, bytes);
      std::memcpy(tiles.value_row(i), context_values + offset, bytes);
    });
    tiles.clear_rows(end - begin);
    tiles.pack();
    for (std::int64_t q = 0; q < num_queries; ++q) {
      lowest[q] = static_cast<int>(min64(max64(mask.context_begin(num_keys, q / group) - begin, 0), TILE));
      highest[q] = static_cast<int>(end - begin);
    }
    tiles.attend(queries.data(), lowest.data(), highest.data(), block.scale, 0);
  }

  for (std::int64_t g = 0; g < block.rows; ++g) {
    const bf16* row = rows + g * block.row_size();
    std::int64_t head = block.heads + kv_head;
    norm_row(row + head * width, block.gain_NK + head * width, block.eps, width, tiles.key_row(g));
    rotation.apply(tiles.key_row(g), positions[g]);
    std::memcpy(tiles.value_row(g), row + (head + block.kv_heads) * width, bytes);
  }
  tiles.clear_rows(block.rows);
  tiles.pack();
  for (std::int64_t q = 0; q < num_queries; ++q) {
    lowest[q] = mask.block_begin(q / group);
    highest[q] = mask.block_end(q / group, block.rows);
  }
  tiles.attend(queries.data(), lowest.data(), highest.data(), block.scale, 0);
  for (std::int64_t q = 0; q < num_queries; ++q) {
    std::int64_t t = sequence * block.rows + q / group, head = kv_head * group + q % group;
    tiles.result(q, out_THK + (t * block.heads + head) * width, width);
  }
}

}  // namespace

// out[t, h] of all block rows of all sequences. window 0 = none.
OUTRIDER_API void outrider_attend_block(
    const bf16* qkv_TNK, const bf16* gain_NK, const std::int64_t* position_T, const float* cosine, const float* sine,
    const bf16* context_keys, const bf16* context_values, const std::int64_t* num_keys_S, const std::int64_t* pages,
    std::int64_t pages_row, std::int64_t page_size, std::int64_t sequences, std::int64_t rows, std::int64_t heads,
    std::int64_t kv_heads, std::int64_t width, float eps, float scale, std::int64_t causal, std::int64_t window,
    std::int64_t from_anchor, bf16* out_THK, std::int64_t num_threads) {
  const Block block{qkv_TNK, gain_NK, position_T, num_keys_S, rows, heads, kv_heads, width, eps, scale};
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
// kv: [rows, layers, 2, kv heads, width]; gain: [layers, width].
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
