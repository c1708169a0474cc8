// Routed experts: router, grouped products over ragged rows, gated activation, combine; reference: ops/moe.py.
//
// Dims: T rows, D model width, E experts, X experts per row, L width the experts work in, I inner width,
// R = T X (row, expert) pairs, sorted by expert inside a call.
//
// Products. Outputs lie in blocks of 16, inputs in groups of 32 (the MXFP4 group). An output element is
//     total = 0;  for each group, ascending:  sum = 0;  sum += w x over the group, ascending;  total += sum scale
// in float32, the same for every number of rows, so a row's bits are its own. The weights enter `sum` as plain
// E2M1 values and the scale, a power of two, afterwards: exact, so packed and unpacked weights give the same bits
// (unless a value leaves the range: a sum of unscaled products can overflow where the scaled one does not, and
// vdpbf16ps takes subnormal bfloat16 for zero). Each expert's weights are read from memory once per call and
// stay in the nearest cache for all its rows.
//
// Memory. An expert is one run of bytes, in the order it is read: the strips of its first matrix, then those of its
// second. Which experts come next is known once the router has chosen, so their strips are fetched ahead of use.
//
// An instruction set supplies Operand, STEP, Weights, Inputs, multiply and the two sources Packed and Unpacked. AMX
// would replace `tile`: a block and group of Unpacked is one of its weight operands as it stands (16 pairs x 16
// outputs) and one tile product is one `sum`.
#include <cmath>
#include <cstdlib>
#include <memory>
#include <utility>

#include "common.h"
#include "parallel.h"
#include "vec.h"

namespace outrider {
namespace {

constexpr int BLOCK = 16;                      // outputs side by side
constexpr int GROUP = 32;                      // inputs with one scale
constexpr int CHUNK = 8;                       // inputs whose codes of one block fill 64 bytes
constexpr int CODE_BYTES = BLOCK * GROUP / 2;  // of one block and group
constexpr int PARTS = BLOCK / Vec::W;          // vectors of a block
constexpr int STRIP = 4;                       // blocks of a strip, the unit of work
constexpr int STRIP_WIDTH = STRIP * BLOCK;
constexpr int LINE = 64;                       // bytes of a cache line
constexpr int FETCH_BYTES = 1 << 14;           // of one strip, ahead of use
constexpr int FETCH_AHEAD = 1 << 14;           // of several, about
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 8;
constexpr int ROUTER_ROWS = 4;
#else
constexpr int TILE_ROWS = 4;
constexpr int ROUTER_ROWS = 1;
#endif

struct Sums {
  Vec part[PARTS];
};

inline Sums no_sums() {
  Sums sums;
  for (int i = 0; i < PARTS; ++i) sums.part[i] = zero();
  return sums;
}

// ---- What differs between instruction sets -------------------------------------------------------------------
//
// Codes of one block and chunk of 8 inputs: 16 dwords, one per output; the low word holds inputs 0, 2, 4, 6 (lowest
// bits first), the high word 1, 3, 5, 7. Unpacked values of one block and pair of inputs: 16 dwords likewise.

inline std::uint32_t load_dword(const void* p) {
  std::uint32_t dword;
  std::memcpy(&dword, p, sizeof dword);
  return dword;
}

#if defined(__AVX512BF16__)

using Operand = bf16;       // an input as the products read it
constexpr int STEP = 2;     // inputs that one instruction multiplies
using Weights = Pairs;      // of one block and step
using Inputs = Pairs;       // of one row and step

inline Inputs inputs_at(const Operand* row) { return splat_pair(load_dword(row)); }

inline void multiply(Sums& sums, Inputs inputs, Weights weights) {
  sums.part[0] = dot_pairs(sums.part[0], inputs, weights);
}

using RawCodes = __m512i;

struct Table {  // E2M1 as bfloat16; twice, since five bits of a word choose and the fifth belongs to the next code
  __m512i values = _mm512_broadcast_i64x4(_mm256_setr_epi16(
      0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, static_cast<short>(0x8000),
      static_cast<short>(0xbf00), static_cast<short>(0xbf80), static_cast<short>(0xbfc0), static_cast<short>(0xc000),
      static_cast<short>(0xc040), static_cast<short>(0xc080), static_cast<short>(0xc0c0)));

