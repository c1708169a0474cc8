// Which drafts the target's own tokens repeat.
#include "argmax.h"
#include "parallel.h"

namespace outrider {
namespace {

// Drafts that stand: the longest prefix of the submitted ones that agrees.
std::int64_t num_agreeing(const std::int64_t* winners, const std::int64_t* drafts, std::int64_t length) {
  std::int64_t num = 0;
  while (num < length && winners[num] == drafts[num]) ++num;
  return num;
}

// The same straight from logits, and the winners up to the final token: what stands behind it decides nothing.
std::int64_t accept_span(const bf16* logits, std::int64_t stride, std::int64_t width, const std::int64_t* drafts,
                         std::int64_t length, std::int64_t* winners) {
  std::int64_t num = 0;
  for (;; ++num) {
    winners[num] = argmax(logits + num * stride, width, false);
    if (num == length || winners[num] != drafts[num]) return num;
  }
}

}  // namespace

// winners: 1 + lengths[s] of each sequence, one after the other. output [S, num_drafts + 1]: accepted drafts, then
// the final token, then -1. Drafts at or beyond a length are not read.
OUTRIDER_API void outrider_match_drafts(const std::int64_t* winners, const std::int64_t* drafts,
                                        std::int64_t drafts_stride, const std::int64_t* lengths,
                                        std::int64_t num_sequences, std::int64_t num_drafts, std::int64_t* output,
                                        std::int64_t* num_accepted) {
  for (std::int64_t s = 0; s < num_sequences; ++s) {
    std::int64_t accepted = num_agreeing(winners, drafts + s * drafts_stride, lengths[s]);
    std::int64_t* row = output + s * (num_drafts + 1);
    for (std::int64_t i = 0; i <= num_drafts; ++i) row[i] = i <= accepted ? winners[i] : -1;
    num_accepted[s] = accepted;
    winners += lengths[s] + 1;
  }
}
OUTRIDER_OP(match_drafts)

// logits: 1 + lengths[s] rows of each sequence, one after the other. drafts [B, num_drafts], of which sequence s has
// row block_rows[s]. output [S, num_drafts + 1]: the first num_committed[s] = 1 + accepted entries of a row are set.
OUTRIDER_API void outrider_accept_greedy(const bf16* logits, std::int64_t stride, std::int64_t width,
                                         const std::int64_t* drafts, std::int64_t num_drafts,
                                         const std::int64_t* block_rows, const std::int64_t* lengths,
                                         std::int64_t num_sequences, std::int64_t* num_committed, std::int64_t* output,
                                         std::int64_t num_threads) {
  auto body = [&](std::int64_t begin, std::int64_t end) {
    std::int64_t row = begin;
    for (std::int64_t s = 0; s < begin; ++s) row += lengths[s];
    for (std::int64_t s = begin; s < end; row += 1 + lengths[s++]) {
      num_committed[s] = 1 + accept_span(logits + row * stride, stride, width, drafts + block_rows[s] * num_drafts,
                                         lengths[s], output + s * (num_drafts + 1));
    }
  };
  parallel_ranges(static_cast<int>(num_threads), num_sequences, 1, num_sequences * width, body);
}
OUTRIDER_OP(accept_greedy)

}  // namespace outrider
