"""A cell: turns, repeats, comparisons, and everything that must be noticed, on scripted engines."""

import json
import math
from collections.abc import Sequence

import pytest
from rich.console import Console

from outrider.bench.ab import RepeatRule, Workload, run_cell, turn_order
from outrider.bench.closed_loop import TokenisedPrompt
from outrider.bench.report import cell_table, cells_to_json, draft_table, round_table, summary_line
from outrider.bench.summary import CellKey, CellSummary
from outrider.request import SamplingParams
from outrider.testing.scripted_engine import Clock, ScriptedEngine

THREE = RepeatRule(min_repeats=3, max_repeats=3)
PROMPTS = [TokenisedPrompt(question_id=f"q{index}", token_ids=(index, 2, 13)) for index in range(4)]


def three_arms(clock: Clock, **of_auto: object) -> dict[str, ScriptedEngine]:
    """Decode time per token 0.5 s plain, 0.25 s with seven drafts, 0.2 s by `auto`."""
    return {
        "plain": ScriptedEngine(per_round=1, round_s=0.5, clock=clock),
        "fixed7": ScriptedEngine(per_round=4, round_s=1.0, clock=clock, drafts=7),
        "auto": ScriptedEngine(per_round=4, round_s=0.8, clock=clock, drafts=5, **of_auto),  # type: ignore[arg-type]
    }


def cell_of(
    engines: dict[str, ScriptedEngine],
    clock: Clock,
    *,
    key: CellKey | None = None,
    rule: RepeatRule = THREE,
    prompts: Sequence[TokenisedPrompt] = PROMPTS,
    lines: list[str] | None = None,
    **more: object,
) -> CellSummary:
    return run_cell(
        engines,
        Workload(
            key=key or CellKey(tier="mixed", concurrency=1, prompt_length=None, prompt_set="set"),
            prompts=prompts,
            sampling=SamplingParams(max_tokens=99),
        ),
        rule=rule,
        progress=(lines if lines is not None else []).append,
        clock=clock,
        **more,  # type: ignore[arg-type]
    )


def key_of(concurrency: int, tier: str = "mixed", length: int | None = None) -> CellKey:
    return CellKey(tier=tier, concurrency=concurrency, prompt_length=length, prompt_set="set")


def test_host_time_of_a_round_is_what_the_models_do_not_take() -> None:
    clock = Clock()
    cell = cell_of(three_arms(clock), clock)
    for arm in cell.arms.values():
        models_s = sum(arm.phase_s[name] for name in ("propose", "forward", "observe"))
        assert arm.host_ms == pytest.approx(1000 * (arm.decode_s - models_s) / arm.num_decode_steps)
        assert arm.host_ms > 0
    (fields,) = cells_to_json([cell])
    assert fields["arms"]["plain"]["host_ms"] == cell.arms["plain"].host_ms  # type: ignore[index]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_ratios_are_those_of_decode_time(concurrency: int) -> None:
    clock = Clock()
    cell = cell_of(three_arms(clock), clock, key=key_of(concurrency))
    ratios = {name: comparison.ratio for name, comparison in cell.comparisons.items()}
    for name, expected in (("fixed7", 2.0), ("auto", 2.5), ("auto_over_fixed7", 1.25)):
        assert (ratios[name].value, ratios[name].low, ratios[name].high) == pytest.approx((expected,) * 3)
        assert cell.comparisons[name].verdict == "faster"
    assert cell.comparisons["auto"].ttft_ratio.value == pytest.approx(1.0)
    assert cell.identical and cell.num_repeats == 3
    assert cell.arms["auto"].steady_tokens_per_s == pytest.approx(concurrency * 5.0)
    assert cell.arms["plain"].tokens_per_round == 1.0 and cell.tokens_per_round == 4.0


def test_what_drafting_did_is_counted() -> None:
    clock = Clock()
    cell = cell_of(three_arms(clock), clock)
    auto, plain = cell.arms["auto"], cell.arms["plain"]
    assert (auto.drafts_per_round, auto.propose_share, auto.paused_share) == (5.0, pytest.approx(0.25), 0.0)
    assert auto.accepted_share_at == (1.0, 1.0, 1.0, 0.0, 0.0)
    assert (plain.drafts_per_round, plain.paused_share, plain.accepted_share_at) == (0.0, 1.0, ())
    # The identity of an accepted length: one, and what stood at each position, per round.
    assert auto.tokens_per_round == 1 + sum(auto.accepted_share_at)


