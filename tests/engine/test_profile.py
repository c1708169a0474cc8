"""Costs profiled on scratch sequences: every shape, nothing left behind, and kept on disk for the next start."""

import json
import random
from pathlib import Path

import pytest

from outrider.engine.build import EngineLimits
from outrider.engine.cost_file import recall_costs
from outrider.engine.llm import LLM
from outrider.engine.profile import profile_rounds
from outrider.errors import RequestError
from outrider.plan import DraftReason
from outrider.request import Request, SamplingParams
from outrider.speculative.auto import AutoLengths
from outrider.testing.toy import ToyOptions, write_toy_checkpoint
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

TOY = ToyOptions(num_layers=5, mla_layers=(2, 4), num_experts=4, num_shards=1)
DRAFTS = 4
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    options = ToyDrafterOptions(hidden_size=64, num_target_layers=5, aux_layer_ids=(0, 2, 3))
    write_toy_drafter(folder / "drafter", options)
    return write_toy_checkpoint(folder / "target", TOY, seed=1), folder / "drafter"


def load(paths: tuple[Path, Path], **changes) -> LLM:  # type: ignore[no-untyped-def]
    settings = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 3, "probe": "skip"} | changes
    return LLM(paths[0], paths[1], **settings)


def policy_of(llm: LLM) -> AutoLengths:
    policy = llm._runner._parts.lengths
    assert isinstance(policy, AutoLengths)
    return policy


def prompts(count: int) -> list[list[int]]:
    dice = random.Random(4)
    return [[dice.randrange(95) for _ in range(dice.choice([5, 64, 70]))] for _ in range(count)]


def test_a_profile_knows_every_size_and_leaves_nothing_behind(paths: tuple[Path, Path]) -> None:
    plain = LLM(paths[0], dtype="float32", max_model_len=128, max_num_seqs=3, probe="skip").generate(prompts(5), GREEDY)
    llm = load(paths)
    costs = profile_rounds(llm._runner, llm.config, llm._target.vocab_size, limit_s=60)
    assert costs.is_profiled
    for size in (1, 2, 3):
        assert costs.step.weight((size, size)) > 0
        assert costs.step.weight((size, size * (1 + DRAFTS))) > 0
        assert costs.propose((size,)) > 0
    seconds = costs.step.table((3,), 3, 15).at(0)
    assert seconds == sorted(seconds)
    assert not llm._runner._seated
    assert [output.token_ids for output in llm.generate(prompts(5), GREEDY)] == [o.token_ids for o in plain]


@pytest.mark.parametrize("limits", [EngineLimits(page_size=8, num_pages=16), EngineLimits(max_step_rows=64)])
def test_a_profile_keeps_to_the_budgets(paths: tuple[Path, Path], limits: EngineLimits) -> None:
    llm = load(paths, max_num_seqs=8, limits=limits)
    assert profile_rounds(llm._runner, llm.config, llm._target.vocab_size, limit_s=60).step.is_known


def test_without_time_nothing_is_measured(paths: tuple[Path, Path]) -> None:
    llm = load(paths)
    assert not profile_rounds(llm._runner, llm.config, llm._target.vocab_size, limit_s=-1).is_profiled


def test_costs_are_measured_once_and_read_by_the_next_start(paths: tuple[Path, Path]) -> None:
    first = load(paths)
    assert not policy_of(first).costs.is_profiled, "a short run does not wait for a profile"
    first.profile_costs()
    assert policy_of(first).costs.is_profiled
    file = first._cost_file
    assert file is not None
    written = file.read_bytes()
    first.profile_costs()
    assert file.read_bytes() == written
    assert policy_of(load(paths)).costs.is_profiled
    assert load(paths, max_num_seqs=2)._cost_file != file
    assert load(paths, dtype="float64")._cost_file != file


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps({"format": 1, "costs": {"step": 1}}), '{"format": 0}'])
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text, encoding="utf-8")
    assert recall_costs(file) is None
    assert recall_costs(tmp_path / "absent.json") is None


def test_nothing_is_profiled_where_nothing_is_decided_by_cost(paths: tuple[Path, Path]) -> None:
    for llm in (load(paths, speculation=2), LLM(paths[0], dtype="float32", max_model_len=128, probe="skip")):
        llm.profile_costs()
        assert llm._cost_file is None


def test_a_profile_beside_requests_is_refused(paths: tuple[Path, Path]) -> None:
    llm = load(paths, max_num_seqs=4)
    llm.engine.submit(Request(request_id="r", prompt_token_ids=(1, 2), sampling=GREEDY))
    with pytest.raises(RequestError, match="while requests run"):
        llm.profile_costs()


def test_each_request_chooses_for_itself(paths: tuple[Path, Path]) -> None:
    """Off never drafts, a number always does, within what may still be emitted; the tokens are the same."""
    llm = load(paths)
    asked = prompts(3)
    wanted = ["off", 2, "auto"]
    outputs = llm.generate(asked, [SamplingParams(max_tokens=12, ignore_eos=True, speculation=word) for word in wanted])
    plain = LLM(paths[0], dtype="float32", max_model_len=128, probe="skip").generate(asked, GREEDY)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    off, fixed, _ = (output.usage for output in outputs)
    assert off.num_drafted == 0
    assert fixed.num_drafted >= 2 * (fixed.num_rounds - 2)
    metrics = llm.metrics
    assert metrics.draft_reasons[DraftReason.OFF] > 0
    assert metrics.draft_reasons[DraftReason.FIXED] > 0
    assert sum(metrics.draft_reasons.values()) == metrics.num_decode_spans
    with pytest.raises(RequestError, match="speculation=5 exceeds the 4 drafts"):
        llm.generate(asked[:1], SamplingParams(speculation=5))
    assert not llm.engine.has_work


def test_the_drafters_context_ends_drafts_not_the_request(paths: tuple[Path, Path], tmp_path: Path) -> None:
    config = json.loads((paths[1] / "config.json").read_text())
    for file in paths[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 20}))
    llm = load((paths[0], tmp_path), speculation=DRAFTS)
    assert llm.config.drafter_context == 20
    asked, params = [list(range(8, 18))], SamplingParams(max_tokens=40, ignore_eos=True)
    (output,) = llm.generate(asked, params)
    (plain,) = LLM(paths[0], dtype="float32", max_model_len=128, probe="skip").generate(asked, params)
    assert output.token_ids == plain.token_ids
    assert llm.metrics.draft_reasons[DraftReason.FIXED] > 0
    assert llm.metrics.draft_reasons[DraftReason.NO_ROOM] >= 40 - 10 - 2 * DRAFTS
