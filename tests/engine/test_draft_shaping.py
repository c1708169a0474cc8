"""A drafter that knows what a request does to logits drafts better, emits nothing else, costs others nothing."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.batch import DraftBlock, DraftSampling
from outrider.config import CacheConfig, EngineConfig, SchedulerConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.engine.llm import LLM
from outrider.models.dspark.config_json import read_config
from outrider.request import Request, SamplingParams
from outrider.speculative.drafter import Anchors
from outrider.testing.tables import TableDrafter, TableTarget
from outrider.testing.toy import ToyOptions, write_toy_checkpoint
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

VOCAB, EOS, MAX_LEN, DRAFTS = 13, 4, 48, 5


class WatchedDrafter(TableDrafter):
    """Notes how it is asked to draw; may leave the shaping out."""

    def __init__(self, table_VV: torch.Tensor, *, shaped: bool = True) -> None:
        super().__init__(table_VV, DRAFTS)
        self.shaped = shaped
        self.asked: list[DraftSampling | None] = []

    def propose(self, anchors: Anchors) -> DraftBlock:
        """See TableDrafter."""
        self.asked.append(anchors.sampling)
        if anchors.sampling is not None and not self.shaped:
            anchors = replace(anchors, sampling=replace(anchors.sampling, shaping=None))
        return super().propose(anchors)


@pytest.fixture(scope="module")
def target() -> TableTarget:
    """The next token depends on the last one only, so that a drafter's table can be the target's."""
    target = TableTarget(VOCAB, seed=3, sharpness=1.5)
    target.table[:] = target.table.mean(0)
    return target


def run(target: TableTarget, drafter: WatchedDrafter | None, asked: Sequence[SamplingParams], seqs: int = 4):  # type: ignore[no-untyped-def]
    """Outputs in order of ``asked``, and the engine."""
    drafts = DRAFTS if drafter else 0
    config = EngineConfig(
        cache=CacheConfig(page_size=8, num_pages=seqs * MAX_LEN // 8),
        scheduler=SchedulerConfig(
            max_num_seqs=seqs, max_model_len=MAX_LEN, max_step_rows=128, max_prefill_tokens=64, chunk_multiple=1
        ),
        num_draft_tokens=drafts,
    )
    engine: Engine = build_engine(target, drafter, config, device=torch.device("cpu"), eos_token_ids=frozenset((EOS,)))
    outputs: dict[str, tuple[int, ...]] = {}
    for index, sampling in enumerate(asked):
        engine.submit(Request(request_id=str(index), prompt_token_ids=(1, 2, index % VOCAB), sampling=sampling))
        outputs[str(index)] = ()
    while engine.has_work:
        for update in engine.step():
            outputs[update.request_id] += update.new_token_ids
    return list(outputs.values()), engine


SETTINGS: dict[str, dict[str, object]] = {
    "banned": {"logit_bias": dict.fromkeys(range(0, VOCAB, 2), -100.0)},
    "biased": {"logit_bias": {7: 4.0, 9: 3.0}, "temperature": 1.0},
    "penalised": {"repetition_penalty": 1.8, "presence_penalty": 0.5, "frequency_penalty": 0.6},
    "penalised and drawn": {"frequency_penalty": 1.2, "temperature": 0.8, "top_p": 0.9},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": tuple(range(0, VOCAB, 2))},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_shaped_drafts_are_accepted_more_and_change_no_token(target: TableTarget, name: str) -> None:
    asked = [
        SamplingParams(**({"max_tokens": 30, "ignore_eos": name != "min_tokens", "seed": seed} | SETTINGS[name]))  # type: ignore[arg-type]
        for seed in range(6)
    ]
    table = target.table[0]
    plain, _ = run(target, None, asked, seqs=1)
    unaware, before = run(target, WatchedDrafter(table, shaped=False), asked)
    aware, after = run(target, WatchedDrafter(table), asked)
    assert aware == unaware == plain
    assert after.metrics.accepted_length > 1.3 * before.metrics.accepted_length
    if name != "min_tokens":  # there a draft after the masked ones is a stop id, behind which nothing is emitted
        assert after.metrics.num_accepted == after.metrics.num_drafted, "the drafter knows the target"


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_coins_accept_more_of_shaped_drafts(target: TableTarget, acceptance: str) -> None:
    """What is handed over is what the drafts were drawn from: the target's own distribution, so all stand."""
    sampling = SamplingParams(
        temperature=1.0,
        max_tokens=30,
        ignore_eos=True,
        frequency_penalty=1.0,
        acceptance=acceptance,  # type: ignore[arg-type]
    )
    asked = [replace(sampling, seed=seed) for seed in range(6)]
    _, before = run(target, WatchedDrafter(target.table[0], shaped=False), asked)
    _, after = run(target, WatchedDrafter(target.table[0]), asked)
    assert after.metrics.num_accepted > 0.99 * after.metrics.num_drafted
    assert before.metrics.num_accepted < 0.9 * before.metrics.num_drafted


