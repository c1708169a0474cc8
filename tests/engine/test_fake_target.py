"""The whole engine around a fake target that keeps real caches; no model code is involved.

The fake reads everything a K3 target reads (latents of the context, recurrent state, conv window), so
a wrong page, slot, length, order or commit changes the next token.
"""

import random

import pytest
import torch

from outrider.batch import ForwardBatch, TargetOutput
from outrider.cache import PagedLayout, RecurrentLayout
from outrider.config import CacheConfig, EngineConfig, SchedulerConfig
from outrider.engine.build import EngineLimits, build_engine, resolve_config
from outrider.engine.engine import Engine
from outrider.engine.runner import Runner
from outrider.errors import ConfigError, EngineFault, RequestError, TokenizerError, UnsupportedError
from outrider.models.protocol import AuxStream, TargetCaches
from outrider.request import FinishReason, Request, RequestUpdate, SamplingParams
from outrider.speculative.drafter import NullDrafter
from outrider.testing.scripted import ScriptedDrafter, garbage, oracle, random_drafts, wrong_at

VOCAB, CHUNK = 31, 4
CPU = torch.device("cpu")


class FakeTarget:
    vocab_size, hidden_size, num_layers, chunk_multiple = VOCAB, 1, 2, CHUNK
    aux_layer_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.fail_on: int | None = None  # a token id whose forward raises
        self.num_forwards = 0

    @property
    def cache_layouts(self) -> tuple[PagedLayout, RecurrentLayout]:
        f64 = torch.float64
        return (
            PagedLayout(name="latents", num_layers=1, row_shape=(2,), dtype=f64),
            RecurrentLayout(
                name="recurrent",
                num_layers=1,
                state_shape=(1, 1, 1),
                state_dtype=f64,
                conv_shape=(3, 1),
                conv_dtype=f64,
            ),
        )

    def set_aux_layers(self, layer_ids: tuple[int, ...], stream: AuxStream) -> None:
        self.aux_layer_ids = layer_ids

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def head(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, batch: ForwardBatch, caches: TargetCaches) -> TargetOutput:
        self.num_forwards += 1
        token_ids, positions = batch.token_ids_T.tolist(), batch.positions_T.tolist()
        if self.fail_on in token_ids:
            raise RuntimeError("device fell off")
        assert batch.positions_T.shape == batch.slot_mapping_T.shape
        assert len(set(batch.slot_mapping_T.tolist())) == batch.num_tokens
        rows_TC = torch.stack([batch.token_ids_T.double(), batch.positions_T.double()], dim=1)
        caches.latents.write(0, batch.slot_mapping_T, rows_TC)
        values: dict[int, float] = {}
        decay = torch.full((1, 1), 0.5, dtype=torch.float64)
        log = {"u": [], "k": [], "decay": [], "inputs": []}  # type: ignore[var-annotated]
        for group in (batch.step, batch.chunk):
            rows = iter(group.rows_T.tolist())
            for slot, length, start in zip(group.state_slots_S.tolist(), group.lengths, group.starts, strict=True):
                state = caches.recurrent.state(0)[slot].clone()
                window = caches.recurrent.conv_window(0)[slot].clone()
                for offset in range(length):
                    row = next(rows)
                    assert positions[row] == start + offset
                    u = torch.full((1, 1), float(token_ids[row]), dtype=torch.float64)
                    k = torch.ones((1, 1), dtype=torch.float64)
                    state = state * decay[:, None] + u[..., None] * k[:, None]
                    window = torch.cat([window[1:], u])
                    values[row] = float(state.sum()) * 7 + float(
                        (window[:, 0] * torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)).sum()
                    )
                    if group is batch.step:
                        for name, value in (("u", u), ("k", k), ("decay", decay), ("inputs", u[0])):
                            log[name].append(value)
                if group is batch.chunk:
                    caches.recurrent.store(0, torch.tensor([slot]), state[None], window[None])
        if batch.step.lengths:
            stacked = {name: torch.stack(items) for name, items in log.items()}
            caches.recurrent.write_log(0, batch, stacked["u"], stacked["k"], stacked["decay"], stacked["inputs"])
        logits_NV = torch.zeros((len(batch.logits_rows_N), VOCAB), dtype=torch.float64)
        for index, row in enumerate(batch.logits_rows_N.tolist()):
            context = caches.latents.rows(0)[self.context_rows(batch, row)]
            assert context[:, 1].tolist() == list(range(positions[row] + 1)), "stale or foreign latents"
            value = values[row] * 1000 + float((context[:, 0] * (context[:, 1] + 3)).sum())
            logits_NV[index, int(value) % VOCAB] = 1
        return TargetOutput(logits_NV=logits_NV, aux_hidden_TAD=None)

    @staticmethod
    def context_rows(batch: ForwardBatch, row: int) -> torch.Tensor:
        positions = torch.arange(int(batch.context_lens_T[row]))
        pages = batch.page_table_SP[batch.sequence_T[row]]
        return pages[positions // batch.page_size] * batch.page_size + positions % batch.page_size


def config(**changes: int) -> EngineConfig:
    values = {
        "seqs": 4,
        "max_len": 48,
        "rows": 16,
        "prefill": 8,
        "pages": 40,
        "drafts": 7,
        "oversubscribe": 0,
    } | changes
    return EngineConfig(
        cache=CacheConfig(page_size=4, num_pages=values["pages"]),
        scheduler=SchedulerConfig(
            max_num_seqs=values["seqs"],
            max_model_len=values["max_len"],
            max_step_rows=values["rows"],
            max_prefill_tokens=values["prefill"],
            chunk_multiple=CHUNK,
            oversubscribe=bool(values["oversubscribe"]),
        ),
        num_draft_tokens=values["drafts"],
    )


def make(drafter: ScriptedDrafter | None = None, eos: frozenset[int] = frozenset(), **changes: int) -> Engine:
    changes.setdefault("drafts", drafter.num_draft_tokens if drafter else 0)
    return build_engine(FakeTarget(), drafter, config(**changes), device=CPU, eos_token_ids=eos)


def requests(count: int, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            request_id=f"r{index}",
            prompt_token_ids=tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 23))),
            sampling=SamplingParams(max_tokens=rng.choice([None, 1, 2, 9, 17]), stop_token_ids=(rng.randrange(VOCAB),)),
        )
        for index in range(count)
    ]


