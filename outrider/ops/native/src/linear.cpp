// Dense product y = x W^T in bfloat16, with float32 sums and one rounding.
//
// Weights are packed once: groups of 32 outputs; in a group, for each pair of neighbouring inputs, the pairs of its
// 32 outputs. So a step of the inner loop reads 128 successive bytes, and a pair is what vdpbf16ps
// multiplies (or two float32 multiply-adds, in the order even, odd). Missing outputs and an odd last input are zeros.
// AMX would read the same pairs as tile rows.
//
// Every output is one chain of multiply-adds over ascending inputs, whatever the number of rows: register tiles
// over rows and outputs only interleave chains.
#include <vector>

#include "parallel.h"
#include "vec.h"

namespace outrider {
namespace {

constexpr int GROUP = 32;
constexpr int VECS = GROUP / Vec::W;  // vectors of a group
// A worker pays from about here on: waking it costs as much as a hundred kilobytes of weights.
constexpr std::int64_t WORK_PER_THREAD = 1 << 18;
// Groups that all row tiles pass before the next ones are read: they stay in the nearest caches meanwhile.
constexpr std::int64_t CHUNK_BYTES = 1 << 15;

#if defined(__AVX512BF16__)
using Input = bf16;  // rows are read as they are
#else
using Input = float;  // rows are widened once per call
#endif

struct Product {
  const Input* x;
  std::int64_t x_stride;
  const bf16* packed;
  std::int64_t num_in, num_out, group_size;  // group_size in elements
  bf16* out;
};

// V vectors from `first_vec` of NG successive groups, R rows.
template <int R, int NG, int V>
void tile(const Product& p, std::int64_t row, std::int64_t group, int first_vec) {
  constexpr int N = NG * V;
  Vec acc[R][N];
  OUTRIDER_UNROLL
  for (int r = 0; r < R; ++r) {
    OUTRIDER_UNROLL
    for (int j = 0; j < N; ++j) acc[r][j] = zero();
  }
  const bf16* w = p.packed + group * p.group_size + first_vec * 2 * Vec::W;
  const Input* x = p.x + row * p.x_stride;
  const std::int64_t stride = p.x_stride, group_size = p.group_size, num_pairs = p.num_in / 2;

  auto step = [&](std::int64_t pair, auto pair_of_row) {
    OUTRIDER_UNROLL
    for (int j = 0; j < N; ++j) {
      const bf16* at = w + (j / V) * group_size + pair * 2 * GROUP + (j % V) * 2 * Vec::W;
#if defined(__AVX512BF16__)
      Pairs weights = load_pairs(at);
      OUTRIDER_UNROLL
      for (int r = 0; r < R; ++r) acc[r][j] = dot_pairs(acc[r][j], weights, splat_pair(pair_of_row(r)));
#else
      Vec even, odd;
      load_even_odd(at, even, odd);
      OUTRIDER_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto values = pair_of_row(r);
        acc[r][j] = fma(even, splat(values.even), acc[r][j]);
        acc[r][j] = fma(odd, splat(values.odd), acc[r][j]);
      }
#endif
    }
  };

#if defined(__AVX512BF16__)
  for (std::int64_t k = 0; k < num_pairs; ++k) {
    step(k, [&](int r) {
      std::uint32_t pair;
      std::memcpy(&pair, x + r * stride + 2 * k, sizeof pair);
      return pair;
    });
  }
  if (p.num_in & 1) step(num_pairs, [&](int r) { return std::uint32_t{x[r * stride + 2 * num_pairs]}; });
#else
  struct Two {
    float even, odd;
  };
  for (std::int64_t k = 0; k < num_pairs; ++k) {
    step(k, [&](int r) { return Two{x[r * stride + 2 * k], x[r * stride + 2 * k + 1]}; });
  }
  if (p.num_in & 1) step(num_pairs, [&](int r) { return Two{x[r * stride + 2 * num_pairs], 0.0f}; });
#endif

