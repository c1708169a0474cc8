"""The GPU script says what it is, and that there is nothing to check where there is no GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_help_says_that_it_has_not_been_run() -> None:
    done = run("--help")
    assert done.returncode == 0 and "NOT been run" in done.stdout


def test_unknown_arguments_and_pythons_are_refused(tmp_path: Path) -> None:
    for arguments, words in (
        (["--fast"], "unknown argument --fast"),
        (["--python", str(tmp_path / "no")], "no Python"),
    ):
        done = run(*arguments)
        assert done.returncode == 2 and words in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_with_one_line(tmp_path: Path) -> None:
    done = run("--python", sys.executable, "--out", str(tmp_path / "out"))
    assert done.returncode == 3
    assert done.stderr.splitlines() == ["gpu_check: PyTorch sees no CUDA device here; nothing was checked"]
    assert not (tmp_path / "out").exists()
