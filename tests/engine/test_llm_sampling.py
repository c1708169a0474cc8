"""Sampling from checkpoint directories to outputs, with a real toy target and a real toy DSpark drafter."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.engine.build import EngineLimits
from outrider.engine.engine import Engine
from outrider.engine.llm import LLM
from outrider.engine.runner import Runner
from outrider.request import Request, SamplingParams, TokenLogprobs, samples_of
from outrider.testing.toy import ToyOptions, write_toy_checkpoint
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

TOY = ToyOptions(num_layers=3, mla_layers=(2,), num_experts=4, num_shards=1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    options = {"hidden_size": 64, "num_target_layers": 3, "aux_layer_ids": (0, 1)}
    write_toy_drafter(folder / "full", ToyDrafterOptions(**options))  # type: ignore[arg-type]
    write_toy_drafter(
        folder / "reduced",
        ToyDrafterOptions(family="speculators", draft_vocab_size=40, **options),  # type: ignore[arg-type]
    )
    return {
        "target": write_toy_checkpoint(folder / "target", TOY, seed=1),
        "full": folder / "full",
        "reduced": folder / "reduced",
    }


def load(paths: dict[str, Path], drafter: str | None, dtype: str = "float64", seqs: int = 8, **changes: object) -> LLM:
    return LLM(
        paths["target"],
        paths[drafter] if drafter else None,
        dtype=dtype,
        max_num_seqs=seqs,
        max_model_len=128,
        **changes,  # type: ignore[arg-type]
    )


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 10, "ignore_eos": True, "temperature": 1.0, "seed": 3} | changes))  # type: ignore[arg-type]


ASKED = [
    params(logprobs=2),
    params(temperature=0.6, top_k=20, logprobs=0),
    params(temperature=1.2, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4),
    params(temperature=0.0, frequency_penalty=0.9, logprobs=3),
    params(temperature=2.0, min_p=0.05, logit_bias={4: 3.0, 9: -100.0}),
    params(temperature=0.0, logprobs=1),
    params(n=3, logprobs=1),
    params(temperature=0.0, ignore_eos=False, min_tokens=4, logit_bias={96: 8.0}),
]


def prompts() -> list[list[int]]:
    dice = random.Random(4)
    return [[dice.randrange(95) for _ in range(dice.choice([1, 5, 64, 70]))] for _ in ASKED]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_sampled_output_does_not_depend_on_speculation(paths: dict[str, Path], dtype: str) -> None:
    """Tokens and log probabilities bit for bit: plain and alone, and with drafts in company."""
    plain = load(paths, None, dtype, seqs=1).generate(prompts(), ASKED)
    for drafter, speculation, seqs in (("full", 3, 8), ("reduced", 2, 3), ("full", "auto", 5)):
        llm = load(paths, drafter, dtype, seqs, speculation=speculation)
        for ours, theirs in zip(llm.generate(prompts(), ASKED), plain, strict=True):
            assert ours.seed == theirs.seed == 3
            for sample, expected in zip(ours.samples, theirs.samples, strict=True):
                assert sample.token_ids == expected.token_ids
                assert sample.logprobs == expected.logprobs
                assert speculation == "auto" or sample.usage.num_drafted > 0
                assert expected.usage.num_drafted == 0
    assert plain[0].logprobs is not None and len(plain[0].logprobs) == 10
    assert all(len(entry.top) == 2 for entry in plain[0].logprobs)
    assert plain[2].logprobs is None
    assert len(plain[7].token_ids) >= 4


def test_n_samples_come_together_and_equal_their_own_requests(paths: dict[str, Path]) -> None:
    llm = load(paths, "full", seqs=2)
    prompt = prompts()[1]
    single, three = llm.generate([prompt, prompt], [params(), params(n=3)])
    assert [sample.sample_index for sample in three.samples] == [0, 1, 2]
    assert len({sample.token_ids for sample in three.samples}) == 3
    assert three.token_ids == three.samples[0].token_ids == single.token_ids
    updates = list(llm.stream(prompt, params(n=3)))
    for sample in three.samples:
        mine = [update for update in updates if update.sample_index == sample.sample_index]
        assert tuple(token for update in mine for token in update.new_token_ids) == sample.token_ids
        assert mine[-1].finish_reason is sample.finish_reason
        assert mine[-1].seed == 3
    fresh = llm.generate([prompt] * 2, params(seed=None, n=2))
    assert len({one.seed for one in fresh}) == 2
    assert len({sample.token_ids for one in fresh for sample in one.samples}) == 4
    again = llm.generate([prompt], params(seed=fresh[0].seed, n=2))[0]
    assert [s.token_ids for s in again.samples] == [s.token_ids for s in fresh[0].samples]
    assert not llm.engine.has_work


Outputs = dict[str, tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]]


def run_samples(
    llm: LLM, asked: list[Request], events: Callable[[int, Engine], None] = lambda index, engine: None
) -> Outputs:
    """Tokens and log probabilities by request id; ``events`` happen before the round of their index."""
    outputs: Outputs = {request.request_id: ((), ()) for request in asked}
    for request in asked:
        llm.engine.submit(request)
    index = 0
    while llm.engine.has_work:
        events(index, llm.engine)
        for update in llm.engine.step() if llm.engine.has_work else ():
            assert update.error is None
            token_ids, logprobs = outputs[update.request_id]
            outputs[update.request_id] = token_ids + update.new_token_ids, logprobs + (update.logprobs or ())
        index += 1
    return outputs


def asked_samples(num_prompt: int, n: int) -> list[Request]:
    dice = random.Random(num_prompt)
    prompt = tuple(dice.randrange(95) for _ in range(num_prompt))
    sampling = params(n=n, logprobs=1, repetition_penalty=1.2, max_tokens=9)
    return list(samples_of(Request(request_id="a", prompt_token_ids=prompt, sampling=sampling)))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("num_prompt", [16, 17, 70])
def test_samples_share_the_work_on_their_prompt_and_no_bit_changes(
    paths: dict[str, Path], dtype: str, num_prompt: int
) -> None:
    """Tokens and log probabilities: every sample alone from the start, and all of them from one prefill."""
    asked, shared = asked_samples(num_prompt, 4), (num_prompt - 1) // 16 * 16
    alone = load(paths, "full", dtype, 1)
    expected = run_samples(alone, [replace(request, prompt_id=None) for request in asked])
    assert alone.metrics.num_prompt_tokens == 4 * num_prompt
    assert len({token_ids for token_ids, _ in expected.values()}) == 4
    for drafter, seqs in (("full", 8), ("full", 2), (None, 3), ("reduced", 1)):
        llm = load(paths, drafter, dtype, seqs)
        assert run_samples(llm, asked) == expected
        assert llm.metrics.num_prompt_tokens == num_prompt + 3 * (num_prompt - shared)
        runner = llm.engine._runner
        assert isinstance(runner, Runner) and not runner.prompt_bytes


@pytest.fixture(scope="module")
def chunked(paths: dict[str, Path]) -> LLM:
    """A prompt of 70 tokens takes three rounds."""
    return load(paths, "full", seqs=3, limits=EngineLimits(page_size=16, max_prefill_tokens=32))


@pytest.fixture(scope="module")
def unshared(chunked: LLM) -> Outputs:
    return run_samples(chunked, [replace(request, prompt_id=None) for request in asked_samples(70, 3)])


@pytest.mark.parametrize("when", range(6))
@pytest.mark.parametrize("who", range(3))
@pytest.mark.parametrize("what", ["abort", "preempt"])
def test_an_abort_or_a_preemption_of_one_sample_changes_no_other(
    chunked: LLM, unshared: Outputs, what: str, who: int, when: int
) -> None:
    """Before, while and after the prompt is computed in chunks and handed on, by the leader or a taker."""
    llm, asked, expected = chunked, asked_samples(70, 3), unshared

    def events(index: int, engine: Engine) -> None:
        if index == when:
            getattr(engine, what)(f"a#{who}")

    outputs = run_samples(llm, asked, events)
    for name, (token_ids, logprobs) in expected.items():
        if what == "abort" and name == f"a#{who}":
            assert outputs[name][0] == token_ids[: len(outputs[name][0])]
        else:
            assert outputs[name] == (token_ids, logprobs)
    runner = llm.engine._runner
    assert isinstance(runner, Runner) and not runner.prompt_bytes and not runner.host_bytes


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_coins_accept_drafts_of_a_real_drafter_and_repeat(paths: dict[str, Path], acceptance: str) -> None:
    """High temperature makes both random models nearly uniform: over 97 tokens, or over 40 of them."""
    asked = [params(temperature=30.0, acceptance=acceptance, seed=seed) for seed in range(6)]
    prompt = prompts()[1]
    for drafter, least in (("full", 0.5), ("reduced", 0.08)):  # about 1 and 0.17 are expected
        # The tokens of a seed depend on how many drafts were judged, so their number is fixed here (3 suits both).
        together = load(paths, drafter, seqs=6, speculation=3).generate([prompt] * 6, asked)
        alone = load(paths, drafter, seqs=1, speculation=3).generate([prompt] * 6, asked)
        assert [one.token_ids for one in together] == [one.token_ids for one in alone]
        assert len({one.token_ids for one in together}) == 6
        accepted = sum(one.usage.num_accepted for one in together)
        assert accepted > least * sum(one.usage.num_drafted for one in together)
