"""Request validation and whole-life arithmetic."""

import math
from dataclasses import replace

import pytest

from outrider.config import CacheConfig, EngineConfig, SchedulerConfig, resolve_num_draft_tokens
from outrider.errors import CapacityError, ConfigError, RequestError, UnsupportedError
from outrider.request import Request, SamplingParams, samples_of
from outrider.scheduling.admission import check_token_ids, num_pages_for, resolve_max_new_tokens

SCHEDULER = SchedulerConfig(max_num_seqs=2, max_model_len=64, max_step_rows=16, max_prefill_tokens=16, chunk_multiple=8)
CACHE = CacheConfig(page_size=4, num_pages=16)


def resolve(num_prompt: int, max_tokens: int | None, cache: CacheConfig = CACHE) -> int:
    request = Request(
        request_id="r", prompt_token_ids=(1,) * num_prompt, sampling=SamplingParams(max_tokens=max_tokens)
    )
    return resolve_max_new_tokens(request, SCHEDULER, cache)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"),
    [(60, None, 4), (63, None, 1), (60, 4, 4), (64, 0, 0), (1, None, 63), (1, 0, 0)],
)
def test_context_is_the_default_limit(num_prompt: int, max_tokens: int | None, expected: int) -> None:
    assert resolve(num_prompt, max_tokens) == expected


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "words"),
    [
        (0, 4, "0 tokens"),
        (65, None, "65 tokens, which exceeds the 64-token context; shorten it by 1"),
        (65, 0, "65 tokens"),
        (64, None, "fills the 64-token context"),
        (60, 5, "max_tokens=5 exceeds the 64-token context; lower max_tokens to 4"),
        (60, 10**12, "max_tokens=1000000000000"),
    ],
)
def test_impossible_requests_are_refused_with_numbers(num_prompt: int, max_tokens: int | None, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        resolve(num_prompt, max_tokens)


def test_a_request_larger_than_the_whole_cache_is_refused() -> None:
    small = CacheConfig(page_size=4, num_pages=3)
    assert resolve(8, 4, small) == 4
    with pytest.raises(CapacityError, match="need 4 pages of 4 tokens, but the cache has 3"):
        resolve(8, 5, small)
    assert resolve(60, 0, small) == 0


def test_page_arithmetic() -> None:
    assert [num_pages_for(tokens, 4) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("bad", [-1, 257, 2**31])
def test_foreign_token_ids_are_named(bad: int) -> None:
    check_token_ids("prompt", (0, 256), 257)
    with pytest.raises(RequestError, match=f"prompt contains {bad}"):
        check_token_ids("prompt", (0, bad), 257)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"temperature": -1.0},
        {"temperature": 1e-9},
        {"temperature": 1e9},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 2.0},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"presence_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"logit_bias": {1: 101.0}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"logit_bias": [(1, 2.0)]},
        {"logit_bias": {1: "x"}},
        {"n": 0},
        {"n": 10**6},
        {"seed": -1},
        {"seed": 2**63},
        {"min_tokens": -1},
        {"min_tokens": 5, "max_tokens": 4},
        {"logprobs": -1},
        {"logprobs": 10**6},
        {"acceptance": "always"},
        {"max_tokens": 10**30},
        {"top_k": -1},
        {"max_tokens": -1},
        {"stop": "ab"},
        {"stop": ("",)},
    ],
)
def test_out_of_range_sampling_is_a_request_error(kwargs: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(kwargs))) as caught:
        SamplingParams(**kwargs)  # type: ignore[arg-type]
    assert not isinstance(caught.value, UnsupportedError)


def test_what_is_plain_argmax_and_what_is_not() -> None:
    for changes in ({}, {"top_k": 1, "top_p": 0.5, "seed": 7}, {"logprobs": 3}, {"ignore_eos": True, "n": 2}):
        assert SamplingParams(**changes).is_argmax  # type: ignore[arg-type]
    for changes in (
        {"temperature": 0.5},
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 1},
    ):
        assert not SamplingParams(**changes).is_argmax  # type: ignore[arg-type]


def test_samples_of_a_request_share_a_seed_and_differ_in_their_index() -> None:
    one = Request(request_id="a", prompt_token_ids=(1, 2), sampling=SamplingParams(seed=5))
    assert samples_of(one) == (one,)
    three = samples_of(replace(one, sampling=SamplingParams(n=3)))
    assert [sample.request_id for sample in three] == ["a#0", "a#1", "a#2"]
    assert [sample.sample_index for sample in three] == [0, 1, 2]
    (seed,) = {sample.sampling.seed for sample in three}
    assert seed is not None
    assert {samples_of(replace(one, sampling=SamplingParams()))[0].sampling.seed for _ in range(50)} != {seed}


def test_speculation_resolves_to_a_number() -> None:
    assert resolve_num_draft_tokens("auto", 7) == 7
    assert resolve_num_draft_tokens("off", 7) == 0
    assert resolve_num_draft_tokens(3, 7) == 3
    for bad in (8, -1, "fast", True):
        with pytest.raises(ConfigError, match="speculation="):
            resolve_num_draft_tokens(bad, 7)


def test_budgets_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_step_rows=4 is below the prefill chunk of 8"):
        SchedulerConfig(max_num_seqs=1, max_model_len=64, max_step_rows=4, max_prefill_tokens=8, chunk_multiple=8)
    with pytest.raises(ConfigError, match="verify span of 17 rows"):
        EngineConfig(cache=CACHE, scheduler=SCHEDULER, num_draft_tokens=16)
    with pytest.raises(ConfigError, match="num_pages=0"):
        CacheConfig(page_size=4, num_pages=0)
