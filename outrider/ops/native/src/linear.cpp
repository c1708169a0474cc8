// Dense product y = x W^T in bfloat16, with float32 sums and one rounding.
//
// Weights are packed once. Outputs are cut into vectors of W, and these into groups of GROUP vectors or one less. A group
// holds, for each pair of neighbouring inputs, the pairs of all its outputs. So a tile reads its weights front to back,
// which is what the processor's prefetchers follow best (several streams at once measured slower), with enough chains
// of sums to hide their latency; a pair is what vdpbf16ps multiplies (or two float32 multiply-adds, in the order even,
// odd). Missing outputs and an odd last input are zeros. AMX would read the same pairs as tile rows.
//
// Every output is one chain of multiply-adds over ascending inputs, whatever the number of rows: register tiles
// over rows and outputs only interleave chains.
#include <utility>
#include <vector>

#include "parallel.h"
#include "vec.h"

namespace outrider {
namespace {

constexpr int GROUP = 48 / Vec::W;
// A worker pays from about here on: waking it costs as much as a hundred kilobytes of weights.
constexpr std::int64_t WORK_PER_THREAD = 1 << 18;

#if defined(__AVX512BF16__)
using Input = bf16;  // rows are read as they are
#else
using Input = float;  // rows are widened once per call
#endif

// How a weight is cut.
struct Groups {
  std::int64_t num_vecs, num_pairs, num_groups;

  Groups(std::int64_t num_out, std::int64_t num_in)
      : num_vecs(ceil_div(num_out, Vec::W)), num_pairs(ceil_div(num_in, 2)), num_groups(ceil_div(num_vecs, GROUP)) {}

  std::int64_t first_vec(std::int64_t group) const {
    return num_vecs / num_groups * group + min64(group, num_vecs % num_groups);
  }
  std::int64_t offset(std::int64_t vec) const { return vec * num_pairs * 2 * Vec::W; }  // in elements
};

struct Product {
  const Input* x;
  std::int64_t x_stride;
  const bf16* packed;
  std::int64_t num_in, num_out;
  Groups groups;
  bf16* out;
};

// A run of vectors of one group.
struct Run {
  const bf16* weights;  // first pair
  std::int64_t step;    // elements from pair to pair
  std::int64_t column;
};

// Register tiles: as many sums as hide the latency of one and leave room for the operands.
//
// From PREFETCHING_ROWS on, arithmetic keeps the processor from looking far enough ahead in the weights by itself, and a
// prefetch into the second cache, some bytes ahead, pays: 3.3 to 2.7 ms for 69 MB from memory and 8 rows. With fewer
// rows it only gets in the way of the processor's own, and so it does where half a group is passed at a time.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 8;
constexpr int vecs_at_once(int) { return GROUP; }
#if defined(__AVX512BF16__)
constexpr int PREFETCHING_ROWS = 6;
#else
constexpr int PREFETCHING_ROWS = 3;
#endif
#else
constexpr int MAX_ROWS = 4;
constexpr int vecs_at_once(int rows) { return rows <= 2 ? GROUP : GROUP / 2; }
constexpr int PREFETCHING_ROWS = MAX_ROWS + 1;
#endif
constexpr std::int64_t PREFETCH_BYTES = 1 << 14;

// V vectors, R rows.
template <int R, int V>
void tile(const Product& p, std::int64_t row, const Run& run) {
  Vec acc[R][V];
  OUTRIDER_UNROLL
  for (int r = 0; r < R; ++r) {
    OUTRIDER_UNROLL
    for (int v = 0; v < V; ++v) acc[r][v] = zero();
  }
  const bf16* w = run.weights;
  const Input* x = p.x + row * p.x_stride;
  const std::int64_t stride = p.x_stride, num_pairs = p.num_in / 2;

  auto step = [&](auto pair_of_row) {
    OUTRIDER_UNROLL
    for (int v = 0; v < V; ++v) {
      const bf16* at = w + v * 2 * Vec::W;
      if (R >= PREFETCHING_ROWS) __builtin_prefetch(at + PREFETCH_BYTES / sizeof(bf16), 0, 2);
#if defined(__AVX512BF16__)
      Pairs weights = load_pairs(at);
      OUTRIDER_UNROLL
      for (int r = 0; r < R; ++r) acc[r][v] = dot_pairs(acc[r][v], weights, splat_pair(pair_of_row(r)));
#else
      Vec even, odd;
      load_even_odd(at, even, odd);
      OUTRIDER_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto values = pair_of_row(r);
        acc[r][v] = fma(even, splat(values.even), acc[r][v]);
        acc[r][v] = fma(odd, splat(values.odd), acc[r][v]);
      }
#endif
    }
    w += run.step;
  };

#if defined(__AVX512BF16__)
  for (std::int64_t k = 0; k < num_pairs; ++k) {
    step([&](int r) {
      std::uint32_t pair;
      std::memcpy(&pair, x + r * stride + 2 * k, sizeof pair);
      return pair;
    });
  }
  if (p.num_in & 1) step([&](int r) { return std::uint32_t{x[r * stride + 2 * num_pairs]}; });
#else
  struct Two {
    float even, odd;
  };
  for (std::int64_t k = 0; k < num_pairs; ++k) {
    step([&](int r) { return Two{x[r * stride + 2 * k], x[r * stride + 2 * k + 1]}; });
  }
  if (p.num_in & 1) step([&](int r) { return Two{x[r * stride + 2 * num_pairs], 0.0f}; });
#endif

