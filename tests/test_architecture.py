"""Limits that no reviewer should have to check by hand."""

import ast
import dataclasses
from pathlib import Path

import pytest

from outrider.cli import arguments

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "outrider").rglob("*.py"))
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

# A new flag is a deliberate edit here, in docs/reference/cli.md and in the changelog.
FLAGS = {
    "Generate": "model drafter speculation prompt prompt_ids chat max_tokens min_tokens temperature top_k top_p min_p "
    "repetition_penalty presence_penalty frequency_penalty logit_bias seed n stop ignore_eos logprobs acceptance json "
    "dtype device experts numerics record_rounds probe threads",
    "Chat": "model drafter system max_tokens temperature top_p seed threads dtype device experts numerics probe",
    "Doctor": "model drafter prompts anchors max_tokens json threads dtype device experts numerics probe",
    "Demo": "model drafter max_tokens threads numerics probe",
    "Bench": "kind",
    "BenchNumerics": "model rows context repeats threads dtype device experts json",
    "BenchAcceptance": "model drafter prompts tiers temperatures rules seed num_prompts max_tokens concurrency threads "
    "speculation dtype device experts numerics probe json",
    "BenchStep": "model random drafter rows slots context repeats synthetic_acceptance threads dtype device experts "
    "numerics probe json plot record",
    "BenchStartup": "model drafter repeats threads dtype device experts numerics probe json record",
    "ImportGguf": "file out dtype",
    "BenchAb": "model drafter prompts tiers concurrency prompt_length num_prompts max_tokens arms repeats max_repeats "
    "time_budget threads speculation drafter_fault dtype device experts numerics probe json record_rounds record",
    "Calibrate": "model drafter prompts held_out num_prompts temperatures rules seed max_tokens concurrency out "
    "json plot threads dtype device experts",
    "Replay": "file policy costs concurrency seed repeats json",
    "Inspect": "path json",
    "Logits": "model prompt_ids json dtype device experts numerics probe threads",
    "Verify": "model drafter prompts max_tokens full inject taps json threads dtype device experts",
}


@pytest.mark.parametrize("name", TREES)
def test_size_docstring_and_public_names(name: str) -> None:
    tree = TREES[name]
    num_lines = len((ROOT / name).read_text(encoding="utf-8").splitlines())
    assert num_lines <= 400, f"{name} has {num_lines} lines; split it"
    assert ast.get_docstring(tree), f"{name} has no module docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 80, f"{name}: {node.name} has {length} lines; split it"
    public = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    named = [ast.unparse(target) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    assert not public or "__all__" in named, f"{name} defines {sorted(public)} but no __all__"


@pytest.mark.parametrize("name", TREES)
def test_no_getattr_with_a_default_and_no_hasattr(name: str) -> None:
    calls = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    banned = [
        call.lineno
        for call in calls
        if call.func.id == "hasattr" or (call.func.id == "getattr" and len(call.args) + len(call.keywords) > 2)
    ]
    assert not banned, f"{name}, lines {banned}: say what the value is instead of asking what it has"


def test_flags_are_frozen() -> None:
    for command, flags in FLAGS.items():
        fields = [field.name for field in dataclasses.fields(getattr(arguments, command))]
        assert fields == flags.split(), f"{command}: adjust the frozen list only together with the docs"


def test_every_flag_is_documented() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    flags = {flag for text in FLAGS.values() for flag in text.split()} - {"kind", "model", "path", "file"}
    assert not [flag for flag in sorted(flags) if f"--{flag.replace('_', '-')}" not in page]
