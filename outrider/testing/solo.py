"""What each prompt gives alone, remembered: the measure of every history of requests.

A ``Toy`` is a target, a DSpark drafter and a memo of solo plain runs: the stream of each prompt, and at every
length the state of every cache and what the drafter would propose.

Dims: L layers, R positions of one sequence, J key/value heads, K head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.batch import ForwardBatch, TargetOutput
from outrider.cache.recurrent import RecurrentSnapshot
from outrider.config import CacheConfig, EngineConfig, SchedulerConfig
from outrider.engine.engine import Engine
from outrider.engine.runner import Runner
from outrider.models.dspark.block import BlockPredictor
from outrider.models.protocol import TargetModel
from outrider.request import FinishReason, Request, SamplingParams
from outrider.scheduling.scheduler import Scheduler
from outrider.speculative.drafter import Anchors, Drafter, DSparkDrafter, ObservedSpans

__all__ = ["HistoryLimits", "Solo", "Toy", "build_parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLimits:
    """Budgets of the engine under test."""

    max_num_seqs: int
    page_size: int
    num_pages: int
    max_step_rows: int
    max_prefill_tokens: int
    num_draft_tokens: int
    oversubscribe: bool


@dataclass(slots=True, kw_only=True)
class Solo:
    """One prompt alone, plainly, up to the longest context."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...] = ()  # prompt and continuation
    latents_LRC: torch.Tensor  # of all positions that were computed
    context_2LRJK: torch.Tensor  # keys and values of the drafter
    recurrent: dict[int, RecurrentSnapshot] = field(default_factory=dict)  # by number of computed tokens
    proposals: dict[int, list[int]] = field(default_factory=dict)  # by position of the anchor

    def expected(self, sampling: SamplingParams, max_model_len: int) -> tuple[tuple[int, ...], FinishReason]:
        """What a request for this prompt must emit, and why it ends."""
        num_prompt = len(self.prompt)
        limit = max_model_len - num_prompt if sampling.max_tokens is None else sampling.max_tokens
        output = self.token_ids[num_prompt : num_prompt + limit]
        for index, token_id in enumerate(output):
            if token_id in sampling.stop_token_ids:
                return output[:index], FinishReason.STOP
        return output, FinishReason.LENGTH


class Toy:
    """A target, its drafter, prompts, and the memo of their solo runs.

    Args:
        target: a model; its logits must be finite for every token but ``poison_id``.
        predictor: the drafter.
        prompts: different first tokens, by which sequences are told apart.
        max_model_len: longest context.
        poison_id: a token whose embedding is NaN; the engine never emits it.
    """

    def __init__(
        self,
        target: TargetModel,
        predictor: BlockPredictor,
        prompts: Sequence[tuple[int, ...]],
        *,
        max_model_len: int,
        poison_id: int,
    ) -> None:
        assert len({prompt[0] for prompt in prompts}) == len(prompts)
        self.target, self.predictor = target, predictor
        self.prompts = tuple(prompts)
        self.max_model_len, self.poison_id = max_model_len, poison_id
        self._by_first_token = {prompt[0]: prompt for prompt in prompts}
        self._solos: dict[tuple[int, ...], Solo] = {}

    def solo(self, token_ids: Sequence[int]) -> Solo:
        """The solo run of the prompt with which ``token_ids`` begin."""
        prompt = self._by_first_token[token_ids[0]]
        if prompt not in self._solos:
            self._solos[prompt] = _run_solo(self, prompt)
        return self._solos[prompt]

    def config(self, limits: HistoryLimits) -> EngineConfig:
        """The engine config of some limits."""
        return EngineConfig(
            cache=CacheConfig(page_size=limits.page_size, num_pages=limits.num_pages),
            scheduler=SchedulerConfig(
                max_num_seqs=limits.max_num_seqs,
                max_model_len=self.max_model_len,
                max_step_rows=limits.max_step_rows,
                max_prefill_tokens=limits.max_prefill_tokens,
                chunk_multiple=self.target.chunk_multiple,
                oversubscribe=limits.oversubscribe,
            ),
            num_draft_tokens=limits.num_draft_tokens,
        )


class RecordingDrafter(DSparkDrafter):
    """Notes what it would propose at every position, and proposes nothing: decoding stays plain.

    It stores the context of its only sequence, whose cache rows are its positions, at once.
    """

    def __init__(self, predictor: BlockPredictor, *, num_cache_rows: int) -> None:
        super().__init__(predictor, num_cache_rows=num_cache_rows)
        self.proposals: dict[int, list[int]] = {}

    def propose(self, anchors: Anchors) -> None:
        """Note the drafts of the only sequence."""
        block = super().propose(anchors)
        assert block is not None
        (self.proposals[anchors.positions[0]],) = block.token_ids_SG.tolist()

    def observe(self, batch: ForwardBatch, output: TargetOutput, spans: ObservedSpans) -> None:
        """See Drafter."""
        super().observe(batch, output, spans)
        for slot in (*spans.step_slots, *spans.chunk_slots):
            self.snapshot(slot, torch.arange(self.observed_tokens(slot)))


def _run_solo(toy: Toy, prompt: tuple[int, ...]) -> Solo:
    chunk = toy.target.chunk_multiple
    limits = HistoryLimits(
        max_num_seqs=1,
        page_size=toy.max_model_len,  # one page: cache row = position
        num_pages=1,
        max_step_rows=max(chunk, 1 + toy.predictor.num_draft_tokens),
        max_prefill_tokens=chunk,  # every boundary at which a prompt may be cut
        num_draft_tokens=toy.predictor.num_draft_tokens,
        oversubscribe=False,
    )
    drafter = RecordingDrafter(toy.predictor, num_cache_rows=toy.max_model_len)
    runner, scheduler = build_parts(toy, drafter, limits)
    engine, caches = Engine(runner, scheduler, vocab_size=toy.target.vocab_size), runner.caches
    engine.submit(Request(request_id="solo", prompt_token_ids=prompt, sampling=SamplingParams()))
    (sequence,) = scheduler.sequences
    recurrent = {}
    while engine.has_work:
        for update in engine.step():
            assert update.finish_reason in (None, FinishReason.LENGTH), update.error
        recurrent[sequence.num_computed_tokens] = caches.recurrent.snapshot(0)
    rows = torch.arange(toy.max_model_len)
    return Solo(
        prompt=prompt,
        token_ids=tuple(sequence.token_ids),
        latents_LRC=caches.latents.snapshot(rows),
        context_2LRJK=drafter._context.rows_2LRJK.clone(),
        recurrent=recurrent,
        proposals=drafter.proposals,
    )


def build_parts(toy: Toy, drafter: Drafter, limits: HistoryLimits) -> tuple[Runner, Scheduler]:
    """The two sides of an engine around a toy."""
    config = toy.config(limits)
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        num_draft_tokens=config.num_draft_tokens,
        eos_token_ids=frozenset(),
        vocab_size=toy.target.vocab_size,
    )
    return Runner(toy.target, drafter, config, torch.device("cpu")), scheduler
