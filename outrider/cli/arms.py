"""The engines of a comparison, and the prompts in the form that they get."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.bench.closed_loop import TokenisedPrompt
from outrider.bench.workload import BenchPrompt, PromptSet, draw_prompts
from outrider.cli.runtime import loading_bar
from outrider.engine.llm import LLM
from outrider.engine.round_log import RoundLog
from outrider.engine.watch import RoundWatch
from outrider.errors import ConfigError, RequestError
from outrider.request import SamplingParams
from outrider.tokenizer import Tokenizer, answer_stop_ids

__all__ = [
    "ARM_NAMES",
    "ArmOptions",
    "Ticker",
    "answer_sampling",
    "draw_tiers",
    "open_arms",
    "tokenise",
    "tokenizer_of",
    "usable_prompts",
]

ARM_NAMES = ("plain", "spec")
SECONDS_BETWEEN_LINES = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmOptions:
    """What the engines of all arms share."""

    model: Path
    drafter: Path
    speculation: str | int
    dtype: str | None
    device: str
    experts: Literal["auto", "unpacked", "packed"]
    max_num_seqs: int
    numerics: Literal["exact", "fast"]
    probe: Literal["auto", "force", "skip"]
    record_rounds: str = ""  # file for the rounds, the arm is put before its suffix; "" = none


def open_arms(names: Sequence[str], options: ArmOptions) -> dict[str, LLM]:
    """One engine per arm, in the order of `names`.

    `plain` is an engine without a drafter: it captures nothing and keeps no drafter memory. Each arm loads its
    own copy of the target, because taps are set on the model.

    Raises:
        ConfigError: an unknown arm, or one named twice.
    """
    if not names or len(set(names)) != len(names) or not set(names) <= set(ARM_NAMES):
        raise ConfigError(f"arms={','.join(names)!r}: use plain, spec or both, each once")
    arms = {}
    for name in names:
        begin = time.perf_counter()
        with loading_bar(f"{options.model.name}, arm {name}") as progress:
            arms[name] = LLM(
                options.model,
                drafter=options.drafter if name == "spec" else None,
                speculation=options.speculation if name == "spec" else "off",
                dtype=options.dtype,
                device=options.device,
                experts=options.experts,
                max_num_seqs=options.max_num_seqs,
                numerics=options.numerics,
                probe=options.probe,
                progress=progress,
                watch=_round_watch(name, options),
            )
        arms[name].profile_costs()
        logger.info("loaded arm %s in %.1f s", name, time.perf_counter() - begin)
    return arms


def _round_watch(arm: str, options: ArmOptions) -> RoundWatch | None:
    """A recorder of the arm's rounds, if they are wanted."""
    if not options.record_rounds:
        return None
    path = Path(options.record_rounds)
    settings = {
        "model": options.model.name,
        "drafter": options.drafter.name,
        "arm": arm,
        "speculation": options.speculation if arm == "spec" else "off",
        "max_num_seqs": options.max_num_seqs,
    }
    return RoundWatch(RoundLog(path.with_name(f"{path.stem}.{arm}{path.suffix}"), settings))


def tokenizer_of(llm: LLM) -> Tokenizer:
    """The tokenizer of an engine.

    Raises:
        RequestError: the checkpoint has none.
    """
    if llm.tokenizer is None:
        raise RequestError("the model has no tokenizer files, which prompts in text form need; add them")
    return llm.tokenizer


def tokenise(prompt: BenchPrompt, tokenizer: Tokenizer) -> TokenisedPrompt:
    """The prompt as a user message in the chat form, ready for the answer."""
    token_ids = tokenizer.render_chat([{"role": "user", "content": prompt.text}])
    return TokenisedPrompt(question_id=prompt.question_id, token_ids=tuple(token_ids))


def answer_sampling(tokenizer: Tokenizer, max_tokens: int) -> SamplingParams:
    """Greedy, up to `max_tokens` or to the end of the answer that `tokenise` asks for."""
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=answer_stop_ids(tokenizer))


def usable_prompts(
    prompts: Sequence[BenchPrompt], tiers: Sequence[str], llm: LLM, max_tokens: int
) -> tuple[BenchPrompt, ...]:
    """Prompts of the tiers that fit the context together with their answer; says how many did not."""
    tokenizer = tokenizer_of(llm)
    wanted = [prompt for prompt in prompts if prompt.tier in tiers]
    room = llm.max_model_len - max_tokens
    fitting = tuple(prompt for prompt in wanted if len(tokenise(prompt, tokenizer).token_ids) <= room)
    if len(fitting) < len(wanted):
        logger.warning(
            "%d of %d prompts are longer than %d tokens (context %d less %d to generate) and left out",
            len(wanted) - len(fitting), len(wanted), room, llm.max_model_len, max_tokens,
        )  # fmt: skip
    return fitting


def draw_tiers(
    prompt_set: PromptSet, tiers: Sequence[str], num_prompts: int, llm: LLM, max_tokens: int
) -> dict[str, tuple[BenchPrompt, ...]]:
    """Prompts to measure with, by tier; says where a tier has fewer than ``num_prompts``.

    Raises:
        RequestError: a tier has no usable prompt.
    """
    usable = usable_prompts(prompt_set.prompts, tiers, llm, max_tokens)
    drawn = {tier: draw_prompts(usable, tier, num_prompts) for tier in tiers}
    for tier, prompts in drawn.items():
        if len(prompts) < num_prompts:
            logger.warning("%s: %d usable prompts, fewer than the %d asked for", tier, len(prompts), num_prompts)
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
