"""Under which conditions a number was measured, and the append-only file of such numbers."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

from outrider.config import kernel_environment

__all__ = ["LEDGER", "append_row", "environment"]

LEDGER = Path("benchmarks/ledger.jsonl")  # in the working directory
LIBRARIES = ("outrider", "torch", "numpy", "safetensors", "tokenizers", "tiktoken")


def environment() -> dict[str, object]:
    """Time, commit, machine and its load, threads and how they wait, library versions, as JSON values."""
    return {
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "machine": platform.machine(),
        "processor": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "load_average": list(os.getloadavg()),
        "num_threads": torch.get_num_threads(),
        "kernel_variables": dict(kernel_environment()),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in LIBRARIES},
    }


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """Add one JSON object as one line, creating the file and its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _git(*arguments: str) -> str | None:
    """The answer of git about the checkout that this package lies in; None without git or a checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
