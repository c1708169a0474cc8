"""What a round with drafts costs on this machine against plain rounds, one sequence at a time."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.bench.pair_texts import PairText
from outrider.engine.build import EngineLimits, build_engine, resolve_config
from outrider.errors import EngineFault
from outrider.models.dspark.block import BlockPredictor
from outrider.models.protocol import TargetModel
from outrider.request import FinishReason, Request, SamplingParams
from outrider.speculative.drafter import DSparkDrafter

__all__ = ["RoundCost", "measure_cost", "timed_tokens"]

NUM_TURNS = 3  # plain and speculative rounds take turns
NUM_ROUNDS = 24  # of each in a turn
NUM_WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCost:
    """Medians over rounds, in milliseconds."""

    plain_ms: float  # a round without drafts, by an engine without a drafter
    round_ms: float  # a round with drafts, all verified
    propose_ms: float
    verify_ms: float  # the target's forward over anchor and drafts

    @property
    def break_even(self) -> float:
        """Tokens per round from which drafts gain time."""
        return self.round_ms / self.plain_ms

    def speed_up(self, tokens_per_round: float) -> float:
        """Tokens a second over plain decoding."""
        return tokens_per_round / self.break_even


@dataclass(slots=True)
class _Times:
    """Milliseconds of the rounds of one kind."""

    round_ms: list[float] = field(default_factory=list)
    propose_ms: list[float] = field(default_factory=list)
    forward_ms: list[float] = field(default_factory=list)


def timed_tokens(num_drafts: int) -> int:
    """Output tokens that the rounds of one turn may give."""
    return (NUM_ROUNDS + NUM_WARM_UP + 1) * (1 + num_drafts) + 1


def measure_cost(target: TargetModel, predictor: BlockPredictor, texts: Sequence[PairText]) -> RoundCost:
    """Time rounds of the engine on the prompts of the texts.

    Args:
        target: its taps are set.
        predictor: drafts; the time of a round hardly depends on how well. Its context holds every prompt and
            ``timed_tokens``.
        texts: their prompts are answered again.
    """
    plain, drafted = _Times(), _Times()
    for turn in range(NUM_TURNS):
        prompt = texts[turn % len(texts)].token_ids[: texts[turn % len(texts)].num_prompt]
        _time_rounds(target, None, prompt, plain)
        _time_rounds(target, predictor, prompt, drafted)
    return RoundCost(
        plain_ms=statistics.median(plain.round_ms),
        round_ms=statistics.median(drafted.round_ms),
        propose_ms=statistics.median(drafted.propose_ms),
        verify_ms=statistics.median(drafted.forward_ms),
    )


def _time_rounds(target: TargetModel, predictor: BlockPredictor | None, prompt: tuple[int, ...], times: _Times) -> None:
    """Rounds of a new engine, after those of the prompt and some to warm up; taps are on only where they are read."""
    num_drafts = 0 if predictor is None else predictor.num_draft_tokens
    max_tokens = timed_tokens(num_drafts)
    config = resolve_config(
        EngineLimits(),
        max_num_seqs=1,
        max_model_len=len(prompt) + max_tokens,
        num_draft_tokens=num_drafts,
        chunk_multiple=target.chunk_multiple,
    )
    drafter = None
    if predictor is not None:
        drafter = DSparkDrafter(predictor, num_cache_rows=config.cache.num_pages * config.cache.page_size)
    engine = build_engine(target, drafter, config, device=target.embedding.device)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.submit(Request(request_id="timed", prompt_token_ids=prompt, sampling=sampling))
    while not any(update.new_token_ids for update in engine.step()):
        pass
    for index in range(NUM_WARM_UP + NUM_ROUNDS):
        propose_s, forward_s, begin_s = engine.metrics.propose_s, engine.metrics.forward_s, time.perf_counter()
        updates = engine.step()
        seconds = time.perf_counter() - begin_s
        if any(update.finish_reason is FinishReason.ERROR for update in updates):
            raise EngineFault(f"a timed round failed: {updates[0].error}")
        if index >= NUM_WARM_UP:
            times.round_ms.append(1000 * seconds)
            times.propose_ms.append(1000 * (engine.metrics.propose_s - propose_s))
            times.forward_ms.append(1000 * (engine.metrics.forward_s - forward_s))
    engine.shutdown()