Finished = dict[str, tuple[tuple[int, ...], str, int]]


def drive(engine: Engine, asked: list[Request], late: int = 0) -> Finished:
    """Submit (the last ``late`` ones between steps) and run dry; ids, reason and usage by request."""
    waiting = list(asked)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in asked}
    finished: Finished = {}

    def take(updates: list[RequestUpdate]) -> None:
        for update in updates:
            tokens[update.request_id].extend(update.new_token_ids)
            if update.finish_reason is not None:
                assert update.usage is not None
                ids = tuple(tokens[update.request_id])
                assert len(ids) == update.usage.num_output_tokens
                finished[update.request_id] = (ids, update.finish_reason.value, len(ids))

    for _ in range(len(waiting) - late):
        update = engine.submit(waiting.pop(0))
        take([update] if update else [])
    while engine.has_work or waiting:
        if waiting:
            update = engine.submit(waiting.pop(0))
            take([update] if update else [])
        take(engine.step())
    return finished


def streams(asked: list[Request]) -> list[tuple[int, ...]]:
    """Prompt and continuation beyond any stop, from single-sequence plain decoding."""
    free = [
        Request(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=SamplingParams(max_tokens=48 - len(request.prompt_token_ids)),
        )
        for request in asked
    ]
    done = drive(make(seqs=1), free)
    return [request.prompt_token_ids + done[request.request_id][0] for request in asked]


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 7])
@pytest.mark.parametrize("kind", ["oracle", "wrong-at-0", "wrong-at-3", "garbage", "random"])
def test_speculation_changes_nothing(kind: str, num_drafts: int) -> None:
    asked = requests(9)
    right = oracle(streams(asked))
    script = {
        "oracle": right,
        "wrong-at-0": wrong_at(0, right, VOCAB),
        "wrong-at-3": wrong_at(3, right, VOCAB),
        "garbage": garbage(1),
        "random": random_drafts(right, VOCAB, 0.7, seed=3),
    }[kind]
    expected = drive(make(seqs=1), asked)
    for changes, late in (
        ({"seqs": 1}, 0),
        ({"seqs": 4, "pages": 14}, 3),
        ({"seqs": 8, "rows": 8, "pages": 96, "prefill": 20}, 9),
    ):
        drafter = ScriptedDrafter(num_drafts, script)
        engine = make(drafter, **changes)
        assert drive(engine, asked, late) == expected
        assert engine.metrics.num_drafted > 0 or num_drafts == 0
        if kind == "oracle" and num_drafts:
            assert engine.metrics.num_accepted == engine.metrics.num_drafted
        assert len(drafter.occupied_slots) <= changes["seqs"]


