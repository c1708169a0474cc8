// Greedy drafts of a block, left to right, under the vanilla Markov head. See draft_chain in
// outrider/models/dspark/heads.py, whose rounding this keeps: the bias rounds to bfloat16, then its sum with the
// logit (denormals may become zero); the largest of the rounded sums wins, the lowest id among equals, and a NaN wins
// over all numbers.
//
// The bias of a token is a product with all of W2, and the same tokens come again and again, in one round's drafts and
// in the next round's: so rows of bias are kept for tokens seen lately.

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

// Follow the maximum of a row of logits plus bias, columns begin..end - 1; the sums replace the logits if wanted.
template <bool KEEP>
void follow(const bf16* bias, bf16* logits, std::int64_t begin, std::int64_t end, Best& best) {
  alignas(64) float sums[Vec::W];
  for (std::int64_t c = begin; c < end; c += Vec::W) {
    const int n = static_cast<int>(min64(Vec::W, end - c));
    const Vec terms = n == Vec::W ? load(logits + c) + load(bias + c) : load_n(logits + c, n) + load_n(bias + c, n);
    const HalfBits bits = narrow_normal(terms);
    const Vec sum = widen(bits);
    if constexpr (KEEP) {
      if (n == Vec::W) {
        store_bits(logits + c, bits);
      } else {
        store_n(logits + c, sum, n);
      }
    }
    if (best.closed() || !any_above(sum, best.value)) continue;
    store(sums, sum);
    for (int i = 0; i < n; ++i) best.take(sums[i], c + i);
  }
}

// Columns first..first + count - 1 of the bias of some tokens, rounded, into their rows.
void store_bias(const bf16* const* tokens, bf16* const* rows, std::int64_t num_tokens, const bf16* w2_panels,
                std::int64_t rank, std::int64_t first, std::int64_t count) {
  static thread_local Buffer<float> buffer;
  static thread_local std::vector<float*> results;
  const std::int64_t stride = ceil_div(count, PANEL) * PANEL;
  float* values = buffer.at_least(num_tokens * stride);
  results.resize(static_cast<std::size_t>(num_tokens));
  for (std::int64_t i = 0; i < num_tokens; ++i) results[i] = values + i * stride;
  multiply_panels(tokens, num_tokens, w2_panels + first / PANEL * (rank / 2) * STEP, rank / 2, stride / PANEL,
                  results.data(), false);
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    for (std::int64_t c = 0; c < count; c += Vec::W) {
      const int n = static_cast<int>(min64(Vec::W, count - c));
      if (n == Vec::W) {
        store_bits(rows[i] + first + c, narrow_normal(load(results[i] + c)));
      } else {
        store_n(rows[i] + first + c, widen(narrow_normal(load(results[i] + c))), n);
      }
    }
  }
}

// Rows of bias of tokens seen lately: the bias of a token is the same wherever the token comes. A token has WAYS rows
// to lie in; the one that was used longest ago gives way.
constexpr std::int64_t WAYS = 4;

struct Memo {
  std::int64_t* ids;   // token of each row, -1 where there is none
  std::int64_t* used;  // when each row was used last; behind them, what the time is
  bf16* rows;          // [num_rows, vocabulary]
  std::int64_t num_rows, vocabulary;
};

// Where the bias of each sequence's previous token is, and which of these rows are still to be computed.
class BiasRows {
 public:
  void start(const Memo& memo, std::int64_t sequences) {
    memo_ = memo;
    spare_ = spare_buffer_.at_least(sequences * memo.vocabulary);
    rows_.resize(static_cast<std::size_t>(sequences));
  }

  // For the tokens of all sequences. A row that one of them uses is not given to another token.
  void find(const std::vector<std::int64_t>& tokens, const bf16* w1, std::int64_t rank) {
    const std::int64_t now = ++memo_.used[memo_.num_rows];
    missing_tokens_.clear();
    missing_rows_.clear();
    for (std::size_t s = 0; s < tokens.size(); ++s) {
      const std::int64_t first = tokens[s] % (memo_.num_rows / WAYS) * WAYS;
      std::int64_t at = first;
      for (std::int64_t way = first; way < first + WAYS && memo_.ids[at] != tokens[s]; ++way) {
        if (memo_.ids[way] == tokens[s] || memo_.used[way] < memo_.used[at]) at = way;
      }
      const bool known = memo_.ids[at] == tokens[s], taken = !known && memo_.used[at] == now;
      rows_[s] = taken ? spare_ + static_cast<std::int64_t>(s) * memo_.vocabulary : memo_.rows + at * memo_.vocabulary;
      if (!known) {
        missing_tokens_.push_back(w1 + tokens[s] * rank);
        missing_rows_.push_back(rows_[s]);
      }
      if (!taken) {
        memo_.ids[at] = tokens[s];
        memo_.used[at] = now;
      }
    }
  }

