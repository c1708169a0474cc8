"""From checkpoint directories to outputs, with a real toy target and a real toy DSpark drafter."""

import random
from pathlib import Path

import pytest
import torch

from outrider.engine.build import EngineLimits
from outrider.engine.llm import LLM
from outrider.errors import ConfigError, RequestError, UnsupportedError, UserError
from outrider.models.dspark.block import BlockPredictor
from outrider.models.dspark.load import load_predictor
from outrider.request import FinishReason, SamplingParams
from outrider.testing.toy import ToyOptions, write_toy_checkpoint
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

TOY = ToyOptions(num_layers=5, mla_layers=(2, 4), num_experts=4, num_shards=1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    model = write_toy_checkpoint(folder / "target", TOY, seed=1)
    write_toy_drafter(
        folder / "drafter", ToyDrafterOptions(hidden_size=64, num_target_layers=5, aux_layer_ids=(0, 2, 3))
    )
    return model, folder / "drafter"


def prompts(count: int) -> list[list[int]]:
    dice = random.Random(4)
    return [[dice.randrange(95) for _ in range(dice.choice([1, 5, 64, 70, 90]))] for _ in range(count)]


def load(paths: tuple[Path, Path], speculation: str | int, dtype: str = "float32", **changes: int) -> LLM:
    return LLM(paths[0], paths[1], speculation=speculation, dtype=dtype, max_model_len=128, **changes)  # type: ignore[arg-type]


GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_real_drafter_changes_nothing_but_the_rounds(paths: tuple[Path, Path], dtype: str) -> None:
    asked = prompts(4)
    plain = load(paths, "off", dtype, max_num_seqs=1).generate(asked, GREEDY)
    for speculation, seqs in (("auto", 4), (4, 4), (2, 2)):
        llm = load(paths, speculation, dtype, max_num_seqs=seqs)
        outputs = llm.generate(asked, GREEDY)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        assert speculation == "auto" or all(o.usage.num_drafted > 0 for o in outputs)
        assert llm.metrics.num_drafted == sum(o.usage.num_drafted for o in outputs)
    assert all(o.usage.num_drafted == 0 and o.usage.num_rounds == 9 for o in plain)
    assert [o.prompt_token_ids for o in plain] == [tuple(prompt) for prompt in asked]
    assert all(o.finish_reason is FinishReason.LENGTH and len(o.token_ids) == 10 for o in plain)
    assert all(0 < (o.time_to_first_token_s or 0) <= o.total_s for o in plain)


def test_the_drafter_computes_only_the_drafts_asked_for(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    def load_and_note(*args: object, num_draft_tokens: int | None = None, **kwargs: object) -> BlockPredictor:
        asked.append(num_draft_tokens)
        return load_predictor(*args, num_draft_tokens=num_draft_tokens, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("outrider.engine.llm.load_predictor", load_and_note)
    assert [load(paths, speculation).config.num_draft_tokens for speculation in ("auto", 2)] == asked == [4, 2]


def test_streams_and_lists_share_one_engine(paths: tuple[Path, Path]) -> None:
    llm = load(paths, "auto")
    first, second = prompts(2)
    expected = [o.token_ids for o in llm.generate([first, second], GREEDY)]
    stream = llm.stream(first, GREEDY)
    updates = [next(stream)]
    assert [o.token_ids for o in llm.generate([second], GREEDY)] == [expected[1]]
    updates.extend(stream)
    assert tuple(t for update in updates for t in update.new_token_ids) == expected[0]
    assert [update.finish_reason for update in updates[:-1]] == [None] * (len(updates) - 1)
    assert updates[-1].finish_reason is FinishReason.LENGTH
    assert not llm.engine.has_work


def test_closing_a_stream_aborts_it(paths: tuple[Path, Path]) -> None:
    with load(paths, "auto") as llm:
        stream = llm.stream(prompts(1)[0], SamplingParams(ignore_eos=True))
        next(stream)
        assert llm.engine.has_work
        stream.close()
        assert not llm.engine.has_work
        assert llm.metrics.finished["abort"] == 1


def test_one_bad_prompt_stops_the_list_before_it_runs(paths: tuple[Path, Path]) -> None:
    llm = load(paths, "auto")
    for bad, words in (([], "0 tokens"), ([1] * 129, "129 tokens"), ([97], "contains 97")):
        with pytest.raises(RequestError, match=words):
            llm.generate([[1, 2], bad], GREEDY)
        assert not llm.engine.has_work
    with pytest.raises(UnsupportedError, match="no tokenizer"):
        llm.generate(["text"], GREEDY)
    with pytest.raises(RequestError, match="pass a list"):
        llm.generate("text", GREEDY)
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        llm.generate([[1]], [GREEDY, GREEDY])
    assert llm.generate([], GREEDY) == []
    (empty,) = llm.generate([[1]], SamplingParams(max_tokens=0))
    assert (empty.token_ids, empty.finish_reason, empty.time_to_first_token_s) == ((), FinishReason.LENGTH, None)


def test_values_that_cannot_work_are_refused(paths: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="speculation=5 exceeds the 4"):
        load(paths, 5)
    with pytest.raises(ConfigError, match="speculation='fast'"):
        load(paths, "fast")
    with pytest.raises(ConfigError, match="speculation=2 exceeds the 0"):
        LLM(paths[0], speculation=2)
    with pytest.raises(ConfigError, match="dtype='float16'"):
        load(paths, "off", "float16")


def test_defaults_come_from_the_checkpoint(paths: tuple[Path, Path]) -> None:
    llm = LLM(paths[0], max_num_seqs=2, limits=EngineLimits(page_size=16, max_prefill_tokens=1))
    assert llm.max_model_len == 4096
    assert llm.config.cache.num_pages == 2 * 256
    assert llm.config.scheduler.max_prefill_tokens == 16
    assert llm.config.num_draft_tokens == 0
    assert llm.last_logits([1, 2]).dtype == torch.bfloat16


@pytest.mark.parametrize("length", [1, 64, 90])
def test_last_logits_are_those_that_choose_the_first_token(paths: tuple[Path, Path], length: int) -> None:
    llm = load(paths, "auto", limits=EngineLimits(max_step_rows=32, max_prefill_tokens=32))  # type: ignore[arg-type]
    prompt = [index % 90 for index in range(length)]
    stream = llm.stream(prompt, GREEDY)
    (token_id,) = next(stream).new_token_ids
    logits = llm.last_logits(prompt)
    assert logits.shape == (97,)
    assert int(logits.argmax()) == token_id
    assert sum(len(update.new_token_ids) for update in stream) == 9
    with pytest.raises(RequestError, match="0 tokens"):
        llm.last_logits([])


def test_eos_of_the_config_ends_a_request(paths: tuple[Path, Path]) -> None:
    llm = load(paths, "auto")
    prompt = prompts(1)[0]
    (free,) = llm.generate([prompt], GREEDY)
    eos = free.token_ids[5]
    config = paths[0] / "config.json"
    original = config.read_text()
    try:
        config.write_text(original.replace('"eos_token_id": 96', f'"eos_token_id": {eos}'))
        for speculation in ("off", "auto"):
            (output,) = load(paths, speculation).generate([prompt], SamplingParams(max_tokens=10))
            assert output.token_ids == free.token_ids[: free.token_ids.index(eos)]
            assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, eos)
    finally:
        config.write_text(original)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": "0"}, {"temperature": float("nan")}, {"temperature": 10**400}, {"top_k": 0.5}, {"top_p": None},
        {"seed": "x"}, {"max_tokens": "5"}, {"max_tokens": 1.5}, {"max_tokens": True}, {"logprobs": []},
        {"stop": None}, {"stop": ("a", 5)}, {"stop": b"x"}, {"stop_token_ids": 5}, {"stop_token_ids": "5"},
        {"ignore_eos": 1}, {"speculation": None},
    ],
)  # fmt: skip
def test_sampling_values_of_another_type_are_named(changes: dict[str, object]) -> None:
    (name,) = changes
    with pytest.raises(RequestError, match=name):
        SamplingParams(**changes)  # type: ignore[arg-type]