  template <int S>
  Weights decode(RawCodes raw) const {
    __m512i codes = S == 0 ? raw : _mm512_srli_epi16(raw, 4 * S);
    return {(__m512bh)_mm512_permutexvar_epi16(codes, values)};
  }
};

inline RawCodes load_codes(const std::uint8_t* p) { return _mm512_loadu_si512(p); }

template <int S>
inline Weights unpacked_at(const bf16* chunk) {
  return load_pairs(chunk + S * 2 * BLOCK);
}

#else

using Operand = float;
constexpr int STEP = 1;
using Weights = Sums;
using Inputs = Vec;

inline Inputs inputs_at(const Operand* row) { return splat(*row); }

inline void multiply(Sums& sums, Inputs inputs, const Weights& weights) {
  for (int i = 0; i < PARTS; ++i) sums.part[i] = fma(inputs, weights.part[i], sums.part[i]);
}

// First bit of the code of input S of a chunk.
constexpr int code_bit(int s) { return 4 * (s / 2) + 16 * (s % 2); }

#if defined(__AVX512F__)

using RawCodes = __m512i;

struct Table {  // E2M1; the four lowest bits of a dword choose
  __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f,
                                 -3.0f, -4.0f, -6.0f);

  template <int S>
  Weights decode(RawCodes raw) const {
    return {{{_mm512_permutexvar_ps(_mm512_srli_epi32(raw, code_bit(S)), values)}}};
  }
};

inline RawCodes load_codes(const std::uint8_t* p) { return _mm512_loadu_si512(p); }

template <int S>
inline Weights unpacked_at(const bf16* chunk) {
  __m512i pairs = _mm512_loadu_si512(chunk + S / 2 * 2 * BLOCK);
  __m512i bits = S % 2 ? _mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000)) : _mm512_slli_epi32(pairs, 16);
  return {{{_mm512_castsi512_ps(bits)}}};
}

#else

struct RawCodes {
  __m256i half[PARTS];
};

struct Table {  // magnitudes of E2M1: the three lowest bits of a dword choose; bit 3 is the sign
  __m256 values = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);

  template <int S>
  Weights decode(const RawCodes& raw) const {
    Weights weights;
    for (int i = 0; i < PARTS; ++i) {
      __m256 size = _mm256_permutevar8x32_ps(values, _mm256_srli_epi32(raw.half[i], code_bit(S)));
      __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(raw.half[i], 28 - code_bit(S)));
      weights.part[i] = {_mm256_xor_ps(size, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)))};
    }
    return weights;
  }
};

inline RawCodes load_codes(const std::uint8_t* p) {
  const __m256i* halves = reinterpret_cast<const __m256i*>(p);
  return {{_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)}};
}

template <int S>
inline Weights unpacked_at(const bf16* chunk) {
  Weights weights;
  for (int i = 0; i < PARTS; ++i) {
    __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(chunk + S / 2 * 2 * BLOCK) + i);
    __m256i bits = S % 2 ? _mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000)) : _mm256_slli_epi32(pairs, 16);
    weights.part[i] = {_mm256_castsi256_ps(bits)};
  }
  return weights;
}

#endif
#endif

// The scales 2^(code - 127) of a block; code 0 is the subnormal 2^-127.
inline Sums load_scales(const std::uint8_t* codes) {
  Sums scales;
  for (int i = 0; i < PARTS; ++i) {
#if defined(__AVX512F__)
    __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))), 23);
    scales.part[i] = {_mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(1 << 22)))};
#else
    __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i * Vec::W));
    __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
    scales.part[i] = {_mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(1 << 22)))};
#endif
  }
  return scales;
}

// ---- Weight sources: one strip of one matrix of one expert -----------------------------------------------------

struct Packed {  // codes [groups, blocks, CODE_BYTES], then scales [groups, blocks, BLOCK]
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  std::int64_t num_groups;
  int num_blocks;
  Table table = {};

  static constexpr std::int64_t CELL_BYTES = CODE_BYTES + BLOCK;  // of one block and group

  Packed(const std::uint8_t* strip, std::int64_t groups, int blocks)
      : codes(strip), scales(strip + groups * blocks * CODE_BYTES), num_groups(groups), num_blocks(blocks) {}

