"""Puts an engine together: resolves every "auto" into the final config, then allocates."""

from dataclasses import dataclass

import torch

from outrider.config import CacheConfig, EngineConfig, SchedulerConfig, resolve_num_draft_tokens
from outrider.engine.engine import Engine
from outrider.engine.runner import Runner
from outrider.models.protocol import TargetModel
from outrider.scheduling.admission import num_pages_for
from outrider.scheduling.scheduler import Scheduler
from outrider.speculative.drafter import Drafter, NullDrafter
from outrider.tokenizer import Tokenizer

__all__ = ["EngineOptions", "build_engine", "resolve_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a user chooses; None lets the engine decide."""

    max_num_seqs: int = 8
    max_model_len: int = 4096
    speculation: str | int = "auto"  # "auto" = all drafts of the block, "off", or a number of drafts
    page_size: int = 64
    num_pages: int | None = None  # None = every seat can reach max_model_len
    max_step_rows: int | None = None  # None = one step holds every verify row and a prompt chunk
    max_prefill_tokens: int = 512


def resolve_config(options: EngineOptions, *, drafts_offered: int, chunk_multiple: int) -> EngineConfig:
    """The final config for a drafter that offers ``drafts_offered`` tokens per round.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """
    num_draft_tokens = resolve_num_draft_tokens(options.speculation, drafts_offered)
    max_prefill_tokens = max(options.max_prefill_tokens, min(chunk_multiple, options.max_model_len))
    num_pages = options.num_pages
    if num_pages is None:
        num_pages = options.max_num_seqs * num_pages_for(options.max_model_len, options.page_size)
    max_step_rows = options.max_step_rows
    if max_step_rows is None:
        max_step_rows = options.max_num_seqs * (1 + num_draft_tokens) + max_prefill_tokens
    return EngineConfig(
        cache=CacheConfig(page_size=options.page_size, num_pages=num_pages),
        scheduler=SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            max_step_rows=max_step_rows,
            max_prefill_tokens=max_prefill_tokens,
            chunk_multiple=chunk_multiple,
        ),
        num_draft_tokens=num_draft_tokens,
    )


def build_engine(
    target: TargetModel,
    drafter: Drafter | None,
    config: EngineConfig,
    *,
    device: torch.device,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: frozenset[int] = frozenset(),
) -> Engine:
    """An engine around loaded models; ``drafter=None`` decodes plainly."""
    runner = Runner(target, drafter or NullDrafter(), config, device)
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        num_draft_tokens=config.num_draft_tokens,
        eos_token_ids=eos_token_ids,
    )
    return Engine(runner, scheduler, vocab_size=target.vocab_size, tokenizer=tokenizer)