def test_a_round_beyond_the_row_budget_runs_as_several_steps() -> None:
    asked = [
        Request(request_id=f"r{i}", prompt_token_ids=(i + 1,), sampling=SamplingParams(max_tokens=20)) for i in range(4)
    ]
    right = oracle(streams(asked))
    tight = make(ScriptedDrafter(7, right), rows=8)
    wide = make(ScriptedDrafter(7, right), rows=64)
    assert drive(tight, asked) == drive(wide, asked)
    assert wide.metrics.num_steps == wide.metrics.num_rounds
    assert tight.metrics.num_steps > tight.metrics.num_rounds
    assert tight.metrics.num_rows == wide.metrics.num_rows
    assert tight.metrics.accepted_length == wide.metrics.accepted_length > 5


def test_a_round_is_split_as_seldom_as_possible() -> None:
    asked = [
        Request(request_id=f"r{i}", prompt_token_ids=(i + 1,), sampling=SamplingParams(max_tokens=20)) for i in range(4)
    ]
    engine = make(ScriptedDrafter(7, oracle(streams(asked))), rows=16)
    for request in asked:
        engine.submit(request)
    engine.step()
    assert (engine.metrics.num_steps, engine.metrics.num_rows) == (1, 4)
    engine.step()
    assert (engine.metrics.num_steps, engine.metrics.num_rows) == (1 + 2, 4 + 32)


def test_oracle_cut_at_every_index_accepts_exactly_that_many() -> None:
    asked = [Request(request_id="a", prompt_token_ids=(3, 1, 4), sampling=SamplingParams(max_tokens=40))]
    right = oracle(streams(asked))
    for cut in range(8):
        engine = make(ScriptedDrafter(7, wrong_at(cut, right, VOCAB)))
        engine.submit(asked[0])
        accepted = [update.num_accepted for _ in range(4) for update in engine.step()]
        assert accepted == [0, cut, cut, cut]


def test_abort_anywhere_leaves_no_residue() -> None:
    asked = requests(6, seed=5)
    expected = drive(make(seqs=1), asked)
    right = oracle(streams(asked))
    for steps in range(5):
        drafter = ScriptedDrafter(7, random_drafts(right, VOCAB, 0.8, seed=1))
        engine = make(drafter, seqs=2)
        for request in asked[:3]:
            engine.submit(request)
        for _ in range(steps):
            engine.step()
        for request in asked[:3]:
            engine.abort(request.request_id)
            assert engine.abort(request.request_id) is None
        assert not engine.has_work
        runner = engine._runner
        assert isinstance(runner, Runner)
        runner.caches.latents.poison(range(40))
        runner.caches.recurrent.poison(range(2))
        assert drive(engine, asked) == expected


