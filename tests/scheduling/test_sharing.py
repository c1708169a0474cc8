"""Samples of one prompt: who computes it, who waits, what is copied and when the copy is dropped."""

from collections import Counter

import pytest

from outrider.config import CacheConfig, SchedulerConfig
from outrider.errors import RequestError
from outrider.plan import ScheduledSequence, StepPlan, StepResult
from outrider.request import FinishReason, Request, SamplingParams, samples_of
from outrider.scheduling import Scheduler

CHUNK, VOCAB = 4, 50


def scheduler_of(*, seqs: int = 4, prefill: int = 64, num_pages: int = 100, oversubscribe: bool = False) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=seqs,
            max_model_len=64,
            max_step_rows=128,
            max_prefill_tokens=prefill,
            chunk_multiple=CHUNK,
            oversubscribe=oversubscribe,
        ),
        CacheConfig(page_size=4, num_pages=num_pages),
        num_draft_tokens=0,
        eos_token_ids=frozenset(),
        vocab_size=VOCAB,
    )


def ask(scheduler: Scheduler, name: str, num_prompt: int, n: int, max_tokens: int = 3) -> None:
    sampling = SamplingParams(n=n, max_tokens=max_tokens, temperature=1.0, seed=1)
    request = Request(request_id=name, prompt_token_ids=(1,) * num_prompt, sampling=sampling)
    for sample in samples_of(request):
        scheduler.add(sample, None)


def update(scheduler: Scheduler, plan: StepPlan) -> None:
    """Every row with logits gives token 7."""
    outputs = tuple((7,) if item.wants_logits else () for item in plan.scheduled)
    zeros = (0,) * len(outputs)
    scheduler.update(plan, StepResult(output_token_ids=outputs, num_drafted=zeros, num_accepted=zeros))


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan.scheduled
    update(scheduler, plan)
    return plan


def prompts_of(plan: StepPlan) -> dict[str, tuple[int, int, str | None]]:
    """Of each prompt chunk: where it begins, how long it is, and whose copy it takes in."""
    return {
        item.request_id: (item.start_position, len(item.query_token_ids), item.shared_prompt)
        for item in plan.scheduled
        if item.is_prompt
    }


def computed(plans: list[StepPlan]) -> Counter[str]:
    rows: Counter[str] = Counter()
    for item in (item for plan in plans for item in plan.scheduled if item.is_prompt):
        rows[item.request_id] += len(item.query_token_ids)
    return rows


def run_dry(scheduler: Scheduler) -> list[StepPlan]:
    plans = []
    while scheduler.has_work:
        plans.append(step(scheduler))
    assert not scheduler.copied_prompts
    return plans


def test_the_prompt_is_computed_once_and_its_end_by_everyone() -> None:
    scheduler = scheduler_of()
    ask(scheduler, "a", 14, 3)
    first, second = step(scheduler), step(scheduler)
    assert prompts_of(first) == {"a#0": (0, 12, None)}
    assert prompts_of(second) == {"a#0": (12, 2, None), "a#1": (12, 2, "a"), "a#2": (12, 2, "a")}
    (copy,) = second.shared_prompts
    leader = first.scheduled[0]
    assert (copy.prompt_id, copy.state_slot, copy.page_ids) == ("a", leader.state_slot, leader.page_ids)
    assert copy.num_tokens == 12
    assert (first.spent_prompts, second.spent_prompts) == ((), ("a",))
    assert not any(item.is_first for item in second.scheduled)
    assert all(item.wants_logits and item.choice is not None for item in second.scheduled)
    assert all(not plan.shared_prompts for plan in run_dry(scheduler))


def test_a_whole_prompt_is_never_taken_over() -> None:
    """The last token at least is computed by each, for its own first draw."""
    for num_prompt, shared in ((12, 8), (13, 12), (5, 4)):
        scheduler = scheduler_of()
        ask(scheduler, "a", num_prompt, 2)
        step(scheduler)
        assert prompts_of(step(scheduler))["a#1"] == (shared, num_prompt - shared, "a")


@pytest.mark.parametrize(("num_prompt", "n"), [(4, 3), (1, 2), (30, 1)])
def test_what_cannot_be_shared_is_not(num_prompt: int, n: int) -> None:
    scheduler = scheduler_of()
    ask(scheduler, "a", num_prompt, n)
    plan = step(scheduler)
    assert len(plan.scheduled) == n and all(item.is_first for item in plan.scheduled)
    assert not any(plan.shared_prompts for plan in run_dry(scheduler))


def test_equal_prompts_of_other_requests_are_their_own() -> None:
    scheduler = scheduler_of()
    ask(scheduler, "a", 14, 2)
    ask(scheduler, "b", 14, 2)
    assert prompts_of(step(scheduler)) == {"a#0": (0, 12, None), "b#0": (0, 12, None)}
    taken = prompts_of(step(scheduler))
    assert (taken["a#1"][2], taken["b#1"][2]) == ("a", "b")


