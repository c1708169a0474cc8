"""Garbage drafters: the text stays, the drafts fall, from the round that was named."""

from pathlib import Path

import pytest

from outrider.bench.drafter_fault import parse_fault
from outrider.engine.llm import LLM
from outrider.errors import ConfigError
from outrider.request import SamplingParams
from outrider.speculative.drafter import DSparkDrafter

PROMPT, NUM_TOKENS = (5, 9, 2, 40, 7), 24


def open_llm(pair: tuple[Path, Path], fault: str = "", speculation: str | int = 4) -> LLM:
    target, drafter = pair
    return LLM(
        target, drafter, speculation=speculation, probe="skip", max_num_seqs=1,
        drafter_type=parse_fault(fault) or DSparkDrafter,
    )  # fmt: skip


def drafts_of(llm: LLM) -> tuple[tuple[int, ...], list[list[int]]]:
    """Token ids of one answer, and the drafts of every round."""
    drafter, drafted = llm.engine._runner._parts.drafter, []  # type: ignore[attr-defined]
    propose = drafter.propose

    def listening(anchors):
        block = propose(anchors)
        drafted.append((block.token_ids_SG[0].tolist(), block.confidence_SG))
        return block

    drafter.propose = listening
    (answer,) = llm.generate([PROMPT], SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    del drafter.propose
    return answer.token_ids, drafted


def test_the_text_stays_and_the_drafts_are_others(toy_pair) -> None:
    right, drafts = drafts_of(open_llm(toy_pair))
    same, garbage = drafts_of(open_llm(toy_pair, "garbage"))
    assert same == right
    assert len({tuple(tokens) for tokens, _ in garbage}) == len(garbage) > 10, "no two rounds are alike"
    assert garbage[0][0] != drafts[0][0]


def test_garbage_begins_where_it_was_named_and_again_after_a_restart(toy_pair) -> None:
    fault = parse_fault("garbage@6")
    assert fault is not None
    target, drafter = toy_pair
    llm = LLM(target, drafter, speculation=4, probe="skip", max_num_seqs=1, drafter_type=fault)
    _, drafts = drafts_of(open_llm(toy_pair))
    for _ in range(2):
        fault.restart()
        _, faulty = drafts_of(llm)
        # The prompt is the first round that is observed; five rounds of drafts are still the real ones.
        assert [tokens for tokens, _ in faulty[:5]] == [tokens for tokens, _ in drafts[:5]]
        assert faulty[5][0] != drafts[5][0] and faulty[6][0] != drafts[6][0]


def test_confidence_stays_what_the_real_drafter_says(toy_pair) -> None:
    """The policy is not told: confidence has the shape and the values that belong to the real drafts."""
    llm = open_llm(toy_pair, "garbage", "auto")
    honest = open_llm(toy_pair, "", "auto")
    _, faulty = drafts_of(llm)
    _, drafts = drafts_of(honest)
    assert drafts[0][1] is not None
    assert faulty[0][1].tolist() == drafts[0][1].tolist()
    assert faulty[0][0] != drafts[0][0]


@pytest.mark.parametrize("text", ["slow", "garbage@", "garbage@x", "garbage@-1", "Garbage"])
def test_other_faults_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--drafter-fault"):
        parse_fault(text)
    assert parse_fault("") is None
