// Greedy drafts of a block, left to right, under the vanilla Markov head. See draft_chain in
// outrider/models/dspark/heads.py, whose rounding this keeps: the bias rounds to bfloat16, then its sum with the
// logit (denormals may become zero); the largest of the rounded sums wins, the lowest id among equals, and a NaN wins over all numbers.

#include <vector>

#include "common.h"
#include "heads.h"
#include "parallel.h"
#include "pairs.h"
#include "vec.h"

namespace outrider {
namespace {

constexpr std::int64_t GROUP = 8;                // panels multiplied at a time
constexpr std::int64_t GROUP_COLUMNS = GROUP * PANEL;

// The largest value so far, in ascending order of ids.
struct Best {
  float value = -__builtin_inff();
  std::int64_t index = 0;

  bool closed() const { return value != value; }  // a NaN came: the first one stays
  void take(float candidate, std::int64_t id) {
    if (closed() || !(candidate > value || candidate != candidate)) return;
    value = candidate;
    index = id;
  }
};

// Whether a lane is larger than value, or NaN.
inline bool any_above(Vec a, float value) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(value), _CMP_NLE_UQ) != 0;
#else
  return _mm256_movemask_ps(_mm256_cmp_ps(a.v, _mm256_set1_ps(value), _CMP_NLE_UQ)) != 0;
#endif
}

// Add the bias of columns first..first + count - 1 to a row of logits in place, and follow its maximum.
void add_bias(const float* bias, bf16* logits, std::int64_t first, std::int64_t count, Best& best) {
  for (std::int64_t c = 0; c < count; c += Vec::W) {
    const int n = static_cast<int>(min64(Vec::W, count - c));
    bf16* target = logits + first + c;
    const Vec rounded_bias = widen(narrow_normal(load(bias + c)));
    Vec sum;
    if (n == Vec::W) {
      HalfBits bits = narrow_normal(load(target) + rounded_bias);
      store_bits(target, bits);
      sum = widen(bits);
    } else {
      sum = widen(narrow_normal(load_n(target, n) + rounded_bias));
      store_n(target, sum, n);
    }
    if (best.closed() || !any_above(sum, best.value)) continue;
    for (int i = 0; i < n; ++i) best.take(to_float(target[i]), first + c + i);
  }
}

float dot(const bf16* values, const float* weights, std::int64_t count) {
  Vec sum = zero();
  for (std::int64_t c = 0; c < count; c += Vec::W) {
    int n = static_cast<int>(min64(Vec::W, count - c));
    sum = fma(load_n(values + c, n), load_n(weights + c, n), sum);
  }
  return reduce_add(sum);
}

float sigmoid_of(float x) {
  alignas(64) float lanes[Vec::W];
  store(lanes, sigmoid(splat(x)));
  return lanes[0];
}

}  // namespace

// tokens[s, g] (target ids) of all sequences; logits [drafts, sequences, vocabulary] gain their bias in place.
// w1: [target vocabulary, rank]; w2: packed as pairs.h says, [rank -> vocabulary]; target_ids: target id of a draft id,
// or null. Confidence where its result is not null: sigmoid of the dot product in float32 with hidden
// [drafts, sequences, width] and, unless confidence_rank is null, with the row of W1, plus the bias.
OUTRIDER_API void outrider_markov_chain(
    const std::int64_t* anchor_S, bf16* logits_GSV, const bf16* w1, const bf16* w2_panels,
    const std::int64_t* target_ids, const bf16* hidden_GSD, const float* confidence_hidden,
    const float* confidence_rank, float confidence_bias, std::int64_t sequences, std::int64_t drafts,
    std::int64_t vocabulary, std::int64_t rank, std::int64_t width, std::int64_t* tokens_SG, float* confidence_SG,
    std::int64_t num_threads) {
  static thread_local std::vector<const bf16*> previous;
  static thread_local std::vector<Best> found;
  previous.resize(static_cast<std::size_t>(sequences));
  const std::int64_t num_groups = ceil_div(vocabulary, GROUP_COLUMNS);
  const bool small = sequences * vocabulary * rank < MIN_PARALLEL_WORK;
  const std::int64_t num_parts = small ? 1 : min64(num_groups, num_threads);
  const bf16* const* rows = previous.data();
  for (std::int64_t s = 0; s < sequences; ++s) previous[s] = w1 + anchor_S[s] * rank;
  for (std::int64_t g = 0; g < drafts; ++g) {
    found.assign(static_cast<std::size_t>(num_parts * sequences), Best());
    Best* best = found.data();
    bf16* logits_SV = logits_GSV + g * sequences * vocabulary;
    parallel_parts(static_cast<int>(num_threads), static_cast<int>(num_parts), [&](int part) {
      static thread_local Buffer<float> bias_buffer;
      static thread_local std::vector<float*> bias_rows;
      float* bias = bias_buffer.at_least(sequences * GROUP_COLUMNS);
      bias_rows.resize(static_cast<std::size_t>(sequences));
      for (std::int64_t s = 0; s < sequences; ++s) bias_rows[s] = bias + s * GROUP_COLUMNS;
      for (std::int64_t group = num_groups * part / num_parts; group < num_groups * (part + 1) / num_parts; ++group) {
        const std::int64_t first = group * GROUP_COLUMNS, count = min64(GROUP_COLUMNS, vocabulary - first);
        multiply_panels(rows, sequences, w2_panels + first / PANEL * (rank / 2) * STEP, rank / 2,
                        ceil_div(count, PANEL), bias_rows.data(), false);
        for (std::int64_t s = 0; s < sequences; ++s) {
          add_bias(bias_rows[s], logits_SV + s * vocabulary, first, count, best[part * sequences + s]);
        }
      }
    });
    for (std::int64_t s = 0; s < sequences; ++s) {
      if (confidence_SG != nullptr) {
        float logit = dot(hidden_GSD + (g * sequences + s) * width, confidence_hidden, width);
        if (confidence_rank != nullptr) logit += dot(previous[s], confidence_rank, rank);
        confidence_SG[s * drafts + g] = sigmoid_of(logit + confidence_bias);
      }
      Best winner = best[s];
      for (std::int64_t part = 1; part < num_parts; ++part) {
        const Best& other = best[part * sequences + s];
        winner.take(other.value, other.index);
      }
      std::int64_t token = target_ids == nullptr ? winner.index : target_ids[winner.index];
      tokens_SG[s * drafts + g] = token;
      previous[s] = w1 + token * rank;
    }
  }
}
OUTRIDER_OP(markov_chain)

}  // namespace outrider