  OUTRIDER_UNROLL
  for (int r = 0; r < R; ++r) {
    OUTRIDER_UNROLL
    for (int j = 0; j < N; ++j) {
      std::int64_t column = (group + j / V) * GROUP + (first_vec + j % V) * Vec::W;
      std::int64_t lanes = p.num_out - column;
      bf16* at = p.out + (row + r) * p.num_out + column;
      if (lanes >= Vec::W) {
        store(at, acc[r][j]);
      } else if (lanes > 0) {
        store_n(at, acc[r][j], static_cast<int>(lanes));
      }
    }
  }
}

// Register tiles: as many sums as hide the latency of one and leave room for the operands.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 8;
constexpr int groups_at_once(int rows) { return rows == 1 ? 4 : rows <= 4 ? 2 : 1; }
constexpr int vecs_at_once(int) { return VECS; }
#else
constexpr int MAX_ROWS = 4;
constexpr int groups_at_once(int rows) { return rows == 1 ? 2 : 1; }
constexpr int vecs_at_once(int rows) { return rows <= 2 ? VECS : VECS / 2; }
#endif

template <int R>
void row_tile(const Product& p, std::int64_t row, std::int64_t begin, std::int64_t end) {
  constexpr int NG = groups_at_once(R), V = vecs_at_once(R);
  std::int64_t group = begin;
  for (; group + NG <= end; group += NG) {
    for (int vec = 0; vec < VECS; vec += V) tile<R, NG, V>(p, row, group, vec);
  }
  for (; group < end; ++group) {
    for (int vec = 0; vec < VECS; vec += V) tile<R, 1, V>(p, row, group, vec);
  }
}

using RowTile = void (*)(const Product&, std::int64_t, std::int64_t, std::int64_t);
constexpr RowTile ROW_TILES[] = {
    nullptr, row_tile<1>, row_tile<2>, row_tile<3>, row_tile<4>, row_tile<5>, row_tile<6>, row_tile<7>, row_tile<8>,
};

void groups_of_outputs(const Product& p, std::int64_t num_rows, std::int64_t begin, std::int64_t end) {
  std::int64_t group_bytes = p.group_size * static_cast<std::int64_t>(sizeof(bf16));
  std::int64_t chunk = num_rows <= MAX_ROWS ? end - begin : max64(CHUNK_BYTES / max64(group_bytes, 1), 2);
  for (std::int64_t first = begin; first < end; first += chunk) {
    for (std::int64_t row = 0; row < num_rows; row += MAX_ROWS) {
      ROW_TILES[min64(MAX_ROWS, num_rows - row)](p, row, first, min64(first + chunk, end));
    }
  }
}

}  // namespace

// Elements of a packed bfloat16 weight.
OUTRIDER_API std::int64_t outrider_linear_packed_size(std::int64_t num_out, std::int64_t num_in) {
  return ceil_div(num_out, GROUP) * ceil_div(num_in, 2) * 2 * GROUP;
}

// weight: [num_out, num_in], rows row_stride apart. packed: linear_packed_size elements.
OUTRIDER_API void outrider_linear_pack(const bf16* weight, std::int64_t row_stride, std::int64_t num_out,
                                       std::int64_t num_in, bf16* packed) {
  for (std::int64_t group = 0; group < ceil_div(num_out, GROUP); ++group) {
    for (std::int64_t k = 0; k < ceil_div(num_in, 2) * 2; k += 2) {
      for (int lane = 0; lane < GROUP; ++lane, packed += 2) {
        std::int64_t output = group * GROUP + lane;
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
  std::int64_t num_groups = ceil_div(num_out, GROUP);
  std::int64_t group_size = ceil_div(num_in, 2) * 2 * GROUP;
#if defined(__AVX512BF16__)
  const Product p{x, x_stride, packed, num_in, num_out, group_size, out};
#else
  static thread_local std::vector<float> wide;
  wide.resize(static_cast<std::size_t>(num_rows * num_in));
  for (std::int64_t row = 0; row < num_rows; ++row) {
    for (std::int64_t k = 0; k < num_in; k += Vec::W) {
      int lanes = static_cast<int>(min64(Vec::W, num_in - k));
      store_n(wide.data() + row * num_in + k, load_n(x + row * x_stride + k, lanes), lanes);
    }
  }
  const Product p{wide.data(), num_in, packed, num_in, num_out, group_size, out};
#endif
  std::int64_t threads = min64(num_threads, max64(num_rows * num_out * num_in / WORK_PER_THREAD, 1));
  parallel_ranges(static_cast<int>(threads), num_groups, 1, num_rows * num_out * num_in,
                  [&](std::int64_t begin, std::int64_t end) { groups_of_outputs(p, num_rows, begin, end); });
}
OUTRIDER_OP(linear)

}  // namespace outrider
