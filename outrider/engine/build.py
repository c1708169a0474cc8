"""Puts an engine together: resolves every "auto" into the final config, then allocates."""

from dataclasses import dataclass

import torch

from outrider.config import CacheConfig, EngineConfig, SchedulerConfig, check_positive
from outrider.engine.engine import Engine
from outrider.engine.runner import Runner
from outrider.engine.watch import RoundWatch
from outrider.models.protocol import TargetModel
from outrider.scheduling.admission import num_pages_for
from outrider.scheduling.scheduler import Scheduler
from outrider.speculative.drafter import Drafter, NullDrafter
from outrider.tokenizer import Tokenizer

__all__ = ["EngineLimits", "build_engine", "resolve_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Budgets that rarely need a choice; None lets the engine decide."""

    page_size: int = 64
    num_pages: int | None = None  # None = every seat can reach the context length
    max_step_rows: int | None = None  # None = one step holds every verify row and all prompt rows
    max_prefill_tokens: int = 512  # prompt tokens per round; raised to one chunk of the model
    oversubscribe: bool = False  # admit on the pages needed now; see docs/concepts/round.md


def resolve_config(
    limits: EngineLimits,
    *,
    max_num_seqs: int,
    max_model_len: int,
    num_draft_tokens: int,
    chunk_multiple: int,
    auto_lengths: bool = False,
    drafter_context: int | None = None,
) -> EngineConfig:
    """The final config.

    Args:
        limits: budgets as chosen.
        max_num_seqs: sequences that run at once.
        max_model_len: prompt and output tokens of one sequence.
        num_draft_tokens: drafts per round at most.
        chunk_multiple: the target's; prompts are cut at its multiples.
        auto_lengths: draft and verify as much as pays, not all.
        drafter_context: tokens of context that the drafter takes at most; None = any.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """
    # Before any arithmetic, so that a message names the value that was given, not one that followed from it.
    for name, value in (
        ("page_size", limits.page_size),
        ("max_prefill_tokens", limits.max_prefill_tokens),
        ("max_num_seqs", max_num_seqs),
        ("max_model_len", max_model_len),
    ):
        check_positive(name, value)
    max_prefill_tokens = max(limits.max_prefill_tokens, min(chunk_multiple, max_model_len))
    num_pages = limits.num_pages
    if num_pages is None:
        num_pages = max_num_seqs * num_pages_for(max_model_len, limits.page_size)
    max_step_rows = limits.max_step_rows
    if max_step_rows is None:
        max_step_rows = max_num_seqs * (1 + num_draft_tokens) + max_prefill_tokens
    return EngineConfig(
        cache=CacheConfig(page_size=limits.page_size, num_pages=num_pages),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_step_rows=max_step_rows,
            max_prefill_tokens=max_prefill_tokens,
            chunk_multiple=chunk_multiple,
            oversubscribe=limits.oversubscribe,
        ),
        num_draft_tokens=num_draft_tokens,
        auto_lengths=auto_lengths and num_draft_tokens > 0,
        drafter_context=drafter_context,
    )


def build_engine(
    target: TargetModel,
    drafter: Drafter | None,
    config: EngineConfig,
    *,
    device: torch.device,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: frozenset[int] = frozenset(),
    runner: Runner | None = None,
    watch: RoundWatch | None = None,
) -> Engine:
    """An engine around loaded models; ``drafter=None`` decodes plainly.

    Args:
        target: the model.
        drafter: proposes.
        config: budgets.
        device: where the caches are.
        tokenizer: gives text; None serves token ids only.
        eos_token_ids: ids that end a request.
        runner: of the same models, config, device and watch; None makes one.
        watch: is shown every round.
    """
    runner = runner or Runner(target, drafter or NullDrafter(), config, device, watch=watch)
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        num_draft_tokens=config.num_draft_tokens,
        drafter_context=config.drafter_context,
        eos_token_ids=eos_token_ids,
        vocab_size=target.vocab_size,
    )
    return Engine(runner, scheduler, vocab_size=target.vocab_size, tokenizer=tokenizer, watch=watch)
