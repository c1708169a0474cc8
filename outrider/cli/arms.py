"""The engines of a comparison, and the prompts in the form that they get."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from outrider.bench.arm import ArmSpec
from outrider.bench.closed_loop import TokenisedPrompt
from outrider.bench.lengths import at_length
from outrider.bench.workload import BenchPrompt, PromptSet, draw_prompts
from outrider.cli.runtime import loading_bar
from outrider.engine.build import EngineLimits
from outrider.engine.llm import LLM
from outrider.engine.round_log import RoundLog
from outrider.engine.watch import RoundWatch
from outrider.errors import RequestError
from outrider.request import SamplingParams
from outrider.speculative.drafter import DSparkDrafter
from outrider.tokenizer import Tokenizer, answer_stop_ids

__all__ = [
    "ArmOptions",
    "Ticker",
    "answer_sampling",
    "draw_tiers",
    "open_arms",
    "tokenise",
    "tokenizer_of",
]

SECONDS_BETWEEN_LINES = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmOptions:
    """What the engines of all arms share."""

    model: Path
    drafter: Path
    dtype: str | None
    device: str
    experts: Literal["auto", "unpacked", "packed"]
    max_num_seqs: int
    numerics: Literal["exact", "fast"]
    probe: Literal["auto", "force", "skip"]
    limits: EngineLimits | None = None
    drafter_type: Callable[..., DSparkDrafter] = DSparkDrafter
    lookup: bool = True
    record_rounds: str = ""  # file for the rounds, the arm is put before its suffix; "" = none


def open_arms(arms: Sequence[ArmSpec], options: ArmOptions) -> dict[str, LLM]:
    """One engine per arm, by its name, in the order of `arms`.

    An arm without a drafter captures nothing and keeps no drafter memory. Each arm loads its own copy of the
    target, because taps are set on the model.
    """
    engines = {}
    for arm in arms:
        begin = time.perf_counter()
        with loading_bar(f"{options.model.name}, arm {arm.name}") as progress:
            engines[arm.name] = LLM(
                options.model,
                drafter=options.drafter if arm.with_drafter else None,
                speculation=arm.speculation,
                dtype=options.dtype,
                device=options.device,
                experts=options.experts,
                max_num_seqs=options.max_num_seqs,
                limits=options.limits,
                drafter_type=options.drafter_type,
                lookup=options.lookup,
                numerics=options.numerics,
                probe=options.probe,
                progress=progress,
                watch=_round_watch(arm, options),
            )
        engines[arm.name].profile_costs()
        logger.info("loaded arm %s in %.1f s", arm.name, time.perf_counter() - begin)
    return engines


def _round_watch(arm: ArmSpec, options: ArmOptions) -> RoundWatch | None:
    """A recorder of the arm's rounds, if they are wanted."""
    if not options.record_rounds:
        return None
    path = Path(options.record_rounds)
    settings = {
        "model": options.model.name,
        "drafter": options.drafter.name,
        "arm": arm.name,
        "speculation": arm.speculation,
        "max_num_seqs": options.max_num_seqs,
    }
    return RoundWatch(RoundLog(path.with_name(f"{path.stem}.{arm.name}{path.suffix}"), settings))


def tokenizer_of(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        RequestError: the checkpoint has none.
    """
    if tokenizer is None:
        raise RequestError("the model has no tokenizer files, which prompts in text form need; add them")
    return tokenizer


def tokenise(prompt: BenchPrompt, tokenizer: Tokenizer) -> TokenisedPrompt:
    """The prompt as a user message in the chat form, ready for the answer."""
    token_ids = tokenizer.render_chat([{"role": "user", "content": prompt.text}])
    return TokenisedPrompt(question_id=prompt.question_id, token_ids=tuple(token_ids))


def answer_sampling(tokenizer: Tokenizer, max_tokens: int) -> SamplingParams:
    """Greedy, up to `max_tokens` or to the end of the answer that `tokenise` asks for."""
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=answer_stop_ids(tokenizer))


def draw_tiers(
    prompt_set: PromptSet,
    tiers: Sequence[str],
    num_prompts: int,
    *,
    tokenizer: Tokenizer,
    room: int,
    length: int | None = None,
) -> dict[str, tuple[BenchPrompt, ...]]:
    """Prompts to measure with, by tier; says where a tier has fewer than ``num_prompts``.

    Args:
        prompt_set: to draw from.
        tiers: categories.
        num_prompts: of each tier.
        tokenizer: of the target.
        room: tokens that a prompt may have: the context less the answer.
        length: tokens that every prompt shall have, see `at_length`; None leaves them as they are.

    Raises:
        RequestError: a tier has no usable prompt, or the length does not fit.
    """
    if length is not None and length > room:
        raise RequestError(f"prompts of {length} tokens do not fit the {room} that the answer leaves; shorten either")

    def count(text: str) -> int:
        return len(tokenizer.render_chat([{"role": "user", "content": text}]))

    drawn = {}
    for tier in tiers:
        wanted = [prompt for prompt in prompt_set.prompts if prompt.tier == tier]
        if length is not None:
            in_order = draw_prompts(wanted, tier, len(wanted) or num_prompts)
            drawn[tier] = tuple(islice(at_length(in_order, length, count), num_prompts))
        else:
            fitting = [prompt for prompt in wanted if count(prompt.text) <= room]
            if len(fitting) < len(wanted):
                logger.warning(
                    "%s: %d of %d prompts are longer than the %d tokens that the answer leaves, and left out",
                    tier, len(wanted) - len(fitting), len(wanted), room,
                )  # fmt: skip
            drawn[tier] = draw_prompts(fitting, tier, num_prompts)
        if not drawn[tier]:
            raise RequestError(f"tier {tier!r} has no prompt that can be cut to {length} tokens; use a larger length")
        if len(drawn[tier]) < num_prompts:
            logger.warning("%s: %d usable prompts, fewer than the %d asked for", tier, len(drawn[tier]), num_prompts)
    return drawn


class Ticker:
    """Logs progress now and then. No thread of its own: a spinner would disturb what is measured."""

    def __init__(self) -> None:
        self._last_s = float("-inf")

    def __call__(self, line: str) -> None:
        """Log `line` unless another one was logged shortly before."""
        now_s = time.perf_counter()
        if now_s - self._last_s >= SECONDS_BETWEEN_LINES:
            self._last_s = now_s
            logger.info("%s", line)
