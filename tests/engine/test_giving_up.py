"""Sequences whose context was given up: no taps, no proposals, and the same tokens in any company."""

import random
from pathlib import Path

import pytest
import torch

from outrider.engine.llm import LLM
from outrider.errors import EngineFault
from outrider.models.kimi_k3.model import KimiK3Model
from outrider.request import SamplingParams
from outrider.speculative.drafter import Anchors
from outrider.speculative.lengths import AllDrafts
from outrider.testing.toy import ToyOptions, write_toy_checkpoint
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

BLOCK, VOCAB = 3, 97


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    options = ToyOptions(num_layers=3, mla_layers=(1, 2), attn_res_block_size=2, vocab_size=VOCAB, num_experts=4)
    drafter = ToyDrafterOptions(
        hidden_size=64, num_layers=1, num_target_layers=3, aux_layer_ids=(0, 1), vocab_size=VOCAB, block_rows=BLOCK
    )
    write_toy_drafter(folder / "drafter", drafter, dtype=torch.bfloat16)
    return write_toy_checkpoint(folder / "target", options), folder / "drafter"


def load(paths: tuple[Path, Path], dtype: str, **changes: object) -> LLM:
    settings = {
        "speculation": BLOCK,
        "max_model_len": 96,
        "max_num_seqs": 4,
        "dtype": dtype,
        "lookup": False,
        **changes,
    }
    return LLM(paths[0], paths[1], **settings | changes)  # type: ignore[arg-type]


def prompts(seed: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(95) for _ in range(dice.choice([1, 5, 17, 40]))] for _ in range(8)]


def give_up(monkeypatch: pytest.MonkeyPatch, share: float, seed: int) -> list[str]:
    """Let the policy give up some requests, and draft for all others; who was given up."""
    dice, names, all_of = random.Random(seed), [], AllDrafts.proposing

    def gives_up(self, item, num_sequences):  # type: ignore[no-untyped-def]
        chosen = dice.random() < share
        if chosen:
            names.append(item.request_id)
        return chosen

    def proposing(self, scheduled, foresee=None, lapsed=frozenset()):  # type: ignore[no-untyped-def]
        return [index for index in all_of(self, scheduled) if scheduled[index].state_slot not in lapsed]

    monkeypatch.setattr(AllDrafts, "gives_up", gives_up)
    monkeypatch.setattr(AllDrafts, "proposing", proposing)
    return names


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(("share", "seed"), [(0.5, 0), (0.5, 1), (1.0, 2)])
def test_tokens_are_those_of_plain_decoding(paths, dtype, share, seed, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    asked, sampling = prompts(seed), SamplingParams(max_tokens=24, ignore_eos=True)
    plain = [one.token_ids for one in load(paths, dtype, speculation="off").generate(asked, sampling)]
    tapped: list[bool] = []
    forward = KimiK3Model.forward

    def watched(self, batch, caches):  # type: ignore[no-untyped-def]
        output = forward(self, batch, caches)
        tapped.append(output.aux_hidden_TAD is not None)
        return output

    monkeypatch.setattr(KimiK3Model, "forward", watched)
    names = give_up(monkeypatch, share, seed)
    llm = load(paths, dtype)
    outputs = llm.generate(asked, sampling)
    assert [one.token_ids for one in outputs] == plain
    drafted = {f"request-{index}": one.usage.num_drafted for index, one in enumerate(outputs)}
    assert all(drafted[name] == 0 for name in names) and names
    assert any(drafted.values()) == (share < 1) == any(tapped)


def test_a_preempted_sequence_stays_given_up(paths, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    asked, sampling = prompts(3), SamplingParams(max_tokens=20, ignore_eos=True)
    plain = [one.token_ids for one in load(paths, "float64", speculation="off").generate(asked, sampling)]
    names = give_up(monkeypatch, 0.5, 3)
    llm, dice = load(paths, "float64"), random.Random(0)
    step = llm.engine.step

    def preempting():  # type: ignore[no-untyped-def]
        if dice.random() < 0.3:
            llm.engine.preempt(f"request-{dice.randrange(8)}")
        return step()

    monkeypatch.setattr(llm.engine, "step", preempting)
    outputs = llm.generate(asked, sampling)
    assert [one.token_ids for one in outputs] == plain
    assert llm.metrics.num_preempted > 3 and names
    assert all(outputs[int(name.split("-")[1])].usage.num_drafted == 0 for name in names)


def test_a_proposal_without_a_context_is_a_fault(paths) -> None:  # type: ignore[no-untyped-def]
    drafter = load(paths, "float64")._runner.drafter
    drafter.reset((0, 1))
    drafter.lapse((1,))
    anchors = Anchors(
        token_ids_S=torch.tensor([1]),
        positions_S=torch.tensor([0]),
        page_table_SP=torch.zeros(1, 1, dtype=torch.int64),
        page_size=64,
        slots=(1,),
        positions=(0,),
    )
    with pytest.raises(EngineFault, match=r"slots \[1\] propose without a context"):
        drafter.propose(anchors)
    drafter.release((1,))
    assert not drafter.lapsed
    with pytest.raises(EngineFault, match="holds no sequence"):
        drafter.lapse((1,))
