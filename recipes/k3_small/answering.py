"""A set of prompts through an engine: what rollouts, loop repair and evaluation share."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.engine.build import EngineLimits, build_engine, resolve_config
from outrider.engine.engine import Engine
from outrider.models.protocol import TargetModel
from outrider.request import Request, RequestUsage, SamplingParams

__all__ = ["Answer", "answer_all", "plain_engine"]


@dataclass(slots=True)
class Answer:
    """One prompt's output; ``stop_id`` is the stop token that ended it, None if none did."""

    token_ids: list[int] = field(default_factory=list)
    stop_id: int | None = None
    usage: RequestUsage | None = None


def plain_engine(target: TargetModel, *, chunk_multiple: int, num_seats: int, max_model_len: int) -> Engine:
    """An engine without a drafter around a target, or around what stands in for one."""
    config = resolve_config(
        EngineLimits(max_prefill_tokens=1024),
        max_num_seqs=num_seats,
        max_model_len=max_model_len,
        num_draft_tokens=0,
        chunk_multiple=chunk_multiple,
    )
    return build_engine(target, None, config, device=torch.device("cpu"))


def answer_all(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Answer]:
    """Answers in the order of the prompts."""
    answers = [Answer() for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.submit(Request(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling))
    while engine.has_work:
        for update in engine.step():
            answer = answers[int(update.request_id)]
            answer.token_ids += update.new_token_ids
            answer.usage = update.usage
            if isinstance(update.stop_reason, int):
                answer.stop_id = update.stop_reason
    return answers