@pytest.mark.parametrize("oversubscribe", [0, 1])
def test_preempting_anybody_at_any_time_changes_nothing(oversubscribe: int) -> None:
    asked = requests(9, seed=7)
    expected = drive(make(seqs=1), asked)
    dice = random.Random(oversubscribe)
    drafter = ScriptedDrafter(7, random_drafts(oracle(streams(asked)), VOCAB, 0.8, seed=1))
    engine = make(drafter, seqs=3, pages=30, oversubscribe=oversubscribe)
    tokens: dict[str, tuple[int, ...]] = {request.request_id: () for request in asked}
    for request in asked:
        engine.submit(request)
    while engine.has_work:
        for request in dice.sample(asked, 3):
            engine.preempt(request.request_id)
        for update in engine.step():
            tokens[update.request_id] += update.new_token_ids
    assert {name: ids for name, (ids, _, _) in expected.items()} == tokens
    assert engine.metrics.num_preempted > 10
    runner = engine._runner
    assert isinstance(runner, Runner)
    assert runner.host_bytes == {}


def test_oversubscription_runs_more_at_once_on_the_same_pages() -> None:
    """Each needs 11 pages in the end, and 1 when it enters; there are 14."""
    asked = [
        Request(request_id=f"r{i}", prompt_token_ids=(i + 1,), sampling=SamplingParams(max_tokens=40)) for i in range(4)
    ]
    expected = drive(make(seqs=1), asked)
    most = {}
    for oversubscribe in (0, 1):
        engine = make(seqs=4, pages=14, oversubscribe=oversubscribe)
        for request in asked:
            engine.submit(request)
        most[oversubscribe], done, order = 0, {}, []
        while engine.has_work:
            for update in engine.step():
                done[update.request_id] = done.get(update.request_id, ()) + update.new_token_ids
                order += [update.request_id] if update.finish_reason else []
            most[oversubscribe] = max(most[oversubscribe], engine._scheduler.num_running)
        assert done == {name: ids for name, (ids, _, _) in expected.items()}
        assert order == ["r0", "r1", "r2", "r3"], "the older gave way to the younger"
        assert (engine.metrics.num_preempted > 0) == bool(oversubscribe)
    assert most == {0: 1, 1: 4}


def test_a_copy_that_fails_ends_the_requests_of_its_round_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [
        Request(request_id=f"r{i}", prompt_token_ids=(i + 1,), sampling=SamplingParams(max_tokens=9)) for i in range(3)
    ]
    drafter = ScriptedDrafter(2, garbage(1))
    engine = make(drafter, seqs=2)
    for request in asked:
        engine.submit(request)
    engine.step()
    engine.preempt("r0")
    with monkeypatch.context() as patch:
        patch.setattr(drafter, "snapshot", lambda *args: 1 / 0)
        ended = engine.step()
    assert {(u.request_id, u.finish_reason) for u in ended} == {("r0", FinishReason.ERROR), ("r1", FinishReason.ERROR)}
    assert all("division by zero" in (update.error or "") for update in ended)
    assert {update.finish_reason for update in engine.step()} == {None}  # r2
    assert len(drafter.occupied_slots) == 1


def test_aborting_the_last_preempted_request_drops_its_copy_at_once() -> None:
    engine = make(seqs=2)
    for request in requests(2, seed=3):
        engine.submit(request)
    engine.step()
    assert engine.preempt("r0") and not engine.preempt("r0")
    engine.step()
    runner = engine._runner
    assert isinstance(runner, Runner)
    assert set(runner.host_bytes) == {"r0"}
    engine.abort("r1")
    engine.abort("r0")
    assert not engine.has_work
    assert runner.host_bytes == {}