  const bf16* row(std::int64_t sequence) const { return rows_[static_cast<std::size_t>(sequence)]; }
  std::int64_t num_missing() const { return static_cast<std::int64_t>(missing_rows_.size()); }
  const bf16* const* missing_tokens() const { return missing_tokens_.data(); }
  bf16* const* missing_rows() const { return missing_rows_.data(); }

 private:
  Memo memo_{};
  bf16* spare_ = nullptr;
  Buffer<bf16> spare_buffer_;
  std::vector<bf16*> rows_, missing_rows_;
  std::vector<const bf16*> missing_tokens_;
};

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

// tokens[s, g] (target ids) of all sequences, from logits [sequences, drafts, vocabulary], which gain their bias in
// place if keep_logits. w1: [target vocabulary, rank]; w2: packed as pairs.h says, [rank -> vocabulary]; memo_ids,
// memo_used, memo_rows: see Memo, kept from call to call; target_ids: target id of a draft id, or null. Confidence where its
// result is not null: sigmoid of the dot product in float32 with hidden [sequences, drafts, width] and, unless
// confidence_rank is null, with the row of W1, plus the bias.
OUTRIDER_API void outrider_markov_chain(
    const std::int64_t* anchor_S, bf16* logits_SGV, const bf16* w1, const bf16* w2_panels, std::int64_t* memo_ids,
    std::int64_t* memo_used, bf16* memo_rows, std::int64_t num_memo_rows, const std::int64_t* target_ids, const bf16* hidden_SGD,
    const float* confidence_hidden, const float* confidence_rank, float confidence_bias, std::int64_t sequences,
    std::int64_t drafts, std::int64_t vocabulary, std::int64_t rank, std::int64_t width, std::int64_t keep_logits,
    std::int64_t* tokens_SG, float* confidence_SG, std::int64_t num_threads) {
  static thread_local std::vector<std::int64_t> previous;
  static thread_local std::vector<Best> found;
  static thread_local BiasRows bias_of_thread;
  BiasRows& bias = bias_of_thread;
  const std::int64_t num_groups = ceil_div(vocabulary, GROUP_COLUMNS);
  const bool small = sequences * vocabulary * rank < MIN_PARALLEL_WORK;
  const std::int64_t num_parts = small ? 1 : min64(num_groups, num_threads);
  bias.start(Memo{memo_ids, memo_used, memo_rows, num_memo_rows, vocabulary}, sequences);
  previous.assign(anchor_S, anchor_S + sequences);
  for (std::int64_t g = 0; g < drafts; ++g) {
    found.assign(static_cast<std::size_t>(num_parts * sequences), Best());
    Best* best = found.data();
    bias.find(previous, w1, rank);
    parallel_parts(static_cast<int>(num_threads), static_cast<int>(num_parts), [&](int part) {
      const std::int64_t begin = num_groups * part / num_parts, end = num_groups * (part + 1) / num_parts;
      for (std::int64_t group = begin; bias.num_missing() > 0 && group < end; ++group) {
        const std::int64_t first = group * GROUP_COLUMNS;
        store_bias(bias.missing_tokens(), bias.missing_rows(), bias.num_missing(), w2_panels, rank, first,
                   min64(GROUP_COLUMNS, vocabulary - first));
      }
      const std::int64_t first = begin * GROUP_COLUMNS, last = min64(end * GROUP_COLUMNS, vocabulary);
      for (std::int64_t s = 0; s < sequences; ++s) {
        bf16* logits = logits_SGV + (s * drafts + g) * vocabulary;
        if (keep_logits != 0) {
          follow<true>(bias.row(s), logits, first, last, best[part * sequences + s]);
        } else {
          follow<false>(bias.row(s), logits, first, last, best[part * sequences + s]);
        }
      }
    });
    for (std::int64_t s = 0; s < sequences; ++s) {
      if (confidence_SG != nullptr) {
        float logit = dot(hidden_SGD + (s * drafts + g) * width, confidence_hidden, width);
        if (confidence_rank != nullptr) logit += dot(w1 + previous[s] * rank, confidence_rank, rank);
        confidence_SG[s * drafts + g] = sigmoid_of(logit + confidence_bias);
      }
      Best winner = best[s];
      for (std::int64_t part = 1; part < num_parts; ++part) {
        const Best& other = best[part * sequences + s];
        winner.take(other.value, other.index);
      }
      std::int64_t token = target_ids == nullptr ? winner.index : target_ids[winner.index];
      tokens_SG[s * drafts + g] = token;
      previous[s] = token;
    }
  }
}
OUTRIDER_OP(markov_chain)

}  // namespace outrider