def test_prompts_of_another_type_are_refused(paths: tuple[Path, Path]) -> None:
    llm = load(paths, "off")
    for asked in (5, None, b"ab", {"a": 1}, [5], [None], [b"ab"], [[1.0]], [[True]], [["a"]], [[10**30]]):
        with pytest.raises(RequestError):
            llm.generate(asked, GREEDY)  # type: ignore[arg-type]
    for sampling in ([None], "x", 5, [5]):
        with pytest.raises(RequestError, match="sampling"):
            llm.generate([[1]], sampling)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="prompt_token_ids is NoneType"):
        llm.last_logits(None)  # type: ignore[arg-type]
    for device in (None, "meta", "x"):
        with pytest.raises(ConfigError, match="device="):
            LLM(paths[0], device=device)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"stop_token_ids contains 1\.5"):
        llm.generate([[1]], SamplingParams(max_tokens=1, stop_token_ids=(1.5,)))  # type: ignore[arg-type]
    (output,) = llm.generate([torch.arange(1, 4).numpy()], GREEDY)  # type: ignore[list-item]
    assert output.token_ids == llm.generate([[1, 2, 3]], GREEDY)[0].token_ids


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, 10**9, 10**30])
@pytest.mark.parametrize("name", ["max_num_seqs", "max_model_len", "page_size", "num_pages"])
def test_budgets_out_of_range_are_user_errors(paths: tuple[Path, Path], name: str, value: object) -> None:
    if (name, value) == ("page_size", 10**9):
        value = 2**31 - 1  # one page per sequence, of more memory than there is
    arguments: dict[str, object] = {"max_model_len": 128}
    if name in ("page_size", "num_pages"):
        arguments["limits"] = EngineLimits(**{name: value})  # type: ignore[arg-type]
    else:
        arguments[name] = value
    with pytest.raises(UserError, match="="):
        LLM(paths[0], **arguments)  # type: ignore[arg-type]


def test_a_context_beyond_the_checkpoint_is_refused(paths: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="max_model_len=4097 exceeds the 4096 positions"):
        LLM(paths[0], max_model_len=4097)


@pytest.mark.parametrize("speculation", [1.5, None, [], True, "x", 10**30])
def test_speculation_of_another_type_is_refused(paths: tuple[Path, Path], speculation: object) -> None:
    with pytest.raises(ConfigError, match="speculation="):
        load(paths, speculation)  # type: ignore[arg-type]