def test_a_device_fault_ends_the_touched_requests_only() -> None:
    target = FakeTarget()
    engine = build_engine(target, None, config(seqs=1, drafts=0), device=CPU)
    target.fail_on = 30
    bad = Request(request_id="bad", prompt_token_ids=(30, 1), sampling=SamplingParams(max_tokens=3))
    good = Request(request_id="good", prompt_token_ids=(2, 1), sampling=SamplingParams(max_tokens=1))
    engine.submit(bad)
    engine.submit(good)
    (update,) = engine.step()
    assert (update.request_id, update.finish_reason) == ("bad", FinishReason.ERROR)
    assert "device fell off" in (update.error or "")
    (update,) = engine.step()
    assert (update.request_id, update.finish_reason) == ("good", FinishReason.LENGTH)
    assert engine.metrics.finished == {"error": 1, "length": 1}


def test_logits_that_are_not_finite_end_their_request_only() -> None:
    class Overflowing(FakeTarget):
        def forward(self, batch: ForwardBatch, caches: TargetCaches) -> TargetOutput:
            output = super().forward(batch, caches)
            tokens = batch.token_ids_T[batch.logits_rows_N]
            return TargetOutput(
                logits_NV=torch.where(tokens[:, None] == 30, torch.nan, output.logits_NV), aux_hidden_TAD=None
            )

    engine = build_engine(Overflowing(), None, config(drafts=0), device=CPU)
    engine.submit(Request(request_id="bad", prompt_token_ids=(2, 30), sampling=SamplingParams(max_tokens=3)))
    engine.submit(Request(request_id="good", prompt_token_ids=(2, 1), sampling=SamplingParams(max_tokens=1)))
    bad, good = engine.step()
    assert (bad.finish_reason, bad.new_token_ids) == (FinishReason.ERROR, ())
    assert "logits are not finite" in (bad.error or "")
    assert good.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("stop", "reason"), [((), FinishReason.ERROR), ((1,), FinishReason.STOP)])
def test_logits_that_are_not_finite_take_nothing_from_earlier_tokens(
    stop: tuple[int, ...], reason: FinishReason
) -> None:
    """A span whose last row is not finite ends where plain decoding ends, with the same tokens."""

    class Counting(FakeTarget):
        def forward(self, batch: ForwardBatch, caches: TargetCaches) -> TargetOutput:
            tokens = batch.token_ids_T[batch.logits_rows_N]
            logits_NV = torch.nn.functional.one_hot((tokens + 1) % VOCAB, VOCAB).double()
            return TargetOutput(logits_NV=torch.where(tokens[:, None] == 2, torch.nan, logits_NV), aux_hidden_TAD=None)

    def script(token_ids: tuple[int, ...], count: int) -> list[int]:
        return [(token_ids[-1] + 1 + i) % VOCAB for i in range(count)]

    sampling = SamplingParams(max_tokens=9, stop_token_ids=stop, ignore_eos=True)
    outcomes = []
    for drafter in (None, ScriptedDrafter(6, script)):
        drafts = drafter.num_draft_tokens if drafter else 0
        engine = build_engine(Counting(), drafter, config(drafts=drafts), device=CPU)
        engine.submit(Request(request_id="a", prompt_token_ids=(28,), sampling=sampling))
        updates = []
        while engine.has_work:
            updates += engine.step()
        outcomes.append(([t for update in updates for t in update.new_token_ids], updates[-1].finish_reason))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] == ([29, 30, 0] if stop else [29, 30, 0, 1, 2], reason)


def test_a_broken_invariant_stops_the_engine() -> None:
    class Skipping(ScriptedDrafter):
        def observe(self, *args: object) -> None:
            """Loses everything, so the next anchor does not continue."""

    engine = make(Skipping(2, garbage(1)))
    engine.submit(Request(request_id="a", prompt_token_ids=(1, 2), sampling=SamplingParams()))
    engine.step()
    with pytest.raises(EngineFault, match="does not continue"):
        engine.step()
    assert not engine.has_work
    for call in (engine.step, lambda: engine.submit(requests(1)[0])):
        with pytest.raises(EngineFault, match="the engine has stopped"):
            call()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["forward", "update"])