def test_the_arms_take_turns_in_every_order() -> None:
    names = ["plain", "fixed7", "auto"]
    orders = [turn_order(names, turn) for turn in range(6)]
    for name in names:
        assert [order.index(name) for order in orders].count(0) == 2
        for other in names:
            assert name == other or sum(order.index(name) < order.index(other) for order in orders) == 3
    assert [turn_order(names[:2], turn)[0] for turn in range(4)] == ["plain", "fixed7", "fixed7", "plain"]
    assert turn_order(["plain"], 5) == ["plain"]


@pytest.mark.parametrize(("concurrency", "switches"), [(1, 4), (2, 1)])
def test_arms_change_after_every_prompt_alone_and_after_every_pass_in_company(concurrency: int, switches: int) -> None:
    clock = Clock()
    lines: list[str] = []
    rule = RepeatRule(min_repeats=1, max_repeats=1)
    cell_of(three_arms(clock), clock, key=key_of(concurrency), rule=rule, lines=lines)
    assert len(lines) == switches


@pytest.mark.parametrize(
    ("num_repeats", "half_width", "elapsed_s", "more"),
    [
        (0, math.nan, 0.0, True),
        (2, 0.0, 1e9, True),  # the least is always run
        (3, 0.02, 3.0, False),
        (3, 0.021, 3.0, True),
        (3, math.nan, 3.0, True),
        (3, 0.5, 30.0, True),  # the next would end at 40
        (3, 0.5, 31.0, False),
        (9, 0.5, 9.0, False),
    ],
)
def test_when_another_repeat_follows(num_repeats: int, half_width: float, elapsed_s: float, more: bool) -> None:
    rule = RepeatRule(min_repeats=3, max_repeats=9, budget_s=40.0)
    assert rule.wants_more(num_repeats, half_width, elapsed_s) is more


@pytest.mark.parametrize(("concurrency", "some"), [(1, 0.12), (2, 0.06)])
def test_repeats_are_added_until_the_ratio_is_known(concurrency: int, some: float) -> None:
    quiet, noisy, hopeless = (
        cell_of(
            three_arms(clock, noise=noise),
            clock,
            rule=RepeatRule(min_repeats=2, max_repeats=30),
            key=key_of(concurrency),
            prompts=PROMPTS[:2],
        )
        for noise, clock in ((0.0, Clock()), (some, Clock()), (0.9, Clock()))
    )
    assert quiet.num_repeats == 2
    assert 2 < noisy.num_repeats < 30
    assert noisy.comparisons["auto"].ratio.half_width <= 0.02
    assert noisy.comparisons["auto"].verdict == "faster"
    assert hopeless.num_repeats == 30
    assert hopeless.comparisons["auto"].verdict == "not resolved"


def test_a_time_budget_ends_a_cell_that_is_not_resolved() -> None:
    clock = Clock()
    rule = RepeatRule(min_repeats=2, max_repeats=1000, budget_s=300.0)
    cell = cell_of(three_arms(clock, noise=0.9), clock, rule=rule)
    assert 2 < cell.num_repeats < 1000
    assert cell.seconds <= 300.0
    assert cell.comparisons["auto"].verdict == "not resolved"


def test_long_prompts_are_short_in_the_warm_up_and_whole_after_it() -> None:
    clock = Clock()
    engines = three_arms(clock)
    healed: list[int] = []
    prompts = [TokenisedPrompt(question_id="q", token_ids=(7,) * 500 + (13,))]
    cell_of(engines, clock, prompts=prompts, before=lambda: healed.append(len(engines["auto"].submitted)))
    assert [len(request.prompt_token_ids) for request in engines["auto"].submitted] == [128, 501, 501, 501]
    assert healed == [1]


def test_requests_of_the_arm_off_want_no_drafts() -> None:
    clock = Clock()
    engines = {"plain": ScriptedEngine(per_round=1, round_s=0.5, clock=clock)}
    engines["off"] = ScriptedEngine(per_round=1, round_s=0.6, clock=clock)
    cell = cell_of(engines, clock)
    default = SamplingParams().speculation
    assert default not in {request.sampling.speculation for request in engines["off"].submitted}
    assert {request.sampling.speculation for request in engines["plain"].submitted} == {default}
    assert cell.comparisons["off"].verdict == "slower"
    assert cell.main is None and cell.main_comparison is None