  using Raw = RawCodes;
  Raw chunk(std::int64_t block, std::int64_t group, int c) const {
    return load_codes(codes + (group * num_blocks + block) * CODE_BYTES + c * (CODE_BYTES / (GROUP / CHUNK)));
  }
  template <int S>
  Weights at(const Raw& raw) const {
    return table.decode<S>(raw);
  }
  void add_scaled(Sums& total, const Sums& sum, const Sums& scale) const {
    for (int i = 0; i < PARTS; ++i) total.part[i] = fma(sum.part[i], scale.part[i], total.part[i]);
  }
  Sums scale(std::int64_t block, std::int64_t group) const {
    return load_scales(scales + (group * num_blocks + block) * BLOCK);
  }
};

struct Unpacked {  // values [groups, blocks, GROUP / 2, BLOCK, 2]
  const bf16* values;
  std::int64_t num_groups;
  int num_blocks;

  static constexpr std::int64_t CELL_BYTES = BLOCK * GROUP * sizeof(bf16);

  Unpacked(const std::uint8_t* strip, std::int64_t groups, int blocks)
      : values(reinterpret_cast<const bf16*>(strip)), num_groups(groups), num_blocks(blocks) {}

  using Raw = const bf16*;
  Raw chunk(std::int64_t block, std::int64_t group, int c) const {
    return values + ((group * num_blocks + block) * GROUP + c * CHUNK) * BLOCK;
  }
  template <int S>
  Weights at(Raw raw) const {
    return unpacked_at<S>(raw);
  }
  void add_scaled(Sums& total, const Sums& sum, const Sums&) const {
    for (int i = 0; i < PARTS; ++i) total.part[i] = sum.part[i] + total.part[i];
  }
  Sums scale(std::int64_t, std::int64_t) const { return no_sums(); }
};

// One of the two matrices of all experts.
template <class Source>
struct Matrix {
  const std::uint8_t* first;  // of expert 0
  std::int64_t expert_bytes, num_blocks, num_groups;

  static std::int64_t bytes(std::int64_t num_blocks, std::int64_t num_groups) {
    return ceil_div(num_blocks * num_groups * Source::CELL_BYTES, LINE) * LINE;
  }
  std::int64_t strips() const { return ceil_div(num_blocks, STRIP); }
  std::int64_t strip_bytes() const { return STRIP * num_groups * Source::CELL_BYTES; }  // of all but the last
  int width(std::int64_t strip) const { return static_cast<int>(min64(STRIP, num_blocks - strip * STRIP)); }
  const std::uint8_t* at(std::int64_t expert, std::int64_t strip) const {
    return first + expert * expert_bytes + strip * strip_bytes();
  }
  Source source(std::int64_t expert, std::int64_t strip) const { return {at(expert, strip), num_groups, width(strip)}; }

  // Towards the second nearest cache: the begin of a strip. Of a long one the processor fetches the rest by itself.
  void fetch(std::int64_t expert, std::int64_t strip) const {
    prefetch(at(expert, strip), min64(width(strip) * num_groups * Source::CELL_BYTES, FETCH_BYTES));
  }
};

// ---- Products --------------------------------------------------------------------------------------------------

template <int S, int ROWS, int BLOCKS, class Source>
inline __attribute__((always_inline)) void step(
    const Source& source, const typename Source::Raw (&raw)[BLOCKS], const Operand* const* rows, std::int64_t first_input,
    Sums (&sum)[ROWS][BLOCKS]) {
  Weights weights[BLOCKS];
  for (int b = 0; b < BLOCKS; ++b) weights[b] = source.template at<S>(raw[b]);
  for (int r = 0; r < ROWS; ++r) {
    Inputs inputs = inputs_at(rows[r] + first_input + S * STEP);
    for (int b = 0; b < BLOCKS; ++b) multiply(sum[r][b], inputs, weights[b]);
  }
}

template <int ROWS, int BLOCKS, class Source, int... S>
inline __attribute__((always_inline)) void steps(
    const Source& source, const typename Source::Raw (&raw)[BLOCKS], const Operand* const* rows, std::int64_t first_input,
    Sums (&sum)[ROWS][BLOCKS], std::integer_sequence<int, S...>) {
  (step<S>(source, raw, rows, first_input, sum), ...);
}