def test_an_interrupt_inside_a_round_stops_the_engine(
    interrupt: type[BaseException], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device and bookkeeping may have parted; stepping twice over the same rows would corrupt silently."""

    def strike(*args: object) -> None:
        raise interrupt

    engine = make()
    engine.submit(Request(request_id="a", prompt_token_ids=(1, 2), sampling=SamplingParams()))
    engine.step()
    if where == "forward":
        monkeypatch.setattr(FakeTarget, "forward", strike)
    else:
        monkeypatch.setattr(engine._scheduler, "update", strike)
    with pytest.raises(interrupt):
        engine.step()
    monkeypatch.undo()
    assert not engine.has_work
    assert engine.metrics.finished == {"error": 1}
    for call in (engine.step, lambda: engine.submit(requests(1)[0])):
        with pytest.raises(EngineFault, match=f"stopped .interrupted by {interrupt.__name__}"):
            call()


def test_requests_are_checked_before_they_reach_a_slot() -> None:
    engine = make()
    for prompt, sampling, words in (
        ((), SamplingParams(), "0 tokens"),
        ((VOCAB,), SamplingParams(), f"contains {VOCAB}"),
        ((-1,), SamplingParams(), "contains -1"),
        ((1,), SamplingParams(stop_token_ids=(2**31,)), "stop_token_ids contains"),
        ((1,) * 49, SamplingParams(), "49 tokens, which exceeds the 48-token context"),
    ):
        with pytest.raises(RequestError, match=words):
            engine.submit(Request(request_id="a", prompt_token_ids=prompt, sampling=sampling))
    with pytest.raises(UnsupportedError, match="needs a tokenizer"):
        engine.submit(Request(request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(stop=("x",))))
    assert not engine.has_work
    update = engine.submit(Request(request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=0)))
    assert update is not None
    assert update.finish_reason is FinishReason.LENGTH
    assert engine.step() == []


class LetterTokenizer:
    """Token t is a letter, except 25..30: bytes of one three-byte character, twice."""

    vocab_size = VOCAB

    def token_bytes(self, token_id: int, show_special: bool = False) -> bytes:
        if token_id >= 25:
            return bytes(["\u20ac".encode()[(token_id - 25) % 3]])
        return bytes([97 + token_id])


@pytest.mark.parametrize("num_stop_chars", [1, 2, 3])
def test_text_and_stop_strings_do_not_depend_on_speculation(num_stop_chars: int) -> None:
    asked = requests(4, seed=9)
    texts = {}
    tokenizer = LetterTokenizer()
    for request, stream in zip(asked, streams(asked), strict=True):
        output = stream[len(request.prompt_token_ids) :]
        raw = b"".join(tokenizer.token_bytes(token_id) for token_id in output)
        texts[request.request_id] = raw.decode(errors="replace")
    right = oracle(streams(asked))
    num_stopped = 0
    for request in asked:
        text = texts[request.request_id]
        for begin in range(3, len(text) - num_stop_chars, 5):
            stop = text[begin : begin + num_stop_chars]
            params = SamplingParams(stop=(stop, "never this"))
            outcomes = []
            for drafter in (None, ScriptedDrafter(7, right), ScriptedDrafter(3, wrong_at(1, right, VOCAB))):
                engine = build_engine(
                    FakeTarget(),
                    drafter,
                    config(drafts=drafter.num_draft_tokens if drafter else 0),
                    device=CPU,
                    tokenizer=tokenizer,  # type: ignore[arg-type]
                )
                engine.submit(Request(request_id="a", prompt_token_ids=request.prompt_token_ids, sampling=params))
                updates = []
                while engine.has_work:
                    updates.extend(engine.step())
                outcomes.append(
                    (
                        "".join(update.new_text for update in updates),
                        tuple(token_id for update in updates for token_id in update.new_token_ids),
                        updates[-1].finish_reason,
                        updates[-1].stop_reason,
                    )
                )
            assert outcomes[0] == outcomes[1] == outcomes[2]
            if outcomes[0][2] is FinishReason.STOP:
                num_stopped += 1
                assert outcomes[0][0] == text[: text.index(stop)]
                assert outcomes[0][3] == stop
    assert num_stopped > 5


def test_a_token_beyond_the_tokenizer_ends_nothing() -> None:
    """The target's vocabulary may be larger than the table of its tokenizer."""

    class Smaller(LetterTokenizer):
        def token_bytes(self, token_id: int, show_special: bool = False) -> bytes:
            if token_id >= 12:
                raise TokenizerError(f"token id {token_id} is outside the table")
            return super().token_bytes(token_id)

    (asked,) = requests(1, seed=9)
    right = oracle(streams([asked]))
    for drafter in (None, ScriptedDrafter(7, right)):
        drafts = drafter.num_draft_tokens if drafter else 0
        engine = build_engine(
            FakeTarget(),
            drafter,
            config(drafts=drafts),
            device=CPU,
            tokenizer=Smaller(),  # type: ignore[arg-type]
        )
        sampling = SamplingParams(max_tokens=20)
        engine.submit(Request(request_id="a", prompt_token_ids=asked.prompt_token_ids, sampling=sampling))
        updates = []
        while engine.has_work:
            updates += engine.step()
        token_ids = [token_id for update in updates for token_id in update.new_token_ids]
        assert (len(token_ids), updates[-1].finish_reason) == (20, FinishReason.LENGTH)
        assert max(token_ids) >= 12
        assert "".join(update.new_text for update in updates) == "".join(chr(97 + t) for t in token_ids if t < 12) != ""


def test_shutdown_aborts_everything_once() -> None:
    engine = make()
    for request in requests(3):
        engine.submit(request)
    assert {update.finish_reason for update in engine.shutdown()} == {FinishReason.ABORT}
    assert engine.shutdown() == []
    with pytest.raises(EngineFault, match="shutdown"):
        engine.step()


def test_options_resolve_to_final_numbers() -> None:
    resolved = resolve_config(
        EngineLimits(page_size=8), max_num_seqs=3, max_model_len=100, num_draft_tokens=7, chunk_multiple=16
    )
    assert resolved.num_draft_tokens == 7
    assert resolved.cache.num_pages == 3 * 13
    assert resolved.scheduler.max_step_rows == 3 * 8 + 512
    with pytest.raises(ConfigError, match="num_draft_tokens=2 exceeds the 0"):
        Runner(FakeTarget(), NullDrafter(), config(drafts=2), CPU)


def test_timings_and_counters_add_up() -> None:
    asked = requests(5)
    engine = make(ScriptedDrafter(3, random_drafts(oracle(streams(asked)), VOCAB, 0.6, seed=2)))
    done = drive(engine, asked)
    metrics = engine.metrics
    assert metrics.num_output_tokens == sum(len(ids) for ids, _, _ in done.values())
    assert metrics.num_prompt_tokens == sum(len(request.prompt_token_ids) for request in asked)
    assert metrics.num_rows == metrics.num_prompt_tokens + metrics.num_decode_spans + metrics.num_drafted
    assert sum(metrics.accepted_at.values()) == metrics.num_accepted
    assert sum(metrics.drafted_at.values()) == metrics.num_drafted
    not_models = metrics.batch_s + metrics.accept_s + metrics.commit_s + metrics.host_s
    assert metrics.host_ms == 1000 * not_models / metrics.num_rounds > 0
    assert metrics.accepted_length == pytest.approx(1 + metrics.num_accepted / metrics.num_decode_spans)
    assert min(metrics.forward_s, metrics.propose_s, metrics.commit_s, metrics.host_s) > 0
