"""State machines: any order of events on a real engine leaves every stream and every cache as alone.

Events: submit, rounds with any accept counts, abort, preempt, and a device fault at any verb. What is checked after
each is in ``outrider.testing.history``. ``--schedules N`` runs more than `make test` does. The second half plants
faults and expects the machine to find them.
"""

import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outrider.batch import ForwardBatch, SubmittedDrafts, TokenChoices, VerifyResult
from outrider.cache import CacheSet, LatentCache, RecurrentCache, RecurrentSnapshot
from outrider.engine import accept as engine_accept
from outrider.engine.batching import PageTable
from outrider.errors import EngineFault
from outrider.models.dspark.checkpoint import TargetTables
from outrider.models.dspark.load import load_predictor
from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.registry import load_target
from outrider.ops import kda_step
from outrider.plan import SharedPrompt
from outrider.request import RequestUpdate, SamplingParams, Speculation
from outrider.scheduling import Scheduler, Sequence
from outrider.scheduling.seats import Seats
from outrider.scheduling.sharing import PromptSharing
from outrider.speculative.drafter import DSparkDrafter
from outrider.testing.history import REAL, History
from outrider.testing.solo import HistoryLimits, Toy
from outrider.testing.toy import ToyOptions, write_toy_checkpoint
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

VOCAB, MASK, POISON, MAX_LEN, DRAFTS = 61, 60, 59, 44, 4
PROMPT_LENGTHS = (1, 2, 3, 5, 7, 15, 16, 17, 33)


