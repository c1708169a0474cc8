"""Prompt files and the draw."""

import json

import pytest

from outrider.bench.workload import BenchPrompt, demo_prompt_path, draw_prompts, load_prompt_set
from outrider.errors import RequestError


def prompt(name: str, sub_category: str, tier: str = "mixed") -> BenchPrompt:
    return BenchPrompt(question_id=name, tier=tier, sub_category=sub_category, text=name)


PROMPTS = [prompt("a0", "a"), prompt("a1", "a"), prompt("x", "a", "other"), prompt("b0", "b"), prompt("a2", "a")]


def test_draw_takes_turns_over_sub_categories() -> None:
    assert [p.question_id for p in draw_prompts(PROMPTS, "mixed", 3)] == ["a0", "b0", "a1"]
    assert [p.question_id for p in draw_prompts(PROMPTS, "mixed", 4)] == ["a0", "b0", "a1", "a2"]


def test_draw_gives_all_that_a_tier_has_and_refuses_an_empty_one() -> None:
    assert [p.question_id for p in draw_prompts(PROMPTS, "mixed", 5)] == ["a0", "b0", "a1", "a2"]
    with pytest.raises(RequestError, match=r"tier 'none' has no usable prompts \(tiers here: mixed, other"):
        draw_prompts(PROMPTS, "none", 1)
    with pytest.raises(RequestError, match="num_prompts=0"):
        draw_prompts(PROMPTS, "mixed", 0)


def test_only_the_first_turn_is_used_and_a_bad_line_is_named(tmp_path) -> None:
    row = {"question_id": 7, "category": "t", "sub_category": "s", "turns": ["first", "second"]}
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(row) + "\n\n" + json.dumps(row) + "\n")
    loaded = load_prompt_set(path)
    assert loaded.name == "set"
    assert [p.text for p in loaded.prompts] == ["first", "first"]
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "turns": []}) + "\n")
    with pytest.raises(RequestError, match=r"set\.jsonl:2"):
        load_prompt_set(path)
    with pytest.raises(RequestError, match="cannot read"):
        load_prompt_set(tmp_path / "missing.jsonl")


def test_a_text_may_hold_any_character_as_it_is(tmp_path) -> None:
    text = "a\u2028b\u2029c\x85d\x0ce"
    row = json.dumps(
        {"question_id": 1, "category": "t", "sub_category": "s", "turns": [text]}, ensure_ascii=False
    ).replace("\\f", "\\u000c")
    path = tmp_path / "set.jsonl"
    path.write_bytes(f"{row}\r\n{row}\n".encode())
    assert [p.text for p in load_prompt_set(path).prompts] == [text, text]


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"question_id": 1, "category": "t", "sub_category": "s", "turns": "x"}']
)
def test_lines_of_another_form_are_named(tmp_path, line: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(line)
    with pytest.raises(RequestError, match=r"set\.jsonl:1"):
        load_prompt_set(path)


def test_the_shipped_prompts_are_whole() -> None:
    prompts = load_prompt_set(demo_prompt_path()).prompts
    for tier in ("low_entropy", "mixed", "high_entropy"):
        assert len(draw_prompts(prompts, tier, 8)) == 8
    assert len({p.question_id for p in prompts}) == len(prompts) == 24