  OUTRIDER_UNROLL
  for (int r = 0; r < R; ++r) {
    OUTRIDER_UNROLL
    for (int v = 0; v < V; ++v) {
      std::int64_t column = run.column + v * Vec::W;
      std::int64_t lanes = p.num_out - column;
      bf16* at = p.out + (row + r) * p.num_out + column;
      if (lanes >= Vec::W) {
        store(at, acc[r][v]);
      } else {
        store_n(at, acc[r][v], static_cast<int>(lanes));
      }
    }
  }
}

using Tile = void (*)(const Product&, std::int64_t, const Run&);

template <int R, int... V>
constexpr Tile tile_of(int vecs, std::integer_sequence<int, V...>) {
  constexpr Tile TILES[] = {tile<R, V + 1>...};
  return TILES[vecs - 1];
}

// All vectors of a group.
template <int R>
void row_tile(const Product& p, std::int64_t row, std::int64_t group) {
  constexpr int AT_ONCE = vecs_at_once(R);
  const std::int64_t first = p.groups.first_vec(group), end = p.groups.first_vec(group + 1);
  Run run{p.packed + p.groups.offset(first), (end - first) * 2 * Vec::W, first * Vec::W};
  for (std::int64_t vec = first; vec < end; vec += AT_ONCE) {
    int count = static_cast<int>(min64(AT_ONCE, end - vec));
    tile_of<R>(count, std::make_integer_sequence<int, AT_ONCE>{})(p, row, run);
    run.weights += count * 2 * Vec::W;
    run.column += count * Vec::W;
  }
}

using RowTile = void (*)(const Product&, std::int64_t, std::int64_t);
constexpr RowTile ROW_TILES[] = {
    nullptr, row_tile<1>, row_tile<2>, row_tile<3>, row_tile<4>, row_tile<5>, row_tile<6>, row_tile<7>, row_tile<8>,
};

// All rows pass a group before the next one is read: it stays in the nearest caches meanwhile.
void groups_of_outputs(const Product& p, std::int64_t num_rows, std::int64_t begin, std::int64_t end) {
  for (std::int64_t group = begin; group < end; ++group) {
    for (std::int64_t row = 0; row < num_rows; row += MAX_ROWS) {
      ROW_TILES[min64(MAX_ROWS, num_rows - row)](p, row, group);
    }
  }
}

}  // namespace

// Elements of a packed bfloat16 weight.
OUTRIDER_API std::int64_t outrider_linear_packed_size(std::int64_t num_out, std::int64_t num_in) {
  const Groups groups(num_out, num_in);
  return groups.offset(groups.num_vecs);
}

// weight: [num_out, num_in], rows row_stride apart. packed: linear_packed_size elements.
OUTRIDER_API void outrider_linear_pack(const bf16* weight, std::int64_t row_stride, std::int64_t num_out,
                                       std::int64_t num_in, bf16* packed) {
  const Groups groups(num_out, num_in);
  for (std::int64_t group = 0; group < groups.num_groups; ++group) {
    const std::int64_t begin = groups.first_vec(group) * Vec::W, end = groups.first_vec(group + 1) * Vec::W;
    for (std::int64_t k = 0; k < num_in; k += 2) {
      for (std::int64_t output = begin; output < end; ++output, packed += 2) {
        const bf16* from = weight + output * row_stride + k;
        packed[0] = output < num_out ? from[0] : bf16{0};
        packed[1] = output < num_out && k + 1 < num_in ? from[1] : bf16{0};
      }
    }
  }
}

// x: [num_rows, num_in], rows x_stride apart. out: [num_rows, num_out], contiguous.
OUTRIDER_API void outrider_linear(const bf16* x, std::int64_t num_rows, std::int64_t x_stride, const bf16* packed,
                                  std::int64_t num_out, std::int64_t num_in, bf16* out, std::int64_t num_threads) {
  if (num_rows == 0 || num_out == 0) return;
  const Groups groups(num_out, num_in);
#if defined(__AVX512BF16__)
  const Product p{x, x_stride, packed, num_in, num_out, groups, out};
#else
  static thread_local std::vector<float> wide;
  wide.resize(static_cast<std::size_t>(num_rows * num_in));
  for (std::int64_t row = 0; row < num_rows; ++row) {
    for (std::int64_t k = 0; k < num_in; k += Vec::W) {
      int lanes = static_cast<int>(min64(Vec::W, num_in - k));
      store_n(wide.data() + row * num_in + k, load_n(x + row * x_stride + k, lanes), lanes);
    }
  }
  const Product p{wide.data(), num_in, packed, num_in, num_out, groups, out};
#endif
  std::int64_t threads = min64(num_threads, max64(num_rows * num_out * num_in / WORK_PER_THREAD, 1));
  parallel_ranges(static_cast<int>(threads), groups.num_groups, 1, num_rows * num_out * num_in,
                  [&](std::int64_t begin, std::int64_t end) { groups_of_outputs(p, num_rows, begin, end); });
}
OUTRIDER_OP(linear)

}  // namespace outrider