def test_samples_that_come_to_their_seats_later_take_the_copy() -> None:
    scheduler = scheduler_of(seqs=1)
    ask(scheduler, "a", 14, 3)
    plans = run_dry(scheduler)
    assert computed(plans) == {"a#0": 14, "a#1": 2, "a#2": 2}
    assert sum(len(plan.shared_prompts) for plan in plans) == 1
    assert [plan.spent_prompts for plan in plans if plan.spent_prompts] == [("a",)]


def test_a_prompt_of_several_chunks_keeps_the_others_waiting_and_their_budget_free() -> None:
    scheduler = scheduler_of(prefill=8)
    ask(scheduler, "a", 22, 2)
    ask(scheduler, "b", 3, 1)
    plans = run_dry(scheduler)
    assert prompts_of(plans[0]) == {"a#0": (0, 8, None)}
    assert prompts_of(plans[2]) == {"a#0": (16, 4, None), "b": (0, 3, None)}
    assert prompts_of(plans[3]) == {"a#0": (20, 2, None), "a#1": (20, 2, "a")}


def test_another_sample_leads_when_the_leader_leaves() -> None:
    for leave in (Scheduler.abort, Scheduler.preempt):
        scheduler = scheduler_of(prefill=8)
        ask(scheduler, "a", 22, 3)
        assert prompts_of(step(scheduler)) == {"a#0": (0, 8, None)}
        leave(scheduler, "a#0")
        assert prompts_of(step(scheduler)) == {"a#1": (0, 8, None)}
        plans = run_dry(scheduler)
        assert computed(plans)["a#2"] == 2
        assert {item.request_id: item.shared_prompt for plan in plans for item in plan.scheduled if item.is_prompt}[
            "a#2"
        ] == "a"


def test_an_abort_of_the_last_taker_drops_the_copy() -> None:
    scheduler = scheduler_of(seqs=2)
    ask(scheduler, "a", 14, 3, max_tokens=8)
    step(scheduler)
    assert not step(scheduler).spent_prompts
    assert scheduler.copied_prompts == {"a": 12}
    scheduler.abort("a#2")
    assert step(scheduler).spent_prompts == ("a",)
    assert not scheduler.copied_prompts


def test_a_faulted_plan_leaves_no_copy_behind_and_the_rest_goes_on() -> None:
    scheduler = scheduler_of(seqs=2)
    ask(scheduler, "a", 14, 3)
    step(scheduler)
    plan = scheduler.schedule()
    assert plan.shared_prompts
    ended = scheduler.fail_round(plan, "device")
    assert [one.finish_reason for one in ended] == [FinishReason.ERROR] * 2
    after = step(scheduler)
    assert "a" in after.spent_prompts, "it may have been made"
    assert prompts_of(after) == {"a#2": (0, 14, None)}, "alone now, without a cut"
    run_dry(scheduler)


def test_the_number_of_copies_is_bounded() -> None:
    """Samples of many prompts in turns, one seat: each prompt would leave a copy behind."""
    scheduler = scheduler_of(seqs=1)
    sampling = SamplingParams(max_tokens=1)
    for index in range(2):
        for name in "abc":
            request = Request(
                request_id=f"{name}{index}",
                prompt_token_ids=(ord(name) % VOCAB,) * 14,
                sampling=sampling,
                prompt_id=name,
            )
            scheduler.add(request, None)
    held = []
    while scheduler.has_work:
        step(scheduler)
        held.append(len(scheduler.copied_prompts))
    assert max(held) == 1 and held[-1] == 0


def test_one_name_for_two_prompts_is_refused() -> None:
    scheduler = scheduler_of()
    sampling = SamplingParams(max_tokens=1)
    scheduler.add(Request(request_id="a", prompt_token_ids=(1,) * 9, sampling=sampling, prompt_id="p"), None)
    with pytest.raises(RequestError, match="prompt_id='p' names another prompt of 9 tokens"):
        scheduler.add(Request(request_id="b", prompt_token_ids=(2,) * 9, sampling=sampling, prompt_id="p"), None)
    none = SamplingParams(max_tokens=0)
    last = scheduler.add(Request(request_id="c", prompt_token_ids=(1,) * 9, sampling=none, prompt_id="p"), None)
    assert last is not None and last.finish_reason is FinishReason.LENGTH
    run_dry(scheduler)


def test_waiting_samples_give_way_to_the_leader_when_pages_run_out() -> None:
    """Oversubscribed: the youngest, who only wait, are preempted before the one that they wait for."""
    scheduler = scheduler_of(seqs=3, num_pages=17, oversubscribe=True)
    ask(scheduler, "a", 14, 3, max_tokens=50)
    plans = run_dry(scheduler)
    assert any(plan.preempted for plan in plans)
    assert computed(plans)["a#0"] == 14
    assert sum(computed(plans).values()) == 18


def kinds(item: ScheduledSequence) -> int:
    return item.is_first + item.is_resumed + (item.shared_prompt is not None)


def test_a_span_enters_its_seat_in_one_way() -> None:
    scheduler = scheduler_of(seqs=2, num_pages=20, oversubscribe=True)
    ask(scheduler, "a", 14, 4, max_tokens=20)
    assert all(kinds(item) <= 1 for plan in run_dry(scheduler) for item in plan.scheduled)
