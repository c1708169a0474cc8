"""Speculation is exact on a real K3 toy in float64: same tokens, same logits, whatever the drafter does."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outrider.batch import ForwardBatch, TargetOutput
from outrider.config import CacheConfig, EngineConfig, SchedulerConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.engine.runner import Runner
from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.protocol import TargetCaches
from outrider.models.registry import load_target
from outrider.request import Request, SamplingParams
from outrider.speculative.lengths import AllDrafts, unforeseen
from outrider.testing.scripted import Script, ScriptedDrafter, garbage, oracle, random_drafts, wrong_at
from outrider.testing.toy import ToyOptions, deep_toy, write_toy_checkpoint

pytestmark = pytest.mark.gates
CPU = torch.device("cpu")
MAX_LEN, PAGE, POISON = 200, 8, 7  # POISON: a token id whose embedding is NaN


def load(directory: Path, options: ToyOptions) -> KimiK3Model:
    model = load_target(write_toy_checkpoint(directory, options, seed=3), dtype=torch.float64)
    assert isinstance(model, KimiK3Model)
    with torch.no_grad():
        model.embedding[POISON] = torch.nan
        model.lm_head[POISON] = 0
    return model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> KimiK3Model:
    """Eight layers: three snapshots of the residual stream, the last two layers MLA."""
    return load(tmp_path_factory.mktemp("toy"), ToyOptions(vocab_size=257, num_shards=1))


class Recorder:
    """A target that notes the logits of every (context, position) it is asked for, by request."""

    def __init__(self, model: KimiK3Model) -> None:
        self.model = model
        self.vocab_size, self.hidden_size, self.num_layers = model.vocab_size, model.hidden_size, model.num_layers
        self.chunk_multiple, self.cache_layouts = model.chunk_multiple, model.cache_layouts
        self.aux_layer_ids = model.aux_layer_ids
        self.logits: dict[tuple[int, int], list[torch.Tensor]] = {}  # (slot, position)

    def set_aux_layers(self, layer_ids: tuple[int, ...], stream: str) -> None:
        assert not layer_ids

    def forward(self, batch: ForwardBatch, caches: TargetCaches) -> TargetOutput:
        output = self.model.forward(batch, caches)
        slots = torch.cat([batch.step.state_slots_S, batch.chunk.state_slots_S])
        for row, logits_V in zip(batch.logits_rows_N.tolist(), output.logits_NV, strict=True):
            key = (int(slots[batch.sequence_T[row]]), int(batch.positions_T[row]))
            self.logits.setdefault(key, []).append(logits_V.clone())
        return output


def engine_for(
    target: KimiK3Model | Recorder,
    drafter: ScriptedDrafter | None,
    *,
    seqs: int,
    rows: int = 96,
    pages: int = 0,
    auto: bool = False,
) -> Engine:
    config = EngineConfig(
        cache=CacheConfig(page_size=PAGE, num_pages=pages or seqs * (MAX_LEN // PAGE)),
        scheduler=SchedulerConfig(
            max_num_seqs=seqs,
            max_model_len=MAX_LEN,
            max_step_rows=rows,
            max_prefill_tokens=rows,
            chunk_multiple=target.chunk_multiple,
        ),
        num_draft_tokens=drafter.num_draft_tokens if drafter else 0,
        auto_lengths=auto,
    )
    return build_engine(target, drafter, config, device=CPU)  # type: ignore[arg-type]


def ask(name: str, prompt: Sequence[int], max_tokens: int | None, stop: tuple[int, ...] = ()) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=stop),
    )


def drive(engine: Engine, asked: Sequence[Request], late: int = 0) -> dict[str, tuple[tuple[int, ...], str]]:
    waiting = list(asked)
    tokens: dict[str, tuple[int, ...]] = {request.request_id: () for request in asked}
    finished = {}
    for _ in range(len(waiting) - late):
        engine.submit(waiting.pop(0))
    while engine.has_work or waiting:
        if waiting:
            engine.submit(waiting.pop(0))
        for update in engine.step():
            tokens[update.request_id] += update.new_token_ids
            if update.finish_reason is not None:
                finished[update.request_id] = (tokens[update.request_id], update.finish_reason.value)
    return finished


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    dice = random.Random(11)
    lengths_and_limits = [(1, 12), (3, 9), (70, 8), (64, 11), (9, 2), (190, None), (33, 1), (5, 12)]
    return [
        ask(f"r{index}", [dice.randrange(8, 250) for _ in range(length)], limit)
        for index, (length, limit) in enumerate(lengths_and_limits)
    ]


@pytest.fixture(scope="module")
def plain(target: KimiK3Model, asked: list[Request]) -> dict[str, tuple[tuple[int, ...], str]]:
    return drive(engine_for(target, None, seqs=1), asked)


@pytest.fixture(scope="module")
def right(asked: list[Request], plain: dict[str, tuple[tuple[int, ...], str]]) -> Script:
    return oracle([request.prompt_token_ids + plain[request.request_id][0] for request in asked])


def test_plain_streams_are_worth_comparing(plain: dict[str, tuple[tuple[int, ...], str]]) -> None:
    assert sum(len(set(tokens)) for tokens, _ in plain.values()) > 30, "a toy that repeats itself proves little"
    assert plain["r5"] == (plain["r5"][0], "length")
    assert len(plain["r5"][0]) == 10


@pytest.mark.parametrize(
    ("kind", "num_drafts", "seqs", "rows", "late"),
    [
        ("none", 0, 8, 96, 0),
        ("oracle", 7, 1, 96, 0),
        ("oracle", 7, 8, 96, 0),
        ("oracle", 3, 4, 24, 6),
        ("wrong-at-0", 7, 3, 16, 2),
        ("wrong-at-2", 7, 8, 70, 8),
        ("wrong-at-5", 6, 2, 64, 0),
        ("garbage", 7, 5, 48, 4),
        ("poison", 7, 8, 96, 3),
        ("random", 1, 8, 20, 0),
        ("random", 7, 8, 64, 5),
        ("random", 5, 3, 96, 7),
    ],
)
def test_speculation_gives_the_plain_stream(  # type: ignore[no-untyped-def]
    target, asked, plain, right, kind: str, num_drafts: int, seqs: int, rows: int, late: int
) -> None:
    script = {
        "none": garbage(1),
        "oracle": right,
        "wrong-at-0": wrong_at(0, right, 250),
        "wrong-at-2": wrong_at(2, right, 250),
        "wrong-at-5": wrong_at(5, right, 250),
        "garbage": garbage(1),
        "poison": garbage(POISON),
        "random": random_drafts(right, 250, 0.75, seed=num_drafts),
    }[kind]
    order = list(asked)
    random.Random(seqs + late).shuffle(order)
    drafter = ScriptedDrafter(num_drafts, script)
    engine = engine_for(target, drafter, seqs=seqs, rows=rows)
    assert drive(engine, order, late) == plain
    assert (engine.metrics.num_drafted > 0) == (num_drafts > 0)
    if kind == "oracle":
        assert engine.metrics.num_accepted == engine.metrics.num_drafted


@pytest.mark.parametrize("seed", range(4))
def test_lengths_that_follow_no_rule_give_the_plain_stream(target, asked, plain, right, seed: int, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Whatever a policy might choose, who proposes and how much is verified changes no token."""
    dice = random.Random(seed)

    def proposing(self, scheduled, foresee=unforeseen, lapsed=frozenset()):  # type: ignore[no-untyped-def]
        return [i for i, item in enumerate(scheduled) if item.draft_budget > 0 and dice.random() < 0.6]

    def choose(self, scheduled, proposing, num_proposed, confidence_SG, read=frozenset()):  # type: ignore[no-untyped-def]
        chosen = set(proposing)
        return tuple(
            dice.randint(0, min(item.draft_budget, num_proposed)) if i in chosen else 0
            for i, item in enumerate(scheduled)
        )

    monkeypatch.setattr(AllDrafts, "proposing", proposing)
    monkeypatch.setattr(AllDrafts, "choose", choose)
    order = list(asked)
    dice.shuffle(order)
    engine = engine_for(target, ScriptedDrafter(7, random_drafts(right, 250, 0.75, seed=seed)), seqs=5, rows=48)
    assert drive(engine, order, late=3) == plain
    assert 0 < engine.metrics.num_accepted < engine.metrics.num_drafted


