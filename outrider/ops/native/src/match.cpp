// Which drafts the target's own tokens repeat.
#include "common.h"

namespace outrider {
namespace {

// Drafts that stand: the longest prefix of the submitted ones that agrees.
std::int64_t num_agreeing(const std::int64_t* winners, const std::int64_t* drafts, std::int64_t length) {
  std::int64_t num = 0;
  while (num < length && winners[num] == drafts[num]) ++num;
  return num;
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

}  // namespace outrider
