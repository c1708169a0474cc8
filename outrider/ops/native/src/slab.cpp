// Fills the index tensors of a decode or verify step; outrider/engine/slab.py says what they are.
#include "common.h"

namespace outrider {

struct StepSlab {
  std::int64_t *token_ids_T, *positions_T, *context_lens_T, *slot_mapping_T, *slots_S, *num_keys_S, *pages_SP;
  std::int64_t* limits_SM;
  const std::int64_t *lengths_S, *firsts_S;          // rows of each sequence, and which one is its first
  const std::int64_t *draft_rows_F, *draft_cells_F;  // row of each draft, and its place in the block
  const std::int64_t* numbers_3S;                    // starts, slots, anchors
  std::int64_t num_sequences, longest, num_pages, num_drafts, page_size;
};

// table_BP: pages of every slot. drafts: the block of the round, read at draft_cells_F.
OUTRIDER_API void outrider_fill_slab(const StepSlab* slab, const std::int64_t* table_BP, const std::int64_t* drafts) {
  const std::int64_t num_sequences = slab->num_sequences, page_size = slab->page_size;
  const std::int64_t *starts = slab->numbers_3S, *slots = starts + num_sequences, *anchors = slots + num_sequences;
  for (std::int64_t s = 0; s < num_sequences; ++s) {
    const std::int64_t *pages = table_BP + slots[s] * slab->num_pages, first = slab->firsts_S[s];
    const std::int64_t length = slab->lengths_S[s];
    std::memcpy(slab->pages_SP + s * slab->num_pages, pages,
                sizeof(std::int64_t) * static_cast<std::size_t>(slab->num_pages));
    slab->slots_S[s] = slots[s];
    slab->num_keys_S[s] = starts[s] + length;
    slab->token_ids_T[first] = anchors[s];
    for (std::int64_t m = 0; m < slab->longest; ++m) {
      const std::int64_t position = starts[s] + m;
      slab->limits_SM[s * slab->longest + m] = m < length ? position + 1 : 1;
      if (m >= length) continue;
      slab->positions_T[first + m] = position;
      slab->context_lens_T[first + m] = position + 1;
      slab->slot_mapping_T[first + m] = pages[position / page_size] * page_size + position % page_size;
    }
  }
  for (std::int64_t f = 0; f < slab->num_drafts; ++f) {
    slab->token_ids_T[slab->draft_rows_F[f]] = drafts[slab->draft_cells_F[f]];
  }
}
OUTRIDER_OP(fill_slab)

}  // namespace outrider