def test_auto_lengths_give_the_plain_stream(target, asked, plain, right) -> None:  # type: ignore[no-untyped-def]
    engine = engine_for(target, ScriptedDrafter(7, right), seqs=4, auto=True)
    assert drive(engine, list(asked), late=2) == plain
    assert engine.metrics.num_drafted > 0, "drafts that always stand were never tried"


def test_verify_logits_equal_plain_logits_bit_for_bit(  # type: ignore[no-untyped-def]
    target, asked, plain, right
) -> None:
    """Row j of a verify span sees what the j-th plain decode step sees, alone or among neighbours."""
    alone: dict[str, dict[int, torch.Tensor]] = {}
    for request in asked:
        recorder = Recorder(target)
        drive(engine_for(recorder, None, seqs=1), [request])
        alone[request.request_id] = {position: rows[0] for (_, position), rows in recorder.logits.items()}
    for rows in (24, 200):
        recorder = Recorder(target)
        engine = engine_for(recorder, ScriptedDrafter(7, random_drafts(right, 250, 0.8, seed=rows)), seqs=8, rows=rows)
        assert drive(engine, asked) == plain
        for slot, request in enumerate(asked):
            for position, expected in alone[request.request_id].items():
                # The row of the first rejected draft's position may be judged again next round, on the
                # right token; the last verdict is the one that was emitted.
                assert torch.equal(recorder.logits[slot, position][-1], expected), (request.request_id, position)


