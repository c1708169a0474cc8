"""Rounds at a chosen acceptance: what the rates say happens, through the real accept and commit."""

import random
from pathlib import Path

import pytest
import torch

from outrider.batch import DraftBlock
from outrider.bench.synthetic import ROUND_PARTS, ForcedTarget, check_rates, expected_tokens, measure_synthetic
from outrider.cli.bench_synthetic import check_synthetic, synthetic_cells
from outrider.engine.build import EngineLimits, build_engine, resolve_config
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, EngineFault
from outrider.models.dspark.checkpoint import TargetTables
from outrider.models.dspark.load import load_predictor
from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.numerics import NumericsChoice
from outrider.models.registry import load_target
from outrider.request import Request, SamplingParams
from outrider.speculative.drafter import Anchors, DSparkDrafter

CPU, CHOICE = torch.device("cpu"), NumericsChoice(probe="skip")


class NotedDrafter(DSparkDrafter):
    """Keeps every block it proposed."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.blocks: list[torch.Tensor] = []

    def propose(self, anchors: Anchors) -> DraftBlock | None:
        block = super().propose(anchors)
        if block is not None:
            self.blocks.append(block.token_ids_SG.clone())
        return block


def drafting_engine(
    pair: tuple[Path, Path], target: KimiK3Model, rates: tuple[float, ...], seqs: int = 1, seed: int = 0
) -> tuple[Engine, ForcedTarget, NotedDrafter]:
    tables = TargetTables(embedding_VD=target.embedding, head_VD=target.lm_head)
    predictor = load_predictor(pair[1], target, tables, max_context=256, numerics=CHOICE)
    config = resolve_config(
        EngineLimits(),
        max_num_seqs=seqs,
        max_model_len=256,
        num_draft_tokens=predictor.num_draft_tokens,
        chunk_multiple=target.chunk_multiple,
    )
    drafter = NotedDrafter(predictor, num_cache_rows=config.cache.num_pages * config.cache.page_size)
    forced = ForcedTarget(target, rates, seed=seed)
    return build_engine(forced.as_target(), drafter, config, device=CPU), forced, drafter


def submit(engine: Engine, name: str, num_tokens: int = 9) -> None:
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    prompt = tuple(range(3, 3 + num_tokens))
    engine.submit(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling))


@pytest.mark.parametrize(("rates", "accepted"), [((), 0), ((1.0,), 1), ((1.0, 1.0, 0.0, 1.0), 2), ((1.0,) * 4, 4)])
def test_certain_rates_accept_just_so_many(toy_pair, toy_target, rates: tuple[float, ...], accepted: int) -> None:
    engine, _, drafter = drafting_engine(toy_pair, toy_target, rates)
    submit(engine, "a")
    engine.step()
    for _ in range(5):
        (update,) = engine.step()
        drafts = drafter.blocks[-1][0].tolist()
        assert (update.num_drafted, update.num_accepted) == (4, accepted)
        assert list(update.new_token_ids[:accepted]) == drafts[:accepted]
        assert len(update.new_token_ids) == accepted + 1
        assert accepted == 4 or update.new_token_ids[accepted] != drafts[accepted]


def test_draws_are_those_of_the_seed_and_committed_state_is_that_of_the_text(toy_pair, toy_target) -> None:
    """What was emitted, decoded plainly from the same prompt by a target that must say it, leaves the same state."""
    rates, seed = (0.9, 0.6, 0.5), 11
    engine, _, _ = drafting_engine(toy_pair, toy_target, rates, seed=seed)
    submit(engine, "a")
    text = [token for update in engine.step() for token in update.new_token_ids]
    draw, counts = random.Random(seed), []
    for _ in range(12):
        (update,) = engine.step()
        text += update.new_token_ids
        counts.append(update.num_accepted)
        expected = 0
        for rate in rates:
            if draw.random() >= rate:
                break
            expected += 1
        assert update.num_accepted == expected
    assert len(set(counts)) > 2, "the draws differ from round to round"
    caches = engine._runner.caches
    plain = plain_engine(toy_target)
    prompt = tuple(range(3, 12))
    plain.submit(
        Request(request_id="b", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=100, ignore_eos=True))
    )
    script = iter(text)
    said = plain._runner._parts.target
    said.script = script
    for _ in range(len(text)):
        plain.step()
    for layer in range(len(toy_target.config.kda_layers)):
        ours, theirs = caches.recurrent.state(layer)[0], plain._runner.caches.recurrent.state(layer)[0]
        assert torch.equal(ours, theirs)


class Saying:
    """A target that says what a script holds, one token a step."""

    def __init__(self, inner: KimiK3Model) -> None:
        self._inner, self.script = inner, iter(())

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def forward(self, batch, caches):
        output = self._inner.forward(batch, caches)
        if output.logits_NV.shape[0]:
            output.logits_NV[-1, next(self.script)] = torch.finfo(output.logits_NV.dtype).max
        return output


def plain_engine(target: KimiK3Model) -> Engine:
    config = resolve_config(
        EngineLimits(), max_num_seqs=1, max_model_len=256, num_draft_tokens=0, chunk_multiple=target.chunk_multiple
    )
    return build_engine(Saying(target), None, config, device=CPU)


def test_means_of_rates() -> None:
    assert expected_tokens(()) == 1.0
    assert expected_tokens((1.0, 1.0)) == 3.0
    assert expected_tokens((0.5, 0.5, 0.0, 1.0)) == 1.75


def test_cells_hold_all_arms_and_leave_out_what_does_not_fit(toy_pair, toy_target) -> None:
    models = [load_target(toy_pair[0], dtype=torch.bfloat16, numerics=CHOICE) for _ in range(2)]
    cells, left_out = synthetic_cells(
        {"exact": toy_target, "fast": models[0]},
        models[1],
        toy_pair[1],
        rates=(1.0, 1.0, 1.0),
        slots=[1, 3],
        contexts=[20, 250],
        limit=256,
        num_rounds=3,
        numerics=CHOICE,
        progress=lambda line: None,
    )
    assert [(cell.slots, cell.context) for cell in cells] == [(1, 20), (3, 20)]
    assert len(left_out) == 2 and all("256 positions" in line for line in left_out)
    for cell in cells:
        assert list(cell.arms) == ["plain exact", "plain fast", "spec"]
        spec = cell.arms["spec"]
        assert (spec.tokens_per_round, spec.num_rounds, cell.expected_tokens) == (4.0, 3, 4.0)
        for name in ("plain exact", "plain fast"):
            plain = cell.arms[name]
            assert plain.num_rounds == 12 and plain.tokens_per_round == 1.0
            assert plain.part_ms["propose"] < spec.part_ms["propose"]
        assert cell.fastest_plain in ("plain exact", "plain fast")
        assert cell.ratio == pytest.approx(cell.arms[cell.fastest_plain].round_ms * 4.0 / spec.round_ms)
        for arm in cell.arms.values():
            assert set(arm.part_ms) == set(ROUND_PARTS)
            assert 0 < arm.overhead_ms < arm.high_ms + arm.low_ms


def test_a_round_that_ends_a_sequence_is_no_measurement(toy_pair, toy_target) -> None:
    engine, forced, _ = drafting_engine(toy_pair, toy_target, (1.0,) * 4)
    with pytest.raises(EngineFault, match="or ended one"):
        measure_synthetic(
            {"spec": engine},
            forced,
            (1.0,) * 4,
            slots=1,
            context=5,
            num_rounds=9,
            max_tokens=20,
            vocab_size=toy_target.vocab_size,
        )


def test_rates_that_are_refused(toy_pair: tuple[Path, Path]) -> None:
    for rates, words in (((0.5, 1.1), "1.1 is outside"), ((-0.1,), "outside 0..1"), ((0.5,) * 5, "5 acceptance rates")):
        with pytest.raises(ConfigError, match=words):
            check_rates(rates, 4)
    with pytest.raises(ConfigError, match="--drafter"):
        check_synthetic((0.5,), None)
    with pytest.raises(ConfigError, match="for 4 drafts"):
        check_synthetic((0.5,) * 5, toy_pair[1])