// ROWS rows times BLOCKS blocks of a strip from first_block on, to out (STRIP_WIDTH floats a row).
template <int ROWS, int BLOCKS, class Source>
void tile(const Source& given, std::int64_t first_block, const Operand* const* rows, float* out) {
  const Source source = given;  // a copy of its own keeps the table in a register
  Sums total[ROWS][BLOCKS];
  for (int r = 0; r < ROWS; ++r)
    for (int b = 0; b < BLOCKS; ++b) total[r][b] = no_sums();
  for (std::int64_t group = 0; group < source.num_groups; ++group) {
    Sums sum[ROWS][BLOCKS];
    for (int r = 0; r < ROWS; ++r)
      for (int b = 0; b < BLOCKS; ++b) sum[r][b] = no_sums();
    for (int c = 0; c < GROUP / CHUNK; ++c) {
      typename Source::Raw raw[BLOCKS];
      for (int b = 0; b < BLOCKS; ++b) raw[b] = source.chunk(first_block + b, group, c);
      steps(source, raw, rows, group * GROUP + c * CHUNK, sum, std::make_integer_sequence<int, CHUNK / STEP>());
    }
    for (int b = 0; b < BLOCKS; ++b) {
      Sums scale = source.scale(first_block + b, group);
      for (int r = 0; r < ROWS; ++r) source.add_scaled(total[r][b], sum[r][b], scale);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int b = 0; b < BLOCKS; ++b)
      for (int i = 0; i < PARTS; ++i) store(out + r * STRIP_WIDTH + b * BLOCK + i * Vec::W, total[r][b].part[i]);
}

// Blocks that a tile of so many rows takes at once: as many sums as fit the registers, to hide the latency.
constexpr int tile_blocks(int rows) {
#if defined(__AVX512F__)
  return rows <= 2 ? 4 : 2;
#else
  return rows <= 1 ? 2 : 1;
#endif
}

template <int ROWS, class Source>
void strip_rows(const Source& source, const Operand* const* rows, float* out) {
  const int num_blocks = source.num_blocks;
  int b = 0;
  if constexpr (tile_blocks(ROWS) >= 4)
    for (; b + 4 <= num_blocks; b += 4) tile<ROWS, 4>(source, b, rows, out + b * BLOCK);
  if constexpr (tile_blocks(ROWS) >= 2)
    for (; b + 2 <= num_blocks; b += 2) tile<ROWS, 2>(source, b, rows, out + b * BLOCK);
  for (; b < num_blocks; ++b) tile<ROWS, 1>(source, b, rows, out + b * BLOCK);
}

template <class Source>
void strip_tile(
    const Source& source, const Operand* const* rows, int num_rows, float* out) {
  switch (num_rows) {
    case 1: return strip_rows<1>(source, rows, out);
    case 2: return strip_rows<2>(source, rows, out);
    case 3: return strip_rows<3>(source, rows, out);
    case 4: return strip_rows<4>(source, rows, out);
#if defined(__AVX512F__)
    case 5: return strip_rows<5>(source, rows, out);
    case 6: return strip_rows<6>(source, rows, out);
    case 7: return strip_rows<7>(source, rows, out);
    case 8: return strip_rows<8>(source, rows, out);
#endif
    default: return;  // no caller: tiles have 1 to TILE_ROWS rows
  }
}

// ---- One layer -------------------------------------------------------------------------------------------------

// Mirrors LayerArguments of ops/native/moe.py.
struct Layer {
  const float* gate;  // [E / 16, D, 16], absent outputs zero
  const float* correction_bias;
  // Per expert. The rows of w1 and w3 in blocks that alternate, then w2, each in strips and up to a whole cache line;
  // absent outputs and inputs are zero.
  const std::uint8_t* experts;
  std::int64_t is_packed;
  std::int64_t model_width, num_experts, top_k, width, inner;
  std::int64_t renormalize;
  std::int64_t activation;  // ACTIVATION_...
  float scaling, beta, linear_beta;
};

enum : std::int64_t { SILU = 0, SITU = 1, SITU_UNBOUNDED_LINEAR = 2 };

// Memory of a calling thread that is kept between calls; contents are not.
template <class T>
class Buffer {
 public:
  T* get(std::int64_t count) {
    if (count > capacity_) {
      std::size_t bytes = static_cast<std::size_t>(ceil_div(count * static_cast<std::int64_t>(sizeof(T)), 64) * 64);
      memory_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
      if (memory_ == nullptr) std::abort();  // as operator new without handlers: nothing to fall back to
      capacity_ = count;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> memory_;
  std::int64_t capacity_ = 0;
};

struct Scratch {
  Buffer<float> router_inputs, scores, weights;
  Buffer<std::int32_t> ids, order, starts, touched;
  Buffer<Operand> inputs, hidden;
  Buffer<bf16> outputs;
};

Scratch& scratch() {
  thread_local Scratch own;
  return own;
}

struct Routes {  // [T, X]
  const std::int32_t* ids;
  const float* weights;
};

// Run body(begin, end) over 0..count; several parts a thread, since experts have unequal numbers of rows.
template <class Body>
void spread(int num_threads, std::int64_t count, std::int64_t work, Body&& body) {
  if (num_threads <= 1 || count <= 1 || work < MIN_PARALLEL_WORK) return body(std::int64_t{0}, count);
  int num_parts = static_cast<int>(min64(count, 4 * static_cast<std::int64_t>(num_threads)));
  parallel_parts(num_threads, num_parts,
                 [&](int part) { body(count * part / num_parts, count * (part + 1) / num_parts); });
}

// ---- Router ----------------------------------------------------------------------------------------------------

// Scores of ROWS rows for one block of experts: four sums over inputs j mod 4, then (0 + 1) + (2 + 3), sigmoid.
template <int ROWS>
void router_tile(const float* gate_block, std::int64_t num_inputs, const float* x, float* scores, std::int64_t stride) {
  Sums chain[ROWS][4];
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < 4; ++j) chain[r][j] = no_sums();
  std::int64_t d = 0;
  for (; d + 4 <= num_inputs; d += 4)
    for (int j = 0; j < 4; ++j)
      for (int i = 0; i < PARTS; ++i) {
        Vec weights = load(gate_block + (d + j) * BLOCK + i * Vec::W);
        for (int r = 0; r < ROWS; ++r)
          chain[r][j].part[i] = fma(splat(x[r * num_inputs + d + j]), weights, chain[r][j].part[i]);
      }
  for (int j = 0; j < 3; ++j) {
    if (d + j >= num_inputs) break;
    for (int i = 0; i < PARTS; ++i) {
      Vec weights = load(gate_block + (d + j) * BLOCK + i * Vec::W);
      for (int r = 0; r < ROWS; ++r)
        chain[r][j].part[i] = fma(splat(x[r * num_inputs + d + j]), weights, chain[r][j].part[i]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int i = 0; i < PARTS; ++i) {
      Vec logits = (chain[r][0].part[i] + chain[r][1].part[i]) + (chain[r][2].part[i] + chain[r][3].part[i]);
      store(scores + r * stride + i * Vec::W, sigmoid(logits));
    }
}

// Whether a goes before b: the larger, a NaN before all numbers (as torch sorts descending).
inline bool before(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// The top_k experts of one row by biased score, the lowest id among equals, ascending by id; their weights.
void choose(const Layer& layer, const float* scores, std::int32_t* ids, float* weights) {
  int num_chosen = 0, top_k = static_cast<int>(layer.top_k);
  for (std::int32_t e = 0; e < layer.num_experts; ++e) {  // ids and weights: chosen so far, best first
    float biased = scores[e] + layer.correction_bias[e];
    if (num_chosen == top_k && !before(biased, weights[top_k - 1])) continue;
    int place = num_chosen == top_k ? top_k - 1 : num_chosen++;
    for (; place > 0 && before(biased, weights[place - 1]); --place) {
      ids[place] = ids[place - 1];
      weights[place] = weights[place - 1];
    }
    ids[place] = e;
    weights[place] = biased;
  }
  for (int i = 1; i < top_k; ++i) {  // ascending ids fix the order of all sums over experts
    std::int32_t id = ids[i];
    int place = i;
    for (; place > 0 && ids[place - 1] > id; --place) ids[place] = ids[place - 1];
    ids[place] = id;
  }
  float total = 0.0f;
  for (int i = 0; i < top_k; ++i) {
    weights[i] = scores[ids[i]];
    total = i == 0 ? weights[0] : total + weights[i];
  }
  for (int i = 0; i < top_k; ++i) {
    if (layer.renormalize) weights[i] = weights[i] / (total + 1e-20f);
    weights[i] = weights[i] * layer.scaling;
  }
}

Routes route(const Layer& layer, const bf16* x, std::int64_t x_stride, std::int64_t num_rows, int num_threads) {
  Scratch& own = scratch();
  std::int64_t num_inputs = layer.model_width, num_blocks = ceil_div(layer.num_experts, BLOCK);
  std::int64_t stride = num_blocks * BLOCK;
  float* wide = own.router_inputs.get(num_rows * num_inputs);
  float* scores = own.scores.get(num_rows * stride);
  std::int32_t* ids = own.ids.get(num_rows * layer.top_k);
  float* weights = own.weights.get(num_rows * layer.top_k);
  for (std::int64_t t = 0; t < num_rows; ++t) {
    const bf16* row = x + t * x_stride;
    float* out = wide + t * num_inputs;
    std::int64_t d = 0;
    for (; d + Vec::W <= num_inputs; d += Vec::W) store(out + d, load(row + d));
    for (; d < num_inputs; ++d) out[d] = to_float(row[d]);
  }
  spread(num_threads, num_blocks, num_rows * stride * num_inputs, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      const float* gate = layer.gate + block * num_inputs * BLOCK;
      std::int64_t t = 0;
      for (; t + ROUTER_ROWS <= num_rows; t += ROUTER_ROWS)
        router_tile<ROUTER_ROWS>(gate, num_inputs, wide + t * num_inputs, scores + t * stride + block * BLOCK, stride);
      for (; t < num_rows; ++t)
        router_tile<1>(gate, num_inputs, wide + t * num_inputs, scores + t * stride + block * BLOCK, stride);
    }
  });
  for (std::int64_t t = 0; t < num_rows; ++t)
    choose(layer, scores + t * stride, ids + t * layer.top_k, weights + t * layer.top_k);
  return {ids, weights};
}

// ---- Experts ---------------------------------------------------------------------------------------------------

// Pairs sorted by expert, in the order of rows within one.
struct Grouping {
  const std::int32_t* order;    // [R] place of the sorted pair in [T, X]
  const std::int32_t* starts;   // [E + 1] first sorted pair of each expert
  const std::int32_t* touched;  // experts that have rows
  std::int64_t num_touched;
};

Grouping group_by_expert(const std::int32_t* ids, std::int64_t num_pairs, std::int64_t num_experts) {
  Scratch& own = scratch();
  std::int32_t* order = own.order.get(num_pairs);
  std::int32_t* starts = own.starts.get(num_experts + 2);
  std::int32_t* touched = own.touched.get(num_experts);
  std::memset(starts, 0, sizeof(std::int32_t) * static_cast<std::size_t>(num_experts + 2));
  for (std::int64_t p = 0; p < num_pairs; ++p) ++starts[ids[p] + 2];
  std::int64_t num_touched = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    if (starts[e + 2]) touched[num_touched++] = static_cast<std::int32_t>(e);
    starts[e + 2] += starts[e + 1];
  }
  // starts[e + 1] is where the next pair of expert e goes, and so its end when all are placed.
  for (std::int64_t p = 0; p < num_pairs; ++p) order[starts[ids[p] + 1]++] = static_cast<std::int32_t>(p);
  return {order, starts, touched, num_touched};
}

inline Vec rounded(Vec a) { return widen(narrow(a)); }

// The gated activation of bfloat16 values, in the order of operations of ops/activation.py, except that x / beta is
// x (1 / beta).
inline Vec glu(const Layer& layer, Vec gate, Vec up) {
  if (layer.activation == SILU) return gate * sigmoid(gate) * up;
  Vec bounded = tanh(gate * splat(1.0f / layer.beta)) * splat(layer.beta) * sigmoid(gate);
  if (layer.activation == SITU) up = tanh(up * splat(1.0f / layer.linear_beta)) * splat(layer.linear_beta);
  return bounded * up;
}

inline void store_operand(float* p, Vec a) { store(p, rounded(a)); }
inline void store_operand(bf16* p, Vec a) { store(p, a); }

// One product of all touched experts: finish(first_block, sorted pair, outputs of the strip, blocks of the strip).
// What is read after it: strips of `next`, in the same order of experts.
template <class Source, class RowOf, class Finish>
void grouped_product(const Matrix<Source>& matrix, const Matrix<Source>* next, const Grouping& grouping,
                     int num_threads, RowOf&& row_of, Finish&& finish) {
  const std::int64_t strips = matrix.strips(), num_tasks = grouping.num_touched * strips;
  std::int64_t num_pairs = grouping.starts[grouping.touched[grouping.num_touched - 1] + 1];
  std::int64_t work = num_pairs * matrix.num_blocks * BLOCK * matrix.num_groups * GROUP;
  const std::int64_t ahead = max64(1, FETCH_AHEAD / matrix.strip_bytes());
  spread(num_threads, num_tasks, work, [&](std::int64_t begin, std::int64_t end) {
    alignas(64) float outputs[TILE_ROWS * STRIP_WIDTH];
    const Operand* rows[TILE_ROWS];
    auto fetch = [&](std::int64_t task) {
      if (task < end) {
        matrix.fetch(grouping.touched[task / strips], task % strips);
      } else if (task >= num_tasks && next != nullptr && task - num_tasks < grouping.num_touched * next->strips()) {
        task -= num_tasks;
        next->fetch(grouping.touched[task / next->strips()], task % next->strips());
      }
    };
    if (next != nullptr || end - begin < num_tasks)  // else the product before has fetched them
      for (std::int64_t task = begin; task < begin + ahead; ++task) fetch(task);
    for (std::int64_t task = begin; task < end; ++task) {
      fetch(task + ahead);
      std::int64_t expert = grouping.touched[task / strips], strip = task % strips;
      const Source source = matrix.source(expert, strip);
      std::int64_t last = grouping.starts[expert + 1];
      for (std::int64_t first = grouping.starts[expert]; first < last; first += TILE_ROWS) {
        int count = static_cast<int>(min64(TILE_ROWS, last - first));
        for (int r = 0; r < count; ++r) rows[r] = row_of(first + r);
        strip_tile(source, rows, count, outputs);
        for (int r = 0; r < count; ++r) finish(strip * STRIP, first + r, outputs + r * STRIP_WIDTH, source.num_blocks);
      }
    }
  });
}

// Inputs as the products read them: in place where they can be, else copied, widened and padded with zeros.
struct Rows {
  const Operand* first;
  std::int64_t stride;
};

Rows operands(const bf16* z, std::int64_t z_stride, std::int64_t num_rows, std::int64_t width, std::int64_t padded) {
  if constexpr (sizeof(Operand) == sizeof(bf16))
    if (width == padded) return {reinterpret_cast<const Operand*>(z), z_stride};
  Operand* copy = scratch().inputs.get(num_rows * padded);
  for (std::int64_t t = 0; t < num_rows; ++t) {
    std::int64_t i = 0;
    for (; i + Vec::W <= width; i += Vec::W) store_operand(copy + t * padded + i, load(z + t * z_stride + i));
    if (i < width) store_operand(copy + t * padded + i, load_n(z + t * z_stride + i, static_cast<int>(width - i)));
    for (i = ceil_div(width, Vec::W) * Vec::W; i < padded; ++i) copy[t * padded + i] = 0;
  }
  return {copy, padded};
}

// Sum of the weighted outputs of one row in the order of its experts, float32, one rounding.
void combine_row(const bf16* outputs, std::int64_t stride, const float* weights, std::int64_t top_k, std::int64_t width,
                 bf16* out) {
  for (std::int64_t i = 0; i < width; i += Vec::W) {
    Vec total = load(outputs + i) * splat(weights[0]);
    for (std::int64_t x = 1; x < top_k; ++x) total = total + load(outputs + x * stride + i) * splat(weights[x]);
    if (i + Vec::W <= width)
      store(out + i, total);
    else
      store_n(out + i, total, static_cast<int>(width - i));
  }
}

template <class Source>
void run_experts(const Layer& layer, const bf16* z, std::int64_t z_stride, std::int64_t num_rows, Routes routes, bf16* out,
                 int num_threads) {
  Scratch& own = scratch();
  std::int64_t top_k = layer.top_k, num_pairs = num_rows * top_k;
  std::int64_t in_groups = ceil_div(layer.width, GROUP), hidden_groups = ceil_div(layer.inner, GROUP);
  std::int64_t hidden_blocks = ceil_div(layer.inner, BLOCK), out_blocks = ceil_div(layer.width, BLOCK);
  std::int64_t hidden_stride = hidden_groups * GROUP, out_stride = out_blocks * BLOCK;
  Grouping grouping = group_by_expert(routes.ids, num_pairs, layer.num_experts);
  Rows inputs = operands(z, z_stride, num_rows, layer.width, in_groups * GROUP);
  Operand* hidden = own.hidden.get(num_pairs * hidden_stride);
  bf16* outputs = own.outputs.get(num_pairs * out_stride);
  const std::int64_t gate_up_bytes = Matrix<Source>::bytes(2 * hidden_blocks, in_groups);
  const std::int64_t expert_bytes = gate_up_bytes + Matrix<Source>::bytes(out_blocks, hidden_groups);
  const Matrix<Source> gate_up{layer.experts, expert_bytes, 2 * hidden_blocks, in_groups};
  const Matrix<Source> down{layer.experts + gate_up_bytes, expert_bytes, out_blocks, hidden_groups};
  grouped_product(
      gate_up, &down, grouping, num_threads,
      [&](std::int64_t pair) { return inputs.first + grouping.order[pair] / top_k * inputs.stride; },
      [&](std::int64_t first_block, std::int64_t pair, const float* sums, int num_blocks) {
        Operand* row = hidden + pair * hidden_stride + first_block / 2 * BLOCK;
        for (int b = 0; b < num_blocks; b += 2, sums += 2 * BLOCK, row += BLOCK)
          for (int i = 0; i < BLOCK; i += Vec::W)
            store_operand(row + i, glu(layer, rounded(load(sums + i)), rounded(load(sums + BLOCK + i))));
        if (first_block + num_blocks == 2 * hidden_blocks)  // zero inputs up to a whole group
          for (Operand* end = hidden + (pair + 1) * hidden_stride; row < end; ++row) *row = 0;
      });
  grouped_product(
      down, static_cast<const Matrix<Source>*>(nullptr), grouping, num_threads,
      [&](std::int64_t pair) { return hidden + pair * hidden_stride; },
      [&](std::int64_t first_block, std::int64_t pair, const float* sums, int num_blocks) {
        bf16* row = outputs + grouping.order[pair] * out_stride + first_block * BLOCK;
        for (int i = 0; i < num_blocks * BLOCK; i += Vec::W) store(row + i, load(sums + i));
      });
  spread(num_threads, num_rows, num_pairs * layer.width, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      combine_row(outputs + t * top_k * out_stride, out_stride, routes.weights + t * top_k, top_k, layer.width,
                  out + t * layer.width);
  });
}

void experts(const Layer& layer, const bf16* z, std::int64_t z_stride, std::int64_t num_rows, Routes routes, bf16* out,
             int num_threads) {
  if (num_rows == 0) return;
  if (layer.is_packed)
    run_experts<Packed>(layer, z, z_stride, num_rows, routes, out, num_threads);
  else
    run_experts<Unpacked>(layer, z, z_stride, num_rows, routes, out, num_threads);
}

}  // namespace
}  // namespace outrider

