"""Docs stay true: links lead somewhere, pages are short, the commands that claim to run do run."""

import re
import shlex
from pathlib import Path

import pytest

from outrider.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
LINK = re.compile(r"\]\(([^)#:]+)\)")
RUN_BLOCK = re.compile(r"```console run\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    broken = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("docs/") and name != "docs/index.md"])
def test_every_page_has_a_tldr_and_a_row_in_the_index(name: str) -> None:
    assert "**TL;DR**" in (ROOT / name).read_text(encoding="utf-8")
    assert f"]({name.removeprefix('docs/')})" in (ROOT / "docs/index.md").read_text(encoding="utf-8")


def test_nothing_is_left_to_fill_in() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*"), *(ROOT / "recipes").rglob("*")]
    texts = [page for page in pages if page.suffix in (".md", ".py", ".toml", ".sh", ".txt", ".yaml")]
    left = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in texts
        for number, line in enumerate(page.read_text(encoding="utf-8").split("\n"), 1)
        if re.search(r"\bFILL\b", line)
    ]
    assert not left


@pytest.mark.parametrize("name", ["k3-small", "k3-small-dspark"])
def test_the_shipped_pair_is_in_the_checkout(name: str) -> None:
    """It is part of the repository: without it, half of what the docs say cannot be checked."""
    assert (ROOT / "models" / name / "config.json").is_file()
    assert list((ROOT / "models" / name).glob("*.safetensors"))


def test_field_reports_name_tests_that_exist() -> None:
    """Each entry that holds or failed is tried by some test file, and by a test of its number where one is named."""
    rows = [
        [cell.strip() for cell in line.split(" | ")]
        for line in (ROOT / "docs/reference/hazards.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| B")
    ]
    assert len(rows) > 40
    for entry, _, verdict, tried_by in rows:
        assert verdict.startswith(("Holds", "Failed", "Not offered")), entry
        names = re.findall(r"`([a-z0-9_/]+)`", tried_by)
        assert names or verdict.startswith("Not offered"), f"{entry} is tried by nothing"
        files = [ROOT / "tests" / f"{name}.py" for name in names]
        assert all(file.is_file() for file in files), f"{entry}: {names}"
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        assert all(f"{number}_" in text for number in re.findall(r": (b\d+)", tried_by)), f"{entry}: {tried_by}"


def test_loading_traps_name_tests_that_exist() -> None:
    page = (ROOT / "docs/reference/drafters.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in page.splitlines() if line.startswith("| L")
    ]
    assert len(rows) == len({trap.partition(":")[0] for trap, _, _ in rows}) > 20
    for trap, _, tried_by in rows:
        for file, names in re.findall(r"`([a-z0-9_/]+)`: ([a-z0-9_, ]+)", tried_by):
            text = (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")
            assert all(f"def {name}(" in text for name in names.split(", ")), f"{trap}: {tried_by}"
        assert "`: test_" in tried_by, f"{trap} is tried by nothing"


def test_front_pages_stay_short() -> None:
    for name, limit in (("README.md", 150), ("CONTRIBUTING.md", 120)):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= limit


COMMANDS = [
    line
    for page in PAGES
    for block in RUN_BLOCK.findall(page.read_text(encoding="utf-8"))
    for line in block.splitlines()
]


@pytest.mark.parametrize("line", COMMANDS)
def test_tagged_commands_run(line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, *arguments = shlex.split(line)
    assert Path(program).name == "outrider"
    assert main(arguments) == 0
    assert capsys.readouterr().out
