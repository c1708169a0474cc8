"""Index records of one forward, built once and used by every layer.

Dims: T rows of the group, S sequences of the group.
"""

from dataclasses import dataclass

import torch

from outrider.batch import ForwardBatch, SpanGroup
from outrider.ops.paged import PagedSpans, paged_keys
from outrider.ops.spans import SpanLayout, span_layout, to_padded

__all__ = ["GroupIndex", "StepIndex", "scatter_groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupIndex:
    """One span group; ``rows_T`` is None when the group is the whole batch, so nothing is gathered."""

    rows_T: torch.Tensor | None
    layout: SpanLayout
    spans: PagedSpans
    state_slots_S: torch.Tensor

    def take(self, x_T: torch.Tensor) -> torch.Tensor:
        """The group's rows of a batch tensor, in group order."""
        return x_T if self.rows_T is None else x_T.index_select(0, self.rows_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepIndex:
    """Both groups of a batch; None where empty."""

    batch: ForwardBatch
    chunk: GroupIndex | None
    step: GroupIndex | None

    @classmethod
    def of(cls, batch: ForwardBatch) -> "StepIndex":
        """Build the records of ``batch`` without a host sync."""
        return cls(batch=batch, chunk=_group(batch, batch.chunk), step=_group(batch, batch.step))


def _group(batch: ForwardBatch, group: SpanGroup) -> GroupIndex | None:
    if not group.lengths:
        return None
    rows_T = None if sum(group.lengths) == batch.num_tokens else group.rows_T
    layout = span_layout(group.padded_rows_SM, group.valid_SM, lengths=group.lengths, starts=group.starts)
    page_table_SP = batch.page_table_SP
    if rows_T is not None:
        page_table_SP = page_table_SP[to_padded(batch.sequence_T[rows_T], layout)[:, 0]]
    keys = paged_keys(page_table_SP, group.num_keys_S, page_size=batch.page_size, max_context=batch.max_context)
    spans = PagedSpans(layout=layout, keys=keys, limits_SM=group.limits_SM)
    return GroupIndex(rows_T=rows_T, layout=layout, spans=spans, state_slots_S=group.state_slots_S)


def scatter_groups(index: StepIndex, chunk_out: torch.Tensor | None, step_out: torch.Tensor | None) -> torch.Tensor:
    """Put the results of both groups back in batch row order."""
    if chunk_out is None or step_out is None:
        whole = step_out if chunk_out is None else chunk_out
        assert whole is not None, "a batch with rows has at least one group"
        return whole
    out_T = chunk_out.new_empty(index.batch.num_tokens, *chunk_out.shape[1:])
    out_T.index_copy_(0, index.batch.chunk.rows_T, chunk_out)
    return out_T.index_copy_(0, index.batch.step.rows_T, step_out)