using namespace outrider;

// Choose experts: x [T, D] with rows x_stride apart; to ids and weights [T, X].
OUTRIDER_API void outrider_moe_route(const Layer* layer, const bf16* x, std::int64_t x_stride, std::int64_t num_rows,
                                     std::int64_t* ids, float* weights, std::int64_t num_threads) {
  Routes routes = route(*layer, x, x_stride, num_rows, static_cast<int>(num_threads));
  for (std::int64_t p = 0; p < num_rows * layer->top_k; ++p) ids[p] = routes.ids[p];
  std::memcpy(weights, routes.weights, sizeof(float) * static_cast<std::size_t>(num_rows * layer->top_k));
}
OUTRIDER_OP(moe_route)

// Expert outputs combined: z [T, L] with rows z_stride apart, ids and weights [T, X] whole; to out [T, L].
// Returns 0, or 1 with nothing written where an id is outside 0..E-1.
OUTRIDER_API int outrider_moe_experts(const Layer* layer, const bf16* z, std::int64_t z_stride, std::int64_t num_rows,
                                      const std::int64_t* ids, const float* weights, bf16* out, std::int64_t num_threads) {
  std::int64_t num_pairs = num_rows * layer->top_k;
  std::int32_t* narrow_ids = scratch().ids.get(num_pairs);
  for (std::int64_t p = 0; p < num_pairs; ++p) {
    if (ids[p] < 0 || ids[p] >= layer->num_experts) return 1;
    narrow_ids[p] = static_cast<std::int32_t>(ids[p]);
  }
  experts(*layer, z, z_stride, num_rows, {narrow_ids, weights}, out, static_cast<int>(num_threads));
  return 0;
}

// Both at once, with the bits of one after the other.
OUTRIDER_API void outrider_moe_routed(const Layer* layer, const bf16* x, std::int64_t x_stride, const bf16* z,
                                      std::int64_t z_stride, std::int64_t num_rows, bf16* out, std::int64_t num_threads) {
  int threads = static_cast<int>(num_threads);
  experts(*layer, z, z_stride, num_rows, route(*layer, x, x_stride, num_rows, threads), out, threads);
}
OUTRIDER_OP(moe_routed)