def test_requests_that_ask_for_nothing_pay_nothing(target: TableTarget) -> None:
    """Plain greedy ones are drafted as if there were no sampling at all; drawn ones get no tables."""
    drafter = WatchedDrafter(target.table[0])
    greedy = SamplingParams(max_tokens=20, ignore_eos=True)
    run(target, drafter, [greedy, replace(greedy, logprobs=2), replace(greedy, top_k=3, n=1)])
    assert drafter.asked and set(drafter.asked) == {None}
    drafter.asked.clear()
    run(target, drafter, [greedy, replace(greedy, temperature=1.0)])
    assert drafter.asked and all(one is None or one.shaping is None for one in drafter.asked)
    drafter.asked.clear()
    run(target, drafter, [replace(greedy, min_tokens=4)])
    shaped = [one is not None for one in drafter.asked]
    assert shaped[0] and not shaped[-1] and shaped == sorted(shaped, reverse=True), "only while a stop id is masked"


def test_only_the_rows_that_ask_are_shaped(target: TableTarget) -> None:
    drafter = WatchedDrafter(target.table[0])
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    run(target, drafter, [greedy, replace(greedy, logit_bias={3: 5.0}), greedy, replace(greedy, presence_penalty=0.5)])
    first = drafter.asked[0]
    assert first is not None and first.shaping is not None and not first.draws
    assert first.shaping.rows_Q.tolist() == [1, 3]
    assert first.shaping.bias_QV is not None and first.shaping.bias_QV.shape == (2, VOCAB)


@pytest.mark.parametrize(("family", "kept"), [("deepspec", None), ("speculators", 40)])
def test_dspark_drafts_what_a_bias_makes_certain(tmp_path: Path, family: str, kept: int | None) -> None:
    """A random drafter of a random target: with a bias, every draft of a token that it has is right."""
    options = ToyDrafterOptions(
        family=family,  # type: ignore[arg-type]
        draft_vocab_size=kept,
        hidden_size=64,
        num_target_layers=3,
        aux_layer_ids=(0, 1),
    )
    weights = write_toy_drafter(tmp_path / "drafter", options)
    known = torch.arange(97) if kept is None else torch.arange(kept) + weights["d2t"]
    toy = ToyOptions(num_layers=3, mla_layers=(2,), num_experts=4, num_shards=1)
    paths = write_toy_checkpoint(tmp_path / "target", toy, seed=1), tmp_path / "drafter"
    plain, spec = (
        LLM(*paths, dtype="float32", max_model_len=64, max_num_seqs=4, speculation=speculation)
        for speculation in ("off", read_config(paths[1]).num_draft_tokens)
    )
    token_id = int(known[len(known) // 2])
    free = SamplingParams(max_tokens=16, ignore_eos=True)
    asked = [free, replace(free, logit_bias={token_id: 90.0}), replace(free, temperature=1.0, seed=1)]
    asked.append(replace(asked[1], temperature=1.0, seed=2))
    prompts = [[3, 1, 4]] * len(asked)
    ours, theirs = spec.generate(prompts, asked), plain.generate(prompts, asked)
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
    for index in (1, 3):
        assert ours[index].token_ids == (token_id,) * 16
        assert ours[index].usage.num_accepted == ours[index].usage.num_drafted > 0
        assert ours[index].usage.num_rounds == 3
