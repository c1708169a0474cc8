"""Logits after a prompt, outside of any request: for comparison with other implementations."""

import torch

from outrider.cache.cache_set import CacheBudget, CacheSet
from outrider.config import EngineConfig
from outrider.engine.batching import PageTable, StepDrafts, StepSpans, build_batch
from outrider.models.protocol import TargetModel
from outrider.plan import ScheduledSequence
from outrider.scheduling.admission import num_pages_for

__all__ = ["last_logits"]


@torch.inference_mode()
def last_logits(
    target: TargetModel, token_ids: tuple[int, ...], config: EngineConfig, device: torch.device
) -> torch.Tensor:
    """Logits ``[V]`` of the last of ``token_ids`` (at least one), cut and computed as in the engine.

    Works on caches of its own, which are dropped afterwards.
    """
    page_size = config.cache.page_size
    num_pages = num_pages_for(len(token_ids), page_size)
    caches = CacheSet.build(
        target.cache_layouts,
        CacheBudget(num_pages=num_pages, page_size=page_size, num_slots=1, max_step_rows=1),
        device,
    )
    page_table = PageTable(num_slots=1, max_pages=num_pages, page_size=page_size, device=device)
    page_table.assign(0, range(num_pages))
    budget = min(config.scheduler.max_step_rows, config.scheduler.max_prefill_tokens)
    # A budget below one chunk means a context below one chunk: such a prompt is never cut.
    length = budget - budget % config.scheduler.chunk_multiple or budget
    no_drafts = StepDrafts(token_ids_SG=torch.empty((1, 0), dtype=torch.int64, device=device), block_rows=(0,))
    for start in range(0, len(token_ids), length):
        chunk = ScheduledSequence(
            request_id="logits",
            state_slot=0,
            page_ids=tuple(range(num_pages)),
            start_position=start,
            query_token_ids=token_ids[start : start + length],
            draft_budget=0,
            is_prompt=True,
            wants_logits=start + length >= len(token_ids),
            is_first=start == 0,
        )
        output = target.forward(
            build_batch(StepSpans(items=(chunk,), verify_lengths=(0,)), no_drafts, page_table), caches
        )
    return output.logits_NV[0]
