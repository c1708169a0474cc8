"""Runs a target model on plain lists of tokens with real caches, without an engine.

For tests of models and drafters: every call is one flat batch of spans, each span either prompt rows
(committed by the forward) or step rows (tentative until ``commit``). Pages are handed out in a
scrambled order, so nothing may depend on page ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.batch import ForwardBatch, SpanGroup, TargetOutput
from outrider.cache.cache_set import CacheBudget, CacheSet
from outrider.models.protocol import TargetModel

__all__ = ["Driver", "Span"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Rows that one sequence contributes to a batch."""

    slot: int
    token_ids: tuple[int, ...]
    is_prompt: bool  # prompt rows commit themselves; step rows wait for ``Driver.commit``


class Driver:
    """Caches, page tables and committed lengths of a few sequences, one slot each.

    Args:
        model: Any target.
        num_slots: Sequences at once.
        page_size: Tokens per page.
        max_tokens: Longest sequence.
        max_step_rows: Most step rows of one batch.
    """

    def __init__(
        self,
        *,
        model: TargetModel,
        num_slots: int = 4,
        page_size: int = 4,
        max_tokens: int = 64,
        max_step_rows: int = 64,
    ) -> None:
        self.model, self.num_slots, self.page_size = model, num_slots, page_size
        per_slot = -(-max_tokens // page_size)
        num_pages = num_slots * per_slot
        budget = CacheBudget(num_pages=num_pages, page_size=page_size, num_slots=num_slots, max_step_rows=max_step_rows)
        self.caches = CacheSet.build(model.cache_layouts, budget, torch.device("cpu"))
        # Whatever was there before must not matter: poison everything, then reset the seats.
        self.caches.latents.poison(range(num_pages))
        self.caches.recurrent.poison(range(num_slots))
        self.caches.reset(range(num_slots))
        scrambled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(num_pages))
        self.pages = scrambled.view(num_slots, per_slot)  # [slot, page]
        self.lengths = [0] * num_slots  # committed tokens
        self._last_batch: ForwardBatch | None = None

    def forward(self, spans: Sequence[Span], *, all_logits: bool = True) -> TargetOutput:
        """Run one batch; logits of every row, in span order, unless ``all_logits`` is off (then none)."""
        batch = self.batch(spans, all_logits=all_logits)
        output = self.model.forward(batch, self.caches)
        for span in spans:
            if span.is_prompt:
                self.lengths[span.slot] += len(span.token_ids)
        self._last_batch = batch
        return output

    def commit(self, num_committed: Sequence[int]) -> None:
        """Fold the step rows of the last batch; one count per step span."""
        assert self._last_batch is not None, "commit follows a forward"
        self.caches.commit(self._last_batch, torch.tensor(list(num_committed), dtype=torch.int64))
        slots = self._last_batch.step.state_slots_S.tolist()
        for slot, count in zip(slots, num_committed, strict=True):
            self.lengths[slot] += count

    def release(self, slot: int) -> None:
        """Empty a slot for a new sequence."""
        self.caches.reset([slot])
        self.lengths[slot] = 0

    def batch(self, spans: Sequence[Span], *, all_logits: bool = True) -> ForwardBatch:
        """Index tensors of one flat batch, spans in the given order."""
        sizes = [len(span.token_ids) for span in spans]
        starts = [self.lengths[span.slot] for span in spans]
        positions = [start + i for start, size in zip(starts, sizes, strict=True) for i in range(size)]
        sequences = [s for s, size in enumerate(sizes) for _ in range(size)]
        positions_T, sequence_T = _ids(positions), _ids(sequences)
        table_SP = self.pages[_ids([span.slot for span in spans])]
        slot_mapping_T = (
            table_SP[sequence_T, positions_T // self.page_size] * self.page_size + positions_T % self.page_size
        )
        return ForwardBatch(
            token_ids_T=_ids([token for span in spans for token in span.token_ids]),
            positions_T=positions_T,
            context_lens_T=positions_T + 1,
            sequence_T=sequence_T,
            slot_mapping_T=slot_mapping_T,
            page_table_SP=table_SP,
            logits_rows_N=_ids(range(len(positions)) if all_logits else []),
            chunk=_group(spans, sizes, starts, is_prompt=True),
            step=_group(spans, sizes, starts, is_prompt=False),
            page_size=self.page_size,
            max_context=max(positions, default=-1) + 1,
        )


def _ids(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _group(spans: Sequence[Span], sizes: Sequence[int], starts: Sequence[int], *, is_prompt: bool) -> SpanGroup:
    chosen = [s for s, span in enumerate(spans) if span.is_prompt == is_prompt]
    offsets = [sum(sizes[:s]) for s in range(len(spans))]
    rows = [offsets[s] + i for s in chosen for i in range(sizes[s])]
    longest = max((sizes[s] for s in chosen), default=0)
    padded, valid, limits, first = [], [], [], 0
    for s in chosen:
        padded.append([first + i if i < sizes[s] else 0 for i in range(longest)])
        valid.append([i < sizes[s] for i in range(longest)])
        limits.append([starts[s] + i + 1 if i < sizes[s] else 1 for i in range(longest)])
        first += sizes[s]
    shape = (len(chosen), longest)
    return SpanGroup(
        rows_T=_ids(rows),
        state_slots_S=_ids([spans[s].slot for s in chosen]),
        lengths=tuple(sizes[s] for s in chosen),
        starts=tuple(starts[s] for s in chosen),
        padded_rows_SM=torch.tensor(padded, dtype=torch.int64).view(shape),
        valid_SM=torch.tensor(valid, dtype=torch.bool).view(shape),
        limits_SM=torch.tensor(limits, dtype=torch.int64).view(shape),
        num_keys_S=_ids([starts[s] + sizes[s] for s in chosen]),
    )