def test_a_cell_has_every_field_that_outside_checks_read() -> None:
    clock = Clock()
    (cell,) = cells_to_json([cell_of(three_arms(clock), clock, key=key_of(1, length=2048))])
    wanted = {
        "tier", "concurrency", "prompt_length", "prompt_set", "num_prompts", "num_output_tokens", "num_repeats",
        "ratio", "ratio_low", "ratio_high", "verdict", "ttft_ratio", "tokens_per_round", "loop_share", "identical",
        "differing", "window_s", "arms", "auto", "fixed7", "auto_over_fixed7", "outputs",
    }  # fmt: skip
    assert wanted <= cell.keys()
    for name in ("auto", "fixed7", "auto_over_fixed7"):
        assert {"ratio", "ratio_low", "ratio_high", "verdict", "ttft_ratio"} <= cell[name].keys()
    assert [cell[name] for name in ("ratio", "ratio_low", "ratio_high")] == pytest.approx([2.5] * 3)
    assert cell["fixed7"]["ratio"] == pytest.approx(2.0)
    for arm in ("plain", "fixed7", "auto", "spec"):
        assert {"tpot_mean_ms", "tpot_median_ms", "steady_tokens_per_s"} <= cell["arms"][arm].keys()
    assert cell["arms"]["spec"] == cell["arms"]["auto"]
    assert (cell["num_prompts"], cell["num_output_tokens"], cell["prompt_length"]) == (4, 52, 2048)
    assert (cell["identical"], cell["differing"], cell["loop_share"]) == (True, [], 0.0)
    hashes = cell["outputs"]
    assert hashes["plain"] == hashes["fixed7"] == hashes["auto"] and hashes["plain"].keys() == {"q0", "q1", "q2", "q3"}
    assert "outputs" not in cells_to_json([cell_of(three_arms(clock), clock)], with_outputs=False)[0]
    json.dumps(cell, allow_nan=False)


def test_what_one_repeat_cannot_say_is_null() -> None:
    clock = Clock()
    cell = cell_of(three_arms(clock), clock, rule=RepeatRule(min_repeats=1, max_repeats=1))
    (values,) = cells_to_json([cell])
    assert values["ratio"] == pytest.approx(2.5)
    assert (values["ratio_low"], values["ratio_high"], values["verdict"]) == (None, None, "not resolved")
    assert json.loads(summary_line([cell]))["cells"][0]["ratio_low"] is None


def test_without_plain_nothing_is_compared() -> None:
    clock = Clock()
    engines = three_arms(clock)
    del engines["plain"]
    cell = cell_of(engines, clock)
    assert not cell.comparisons
    assert cells_to_json([cell])[0]["ratio"] is None


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("first_wrong", [0, 2])  # from the start; only in a later repeat
def test_one_differing_token_is_reported(concurrency: int, first_wrong: int) -> None:
    clock = Clock()
    engines = three_arms(clock, wrong={2: first_wrong})
    cell = cell_of(engines, clock, key=key_of(concurrency))
    assert not cell.identical
    assert cell.differing[0] == "q2"
    assert json.loads(summary_line([cell]))["cells"][0]["identical"] is False
    assert "OUTPUT DIFFERS" in drawn(cell_table([cell]))


def drawn(table: object) -> str:
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_tables_fit_120_columns_and_show_every_arm() -> None:
    clock = Clock()
    cell = cell_of(three_arms(clock, noise=0.5), clock, key=key_of(16, "high_entropy", 2048))
    for table, num_rows in ((cell_table([cell]), 4), (draft_table([cell]), 2), (round_table([cell]), 3)):
        text = drawn(table)
        assert table.row_count == num_rows
        assert max(len(line.rstrip()) for line in text.splitlines()) <= 120
        assert "c16 high_entropy 2k" in text and "fixed7" in text and "auto" in text
    assert "not resolved" in drawn(cell_table([cell])) and "auto/fixed7" in drawn(cell_table([cell]))
