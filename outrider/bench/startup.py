"""Time from nothing to the first token, and resident memory against what must be resident."""

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from outrider.errors import EngineFault
from outrider.models.dspark.config_json import read_config as read_drafter_config
from outrider.models.dspark.model import DSparkModel
from outrider.models.inspect import describe
from outrider.models.kimi_k3.model import cache_layouts
from outrider.models.layers import Build, shapes_only

__all__ = ["NeededBytes", "Start", "needed_bytes", "start_once", "startup_table", "startup_to_json"]

NUM_PROMPT_TOKENS = 16
MAX_REPORT = 2000  # characters of a failed start's own words


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededBytes:
    """What an engine must hold: weights in the form in which it holds them, and its caches."""

    target: int
    drafter: int
    caches: int  # of the target
    drafter_context: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.target + self.drafter + self.caches + self.drafter_context


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start in a process of its own; seconds of its parts, in order, and resident bytes by kind."""

    interpreter_s: float  # from the call of the system until our code runs
    import_s: float
    load_s: float
    first_token_s: float  # from loaded to the token
    imported: Mapping[str, int]  # before loading
    running: Mapping[str, int]  # after the token
    derived_bytes: int  # packed copies and tables that the engine made of the weights
    num_slots: int
    num_cache_tokens: int
    num_log_rows: int

    @property
    def to_first_token_s(self) -> float:
        """From the begin of loading to the first token: what a process that runs already waits for."""
        return self.load_s + self.first_token_s

    @property
    def total_s(self) -> float:
        """What a user at a shell waits for."""
        return self.interpreter_s + self.import_s + self.to_first_token_s


def start_once(options: Mapping[str, object], vocab_size: int) -> Start:
    """Start an engine in a new process, let it give one token, and wait for its end.

    Args:
        options: `model`, `drafter`, `threads`, `dtype`, `device`, `experts`, `numerics`, `probe`.
        vocab_size: the prompt is random ids below it.

    Raises:
        EngineFault: the process failed; its last words are in the message.
    """
    prompt = [random.Random(0).randrange(vocab_size) for _ in range(NUM_PROMPT_TOKENS)]
    command = [sys.executable, "-m", "outrider.bench.first_token", json.dumps({**options, "prompt": prompt})]
    called_s = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EngineFault(f"a start ended with status {done.returncode}: {done.stderr.strip()[-MAX_REPORT:]}")
    report = json.loads(done.stdout.strip().splitlines()[-1])
    if report["num_tokens"] != 1:
        raise EngineFault(f"a start gave {report['num_tokens']} tokens instead of one")
    return Start(
        interpreter_s=report["begin_s"] - called_s,
        import_s=report["imported_s"] - report["begin_s"],
        load_s=report["loaded_s"] - report["imported_s"],
        first_token_s=report["first_token_s"] - report["loaded_s"],
        imported=report["imported"],
        running=report["running"],
        derived_bytes=report["derived_bytes"],
        num_slots=report["num_slots"],
        num_cache_tokens=report["num_cache_tokens"],
        num_log_rows=report["num_log_rows"],
    )


def needed_bytes(model: Path, drafter: Path | None, start: Start, *, dtype: torch.dtype, unpacked: bool) -> NeededBytes:
    """Bytes of weights and caches, from the checkpoints' headers and the engine's budgets.

    Args:
        model: target checkpoint.
        drafter: its drafter, if any.
        start: whose budgets count.
        dtype: compute dtype.
        unpacked: routed experts are held in the compute dtype.
    """
    report = describe(model)
    # Files hold bfloat16 and, for a few small tensors, float32; what is held has the compute dtype.
    sizes = {
        kind.name: kind.num_bytes
        if kind.name == "routed experts" and not unpacked
        else kind.num_parameters * dtype.itemsize
        for kind in report.kinds
    }
    latents, recurrent = cache_layouts(report.config, Build(dtype=dtype, device=torch.device("meta")))
    caches = (
        start.num_cache_tokens * latents.bytes_per_token
        + start.num_slots * recurrent.bytes_per_slot
        + start.num_log_rows * recurrent.log_bytes_per_row
    )
    drafter_bytes = context_bytes = 0
    if drafter is not None:
        config = read_drafter_config(drafter)
        with shapes_only():
            drafter_bytes = DSparkModel(config).num_parameters() * dtype.itemsize
        context_bytes = start.num_cache_tokens * config.context_row_size * dtype.itemsize
    return NeededBytes(target=sum(sizes.values()), drafter=drafter_bytes, caches=caches, drafter_context=context_bytes)


def startup_table(starts: Sequence[Start], needed: NeededBytes) -> Table:
    """Medians over the starts, and memory of the last one."""
    table = Table(title="From nothing to the first token", title_justify="left")
    table.add_column("what")
    table.add_column("median", justify="right")
    table.add_column("least", justify="right")
    for title, values in (
        ("interpreter", [start.interpreter_s for start in starts]),
        ("imports", [start.import_s for start in starts]),
        ("load", [start.load_s for start in starts]),
        ("prompt and first token", [start.first_token_s for start in starts]),
        ("load to first token", [start.to_first_token_s for start in starts]),
        ("all", [start.total_s for start in starts]),
    ):
        table.add_row(title, f"{statistics.median(values):.2f} s", f"{min(values):.2f} s")
    table.add_section()
    last = starts[-1]
    rows = {
        "weights of the target": needed.target,
        "weights of the drafter": needed.drafter,
        "caches": needed.caches,
        "drafter context": needed.drafter_context,
        "weights and caches": needed.total,
        "packed copies and tables": last.derived_bytes,
    }
    rows |= {f"resident after imports, {kind}": size for kind, size in last.imported.items()}
    rows |= {f"resident with the first token, {kind}": size for kind, size in last.running.items()}
    if last.running:
        rows["grown while loading and running, total"] = last.running["total"] - last.imported["total"]
    for title, size in rows.items():
        table.add_row(title, f"{size / 1e6:.1f} MB")
    return table


def startup_to_json(starts: Sequence[Start], needed: NeededBytes) -> dict[str, object]:
    """Every start, its sums and the bytes that are needed."""
    return {
        "starts": [
            {
                "interpreter_s": start.interpreter_s,
                "import_s": start.import_s,
                "load_s": start.load_s,
                "first_token_s": start.first_token_s,
                "to_first_token_s": start.to_first_token_s,
                "total_s": start.total_s,
                "derived_bytes": start.derived_bytes,
                "resident_imported": dict(start.imported),
                "resident_running": dict(start.running),
            }
            for start in starts
        ],
        "needed_bytes": {
            "target": needed.target,
            "drafter": needed.drafter,
            "caches": needed.caches,
            "drafter_context": needed.drafter_context,
            "total": needed.total,
        },
    }