def make_toy(directory: Path, *, num_layers: int, mla_layers: tuple[int, ...], snapshot_every: int) -> Toy:
    """As small as the structure allows: what costs time here is the number of operations, not their size."""
    options = ToyOptions(
        num_layers=num_layers,
        mla_layers=mla_layers,
        attn_res_block_size=snapshot_every,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        kda_heads=2,
        kda_head_dim=8,
        mla_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        nope_head_dim=8,
        rope_head_dim=4,
        v_head_dim=8,
        num_experts=2,
        experts_per_token=1,
        moe_intermediate_size=16,
        latent_size=16,
        num_shared_experts=1,
        quantized=False,
        num_shards=1,
    )
    target = load_target(write_toy_checkpoint(directory / "target", options, seed=3), dtype=torch.float64)
    assert isinstance(target, KimiK3Model)
    drafter = ToyDrafterOptions(
        num_layers=1,
        hidden_size=32,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=32,
        vocab_size=VOCAB,
        mask_token_id=MASK,
        block_rows=DRAFTS,
        num_target_layers=num_layers,
        aux_layer_ids=(0, num_layers - 2),
        markov_rank=8,
        confidence="none",
    )
    write_toy_drafter(directory / "drafter", drafter)
    tables = TargetTables(embedding_VD=target.embedding, head_VD=target.lm_head)
    predictor = load_predictor(directory / "drafter", target, tables, max_context=MAX_LEN)
    with torch.no_grad():
        target.embedding[POISON] = torch.nan
        target.lm_head[POISON] = 0
    dice = random.Random(num_layers)
    prompts = [(first, *(dice.randrange(58) for _ in range(n - 1))) for first, n in enumerate(PROMPT_LENGTHS)]
    return Toy(target, predictor, prompts, max_model_len=MAX_LEN, poison_id=POISON)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """KDA, MLA, KDA."""
    return make_toy(tmp_path_factory.mktemp("shallow"), num_layers=3, mla_layers=(1,), snapshot_every=2)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Four snapshots of the residual stream, the last two layers MLA next to KDA, as in the real model."""
    return make_toy(tmp_path_factory.mktemp("deep"), num_layers=14, mla_layers=(3, 7, 11, 13), snapshot_every=4)


counts = st.lists(st.integers(REAL, DRAFTS), min_size=1, max_size=3).map(tuple)
accepts = st.lists(counts, min_size=1, max_size=2)
VERBS = ("propose", "observe", "reset", "snapshot", "restore")
fault = st.sampled_from([None] * 3 * len(VERBS) + list(VERBS))


class EngineHistory(RuleBasedStateMachine):
    """Any order of events; ``History`` does the checking."""

    def __init__(self, toy: Toy, seen: Counter[str]) -> None:
        super().__init__()
        self.toy, self.seen = toy, seen

    @initialize(
        seed=st.integers(0, 2**16),
        num_seqs=st.integers(1, 4),
        page_size=st.sampled_from([4, 7, 16]),
        spare=st.sampled_from([0, 0, 4, 12, 40]),
        rows=st.integers(16, 30),
        prefill=st.integers(16, 40),
        num_drafts=st.sampled_from([DRAFTS, DRAFTS, DRAFTS, 2, 0]),
        oversubscribe=st.booleans(),
        asked=st.lists(st.integers(0, len(PROMPT_LENGTHS) - 1), min_size=1, max_size=3),
        abort_rest=st.sampled_from([True, True, True, False]),
    )
    def start(
        self,
        seed: int,
        num_seqs: int,
        page_size: int,
        spare: int,
        rows: int,
        prefill: int,
        num_drafts: int,
        oversubscribe: bool,
        asked: list[int],
        abort_rest: bool,
    ) -> None:
        limits = HistoryLimits(
            max_num_seqs=num_seqs,
            page_size=page_size,
            num_pages=-(-(MAX_LEN + spare) // page_size),
            max_step_rows=rows,
            max_prefill_tokens=prefill,
            num_draft_tokens=num_drafts,
            oversubscribe=oversubscribe,
        )
        self.history, self.abort_rest = History(self.toy, limits, seed), abort_rest
        for prompt in asked:
            self.submit(prompt, 11, None, "auto")

    @rule(
        prompt=st.integers(0, len(PROMPT_LENGTHS) - 1),
        max_tokens=st.sampled_from([0, 1, 2, 3, 5, 8, 11, None]),
        stop_at=st.one_of(st.none(), st.integers(0, 9)),
        speculation=st.sampled_from(["auto", "auto", "off"]),
    )
    def submit(self, prompt: int, max_tokens: int | None, stop_at: int | None, speculation: Speculation) -> None:
        prompt_ids = self.toy.prompts[prompt]
        output = self.toy.solo(prompt_ids).token_ids[len(prompt_ids) :]
        sampling = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=() if stop_at is None else output[stop_at : stop_at + 1],
            speculation=speculation,
        )
        self.history.submit(prompt_ids, sampling)

    @rule(
        prompt=st.sampled_from([n for n, length in enumerate(PROMPT_LENGTHS) if length >= 15]),
        count=st.integers(2, 4),
        max_tokens=st.sampled_from([0, 1, 3, 8]),
        accepts=accepts,
    )
    def submit_samples(self, prompt: int, count: int, max_tokens: int, accepts: list[tuple[int, ...]]) -> None:
        self.history.submit_samples(self.toy.prompts[prompt], SamplingParams(max_tokens=max_tokens), count)
        self.history.round(accepts[0])

    @rule(accepts=accepts, poisoned=st.booleans(), fault_in=fault)
    def rounds(self, accepts: list[tuple[int, ...]], poisoned: bool, fault_in: str | None) -> None:
        if fault_in == "reset":  # only who has just come is reset
            self.history.round(accepts[0], fault_in=fault_in)
        for accept_counts in accepts:
            self.history.round(accept_counts, poisoned=poisoned)
        if fault_in not in (None, "reset"):
            self.history.round(accepts[-1], fault_in=fault_in)

    @rule(accepts=accepts, poisoned=st.booleans())
    def more_rounds(self, accepts: list[tuple[int, ...]], poisoned: bool) -> None:
        """A second rule of the kind, because rules are drawn evenly and rounds are what time is for."""
        self.rounds(accepts, poisoned, None)

    @precondition(lambda self: self.history.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.history.abort(data.draw(st.sampled_from(self.history.unfinished)))

    @precondition(lambda self: self.history.unfinished)
    @rule(data=st.data(), accept_counts=counts, fault_in=st.sampled_from([None, None, None, "snapshot", "restore"]))
    def preempt(self, data: st.DataObject, accept_counts: tuple[int, ...], fault_in: str | None) -> None:
        names = data.draw(st.lists(st.sampled_from(self.history.unfinished), min_size=1, max_size=2, unique=True))
        for name in names:
            self.history.preempt(name)
        if data.draw(st.booleans()):  # otherwise whatever comes next meets a copy that is not made yet
            self.history.round(accept_counts, fault_in=fault_in)
        if fault_in == "restore":
            self.history.round(accept_counts, fault_in=fault_in)

    @invariant()
    def books_balance(self) -> None:
        self.history.check_books()

    def teardown(self) -> None:
        if "history" in vars(self):
            self.history.finish(abort=self.abort_rest)
            self.seen.update(self.history.seen)


def explore(toy: Toy, num_schedules: int, phases: tuple[Phase, ...] = tuple(Phase)) -> Counter[str]:
    """Run histories; returns how often something happened."""
    seen: Counter[str] = Counter()
    run_state_machine_as_test(
        functools.partial(EngineHistory, toy, seen),
        settings=settings(max_examples=num_schedules, stateful_step_count=7, phases=phases),
    )
    return seen


def test_solo_streams_are_worth_comparing(shallow: Toy, deep: Toy) -> None:
    for toy in (shallow, deep):
        outputs = [toy.solo(prompt).token_ids[len(prompt) :] for prompt in toy.prompts]
        assert sum(len(set(output)) for output in outputs) > 60, "a toy that repeats itself proves little"
        assert all(POISON not in output for output in outputs)


EVENTS = (
    "preempted by force",
    "preempted for pages",
    "resumed",
    "prompts copied",
    "prompts taken over",
    "aborted while preempted",
    "cut prompts",
    "split rounds",
    "rejected drafts",
    "stops",
    *(f"fault in {verb}" for verb in VERBS),
)


def test_histories_of_a_shallow_model(shallow: Toy, num_schedules: int) -> None:
    seen = explore(shallow, num_schedules)
    if num_schedules >= 1000:
        assert not [event for event in EVENTS if not seen[event]], f"some events never happened: {seen}"


def test_histories_of_a_deep_model(deep: Toy, num_schedules: int) -> None:
    explore(deep, max(1, num_schedules // 20))


def leak_a_page_on_abort(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler.abort

    def wrong(self: Scheduler, request_id: str) -> RequestUpdate | None:
        for sequence in self.sequences:
            if sequence.request.request_id == request_id:
                sequence.page_ids = sequence.page_ids[:-1]
        return right(self, request_id)

    patch.setattr(Scheduler, "abort", wrong)


def keep_the_copy_of_an_ended_request(patch: pytest.MonkeyPatch) -> None:
    right = Seats.end

    def wrong(self: Seats, sequence: Sequence) -> None:
        sequence.on_host = False
        right(self, sequence)

    patch.setattr(Seats, "end", wrong)


def skip_the_conv_rollback(patch: pytest.MonkeyPatch) -> None:
    right = kda_step.shift_window

    def wrong(window: torch.Tensor, inputs: torch.Tensor, num_committed: torch.Tensor) -> torch.Tensor:
        return right(window, inputs, torch.full_like(num_committed, inputs.shape[2]))

    patch.setattr(kda_step, "shift_window", wrong)


def commit_one_row_less(patch: pytest.MonkeyPatch) -> None:
    right = CacheSet.commit

    def wrong(self: CacheSet, batch: ForwardBatch, num_committed: torch.Tensor) -> None:
        right(self, batch, (num_committed - 1).clamp_min(1))

    patch.setattr(CacheSet, "commit", wrong)


def commit_the_count_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    right = CacheSet.commit

    def wrong(self: CacheSet, batch: ForwardBatch, num_committed: torch.Tensor) -> None:
        right(self, batch, num_committed.roll(1))

    patch.setattr(CacheSet, "commit", wrong)


def accept_one_draft_less(patch: pytest.MonkeyPatch) -> None:
    """The stream stays right; only the count tells."""
    right = engine_accept.verify

    def wrong(logits: torch.Tensor, drafts: SubmittedDrafts, choices: TokenChoices | None) -> VerifyResult:
        result = right(logits, drafts, choices)
        return replace(result, num_accepted_S=(result.num_accepted_S - 1).clamp_min(0))

    patch.setattr(engine_accept, "verify", wrong)


def forget_the_drafter_state_on_preemption(patch: pytest.MonkeyPatch) -> None:
    right = DSparkDrafter.snapshot

    def wrong(self: DSparkDrafter, slot: int, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(part) for part in right(self, slot, rows))

    patch.setattr(DSparkDrafter, "snapshot", wrong)


def forget_the_conv_window_on_preemption(patch: pytest.MonkeyPatch) -> None:
    right = RecurrentCache.restore

    def wrong(self: RecurrentCache, slot: int, snapshot: RecurrentSnapshot) -> None:
        right(self, slot, replace(snapshot, window_LWD=torch.zeros_like(snapshot.window_LWD)))

    patch.setattr(RecurrentCache, "restore", wrong)


def restore_latents_in_reverse(patch: pytest.MonkeyPatch) -> None:
    right = LatentCache.restore
    patch.setattr(LatentCache, "restore", lambda self, rows, snapshot: right(self, rows.flip(0), snapshot))


def leave_the_last_page_stale(patch: pytest.MonkeyPatch) -> None:
    right = PageTable.assign
    patch.setattr(PageTable, "assign", lambda self, slot, page_ids: right(self, slot, page_ids[:-1] or page_ids))


def keep_the_copy_of_a_prompt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PromptSharing, "spent_copies", lambda self: ())


def copy_a_prompt_short_of_a_token(patch: pytest.MonkeyPatch) -> None:
    right = PromptSharing.new_copies

    def wrong(self: PromptSharing) -> tuple[SharedPrompt, ...]:
        return tuple(replace(copy, num_tokens=copy.num_tokens - 1) for copy in right(self))

    patch.setattr(PromptSharing, "new_copies", wrong)


FAULTS = {
    leak_a_page_on_abort: "a page leaked",
    keep_the_copy_of_an_ended_request: "host cop(y|ies)",
    skip_the_conv_rollback: "conv window",
    commit_one_row_less: "KDA state",
    commit_the_count_of_the_neighbour: "KDA state|conv window",
    accept_one_draft_less: "rows of . committed, not",
    forget_the_drafter_state_on_preemption: "drafter",
    forget_the_conv_window_on_preemption: "differs from the solo run|committed, not",
    restore_latents_in_reverse: "differs from the solo run",
    leave_the_last_page_stale: "differs from the solo run|not finite",
    keep_the_copy_of_a_prompt: "cop(y|ies) of (a )?prompt",
    copy_a_prompt_short_of_a_token: "copy at position|does not continue|differs from the solo run",
}


@pytest.mark.parametrize(("plant", "words"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_fault_is_found(
    shallow: Toy, plant: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for prompt in shallow.prompts:
        shallow.solo(prompt)  # before the fault
    plant(monkeypatch)
    with pytest.raises((AssertionError, EngineFault), match=words):
        explore(shallow, 300, phases=(Phase.generate,))
