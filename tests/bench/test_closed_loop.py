"""Where the time of a pass is booked, and that every seat stays busy."""

import pytest

from outrider.bench.ab import merge_passes
from outrider.bench.closed_loop import TokenisedPrompt, run_pass
from outrider.errors import EngineFault
from outrider.request import FinishReason, SamplingParams
from outrider.testing.scripted_engine import ScriptedEngine

SAMPLING = SamplingParams(max_tokens=99)


def pass_of(engine: ScriptedEngine, concurrency: int, lengths=(13, 13, 13, 13)):
    prompts = [
        TokenisedPrompt(question_id=f"q{index}", token_ids=(index, 2, length)) for index, length in enumerate(lengths)
    ]
    return run_pass(engine, prompts, concurrency=concurrency, sampling=SAMPLING, clock=engine.clock)


def test_a_lone_request_splits_into_prefill_and_decode() -> None:
    record = pass_of(ScriptedEngine(per_round=4, round_s=0.5, drafts=7), concurrency=1, lengths=(13,))
    (prompt,) = record.prompts
    assert (record.prefill_s, record.mixed_s, record.decode_s, record.num_decode_steps) == (1.0, 0.0, 1.5, 3)
    assert (record.window_s, record.window_tokens, record.window_rounds) == (1.5, 12, 3)
    assert (prompt.ttft_s, prompt.tpot_s) == (1.0, 1.5 / 12)
    assert (prompt.num_decode_tokens, prompt.num_rounds, len(prompt.token_ids)) == (12, 3, 13)
    assert record.phase_s["propose"] == 0.375
    assert record.phase_s["host"] == 0.375  # what the named parts leave over
    assert sum(record.phase_s.values()) == record.decode_s
    assert (record.num_rounds, record.num_proposing_rounds, record.num_decode_spans) == (3, 3, 3)
    assert record.drafted_at == dict.fromkeys(range(7), 3) and record.accepted_at == dict.fromkeys(range(3), 3)


def test_concurrency_is_kept_and_decode_time_is_shared() -> None:
    engine = ScriptedEngine(per_round=4, round_s=0.5)
    record = pass_of(engine, concurrency=2)
    assert engine.max_in_flight == 2
    assert [prompt.question_id for prompt in record.prompts] == ["q0", "q1", "q2", "q3"]
    assert sum(prompt.decode_s for prompt in record.prompts) == pytest.approx(record.decode_s)
    assert record.decode_s == record.window_s == 3.0  # two pairs of requests, three rounds each
    assert record.prefill_s == 4.0
    assert not engine.aborted


def test_rounds_that_carry_prompts_count_neither_as_prefill_nor_as_decode() -> None:
    engine = ScriptedEngine(per_round=4, round_s=0.5, mixes=True)
    record = pass_of(engine, concurrency=2, lengths=(13, 13))
    # The first prompt alone, the second with a round of the first, then two rounds of both.
    assert (record.prefill_s, record.mixed_s) == (
        1.0,
        1.5 + 1.5,
    )  # and the refill for the first, with the second's last
    assert (record.decode_s, record.decode_tokens) == (1.0, 16)
    assert (record.window_s, record.window_tokens, record.window_rounds) == (1.0, 16, 2)
    assert record.num_rounds == 4
    assert sum(record.phase_s.values()) == record.decode_s


def test_the_prompts_start_again_until_the_last_one_has_its_answer() -> None:
    engine = ScriptedEngine(per_round=4, round_s=0.5)
    record = pass_of(engine, concurrency=2, lengths=(13, 41))
    assert [request.prompt_token_ids[0] for request in engine.submitted] == [0, 1, 0, 1, 0][: len(engine.submitted)]
    assert len(engine.submitted) > 2
    assert record.window_s == record.decode_s  # never a free seat
    assert engine.aborted and not engine.running and not engine.waiting
    assert [len(prompt.token_ids) for prompt in record.prompts] == [13, 41]
    assert record.refills_agree


def test_more_seats_than_prompts_are_all_taken() -> None:
    engine = ScriptedEngine(per_round=4, round_s=0.5)
    record = pass_of(engine, concurrency=5, lengths=(13, 13))
    assert engine.max_in_flight == 5
    assert len(record.prompts) == 2
    assert record.window_tokens == 5 * 12


@pytest.mark.parametrize("lengths", [(13, 41), (25, 41)])
def test_a_refill_that_says_something_else_is_noticed(lengths) -> None:
    """Finished refills of the first prompt; in the second case one that is cut short."""
    right = pass_of(ScriptedEngine(per_round=4, round_s=0.5), 2, lengths)
    engine = ScriptedEngine(per_round=4, round_s=0.5, wrong={0: 1})
    wrong = pass_of(engine, 2, lengths)
    assert right.refills_agree
    assert [prompt.token_ids for prompt in right.prompts] == [prompt.token_ids for prompt in wrong.prompts]
    assert not wrong.refills_agree


def test_a_failed_request_stops_the_benchmark() -> None:
    with pytest.raises(EngineFault, match="ended as error"):
        pass_of(ScriptedEngine(per_round=4, round_s=0.5, reason=FinishReason.ERROR), concurrency=1)


def test_merged_passes_add_up() -> None:
    whole = pass_of(ScriptedEngine(per_round=4, round_s=0.5, drafts=7), concurrency=1, lengths=(13, 13))
    part = pass_of(ScriptedEngine(per_round=4, round_s=0.5, drafts=7), concurrency=1, lengths=(13,))
    merged = merge_passes([part, part])
    for name in type(whole).__slots__:
        if name != "prompts":
            assert getattr(merged, name) == getattr(whole, name), name
    assert len(merged.prompts) == 2
    assert not merge_passes(
        [part, pass_of(ScriptedEngine(per_round=4, round_s=1, wrong={0: 1}), 2, (5, 41))]
    ).refills_agree
