"""Prompts of a wanted length, counted here in characters."""

import pytest

from outrider.bench.lengths import at_length, parse_length
from outrider.bench.workload import BenchPrompt
from outrider.errors import ConfigError

OVERHEAD = 5  # of a chat form


def count(text: str) -> int:
    return OVERHEAD + len(text)


def prompt(name: str, text: str, body: tuple[int, int] | None = None) -> BenchPrompt:
    return BenchPrompt(question_id=name, tier="t", sub_category="s", text=text, body_span=body)


def made(prompts: list[BenchPrompt], num_tokens: int) -> dict[str, str]:
    return {one.question_id: one.text for one in at_length(prompts, num_tokens, count)}


def test_lengths_as_they_are_written() -> None:
    assert [parse_length(text) for text in ("256", "1k", "2k", "1000")] == [256, 1024, 2048, 1000]
    for text in ("", "0", "k", "-1", "1.5k", "1m", "1kk"):
        with pytest.raises(ConfigError, match="--prompt-length"):
            parse_length(text)


def test_a_long_body_is_cut_at_its_end_and_the_question_stays() -> None:
    text = "Read." + "x" * 100 + "Which?"
    (cut,) = made([prompt("a", text, (5, 105))], 40).values()
    assert cut == "Read." + "x" * (40 - OVERHEAD - 11) + "Which?"


def test_a_short_prompt_gets_its_neighbours_in_front() -> None:
    prompts = [prompt("a", "first?"), prompt("b", "second?"), prompt("c", "third?")]
    texts = made(prompts, 60)
    assert {count(text) for text in texts.values()} == {60}
    assert texts["a"].startswith("second?\n\nthird?\n\nfirst?\n\nsecond?\n\n") and texts["a"].endswith("\n\nfirst?")
    assert texts["b"].startswith("third?\n\nfirst?") and texts["b"].endswith("\n\nsecond?")
    assert made(prompts, 60) == texts


def test_a_body_that_is_too_short_is_kept_whole() -> None:
    texts = made([prompt("a", "Read.xxWhich?", (5, 7)), prompt("b", "other")], 50)
    assert texts["a"].endswith("\n\nRead.xxWhich?") and count(texts["a"]) == 50


def test_a_prompt_that_cannot_be_cut_is_left_out_and_one_that_just_fits_stays() -> None:
    prompts = [prompt("long", "y" * 100), prompt("body", "y" * 50 + "x" * 50, (50, 100)), prompt("fits", "z" * 44)]
    assert made(prompts, 50) == {"fits": "z" * 44}
    assert set(made(prompts, 60)) == {"body", "fits"}