def state_of(engine: Engine, slot: int, num_tokens: int) -> tuple[torch.Tensor, ...]:
    runner = engine._runner
    assert isinstance(runner, Runner)
    caches = runner.caches
    num_kda, num_mla = 5, 3
    pages = runner._parts.page_table.rows(torch.tensor([slot]), MAX_LEN)[0]
    positions = torch.arange(num_tokens)
    rows = pages[positions // PAGE] * PAGE + positions % PAGE
    return (
        torch.stack([caches.recurrent.state(layer)[slot] for layer in range(num_kda)]),
        torch.stack([caches.recurrent.conv_window(layer)[slot] for layer in range(num_kda)]),
        torch.stack([caches.latents.rows(layer)[rows] for layer in range(num_mla)]),
    )


@pytest.mark.parametrize("kind", ["poison", "random"])
def test_committed_state_equals_a_plain_run_after_every_round(target, asked, right, kind: str) -> None:  # type: ignore[no-untyped-def]
    """Rejected rows are NaN through and through; nothing of them may stay in any cache."""
    request = asked[0]
    script = {"poison": wrong_or_nan(right), "random": random_drafts(right, 250, 0.6, seed=4)}[kind]
    plain = engine_for(target, None, seqs=2)
    plain.submit(request)
    expected = {}
    for num_tokens in range(1, 12):
        plain.step()
        expected[num_tokens] = [part.clone() for part in state_of(plain, 0, num_tokens)]
    spec = engine_for(target, ScriptedDrafter(5, script), seqs=2)
    spec.submit(request)
    num_tokens, num_compared = 0, 0
    while True:
        (update,) = spec.step()
        if update.finish_reason is not None:
            break
        num_tokens += len(update.new_token_ids)
        num_compared += 1
        for ours, theirs in zip(state_of(spec, 0, num_tokens), expected[num_tokens], strict=True):
            assert torch.equal(ours, theirs)
            assert ours.isfinite().all()
    assert num_compared >= 3


def wrong_or_nan(right: Script) -> Script:
    """Two right drafts, then NaN."""

    def script(token_ids: tuple[int, ...], count: int) -> Sequence[int]:
        return [*right(token_ids, count)[:2], *[POISON] * (count - 2)]

    return script


def test_poisoned_memory_is_never_read(target, asked, plain, right) -> None:  # type: ignore[no-untyped-def]
    engine = engine_for(target, ScriptedDrafter(7, random_drafts(right, 250, 0.8, seed=9)), seqs=3)
    runner = engine._runner
    assert isinstance(runner, Runner)
    runner.caches.latents.poison(range(3 * (MAX_LEN // PAGE)))
    runner.caches.recurrent.poison(range(3))
    assert drive(engine, asked) == plain


def test_abort_and_readmission_leave_no_residue(target, asked, plain, right) -> None:  # type: ignore[no-untyped-def]
    engine = engine_for(target, ScriptedDrafter(7, random_drafts(right, 250, 0.8, seed=5)), seqs=4, rows=64)
    for num_steps in (0, 1, 3):
        for request in asked[2:7]:
            engine.submit(request)
        for _ in range(num_steps):
            engine.step()
        for request in reversed(asked[2:7]):
            engine.abort(request.request_id)
        assert not engine.has_work
    assert drive(engine, asked) == plain


def test_a_neighbour_cannot_move_a_sequence(target, asked, plain, right) -> None:  # type: ignore[no-untyped-def]
    """Neighbours that draft NaN share every step with sequences that must not notice."""
    dice = random.Random(2)
    noise = [ask(f"n{index}", [dice.randrange(8, 250) for _ in range(4 + 30 * index)], 14) for index in range(3)]

    def script(token_ids: tuple[int, ...], count: int) -> Sequence[int]:
        foreign = any(token_ids[: len(n.prompt_token_ids)] == n.prompt_token_ids for n in noise)
        return [POISON] * count if foreign else right(token_ids, count)

    engine = engine_for(target, ScriptedDrafter(7, script), seqs=8)
    done = drive(engine, [noise[0], asked[0], noise[1], asked[2], noise[2], asked[7]])
    assert {name: done[name] for name in ("r0", "r2", "r7")} == {name: plain[name] for name in ("r0", "r2", "r7")}


def test_stop_ids_cut_mid_span_like_plain_decoding(target, asked, plain, right) -> None:  # type: ignore[no-untyped-def]
    tokens = plain["r7"][0]
    for index in (1, 4, 7):
        request = ask("r7", asked[7].prompt_token_ids, 12, stop=(tokens[index],))
        expected = drive(engine_for(target, None, seqs=1), [request])
        engine = engine_for(target, ScriptedDrafter(7, right), seqs=1)
        assert drive(engine, [request]) == expected
        assert expected["r7"] == (tokens[: tokens.index(tokens[index])], "stop")


def test_deep_model_beyond_the_last_full_snapshot_block(tmp_path: Path) -> None:
    """Fourteen layers, four snapshots: row 0 cannot show a wrong stride, rows 1.. of deep layers can."""
    deep = load(tmp_path, deep_toy())
    dice = random.Random(3)
    asked = [
        ask(f"d{index}", [dice.randrange(8, 250) for _ in range(length)], 8) for index, length in ((0, 2), (1, 20))
    ]
    recorder = Recorder(deep)
    expected = drive(engine_for(recorder, None, seqs=2), asked)
    right = oracle([request.prompt_token_ids + expected[request.request_id][0] for request in asked])
    verify = Recorder(deep)
    engine = engine_for(verify, ScriptedDrafter(7, random_drafts(right, 250, 0.8, seed=1)), seqs=2)
    assert drive(engine, asked) == expected
    for key, logits in recorder.logits.items():
        assert torch.equal(verify.logits[key][-1], logits[0]), key
