"""Outcomes of start-up probes on disk, one file per machine, build, thread count and list of checks.

A file that cannot be read, or is not what this program wrote, is as good as none: the probe runs again.
"""

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

import outrider.ops
from outrider.config import kernel_environment, user_cache_directory
from outrider.ops.native.build import source_key
from outrider.ops.native.library import library
from outrider.ops.probe import OpCheck, ProbeOutcome

__all__ = ["machine_identity", "probe_file", "recall", "remember", "write_json"]

FORMAT = 1  # of the file; what was probed is part of its name

logger = logging.getLogger(__name__)


def machine_identity(device: torch.device) -> dict[str, object]:
    """What the bits of a kernel may depend on besides its operands, as JSON values."""
    return {
        "machine": platform.machine(),
        "processor": _processor() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "build": torch.__config__.show(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "num_threads": torch.get_num_threads(),
        "environment": dict(kernel_environment()),
        "ops": _ops_digest(),
        "native": None if (native := library()) is None else [native.variant, source_key()],
    }


def probe_file(checks: Sequence[OpCheck], dtype: torch.dtype, device: torch.device) -> Path:
    """The file that holds the outcome of these checks on this machine."""
    plan = [[check.name, *check.geometries] for check in checks]
    identity = {"machine": machine_identity(device), "device": str(device), "dtype": str(dtype), "plan": plan}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return user_cache_directory() / "numerics" / f"{digest}.json"


def recall(file: Path, checks: Sequence[OpCheck]) -> ProbeOutcome | None:
    """The outcome a file holds; None when there is none or it is not of these checks."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        logger.info("probe cache %s cannot be read (%s); probing again", file, type(error).__name__)
        return None
    outcome = _outcome(content, {check.name: check.geometries for check in checks})
    if outcome is None:
        logger.info("probe cache %s is damaged; probing again", file)
    return outcome


def _outcome(content: object, offered: Mapping[str, tuple[str, ...]]) -> ProbeOutcome | None:
    """A file's content as an outcome, if every value is one that a probe could have given."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return None
    geometries, lost = content.get("geometries"), content.get("lost")
    if not isinstance(geometries, dict) or not isinstance(lost, dict):
        return None
    if geometries.keys() != offered.keys() or any(geometries[name] not in offered[name] for name in offered):
        return None
    if not lost.keys() <= offered.keys() or not all(isinstance(reason, str) for reason in lost.values()):
        return None
    return ProbeOutcome(geometries=geometries, lost=lost)


def remember(file: Path, outcome: ProbeOutcome) -> None:
    """Write an outcome, whole or not at all; a place that cannot be written only costs the next start a probe."""
    write_json(file, {"format": FORMAT, "geometries": dict(outcome.geometries), "lost": dict(outcome.lost)})


def write_json(file: Path, content: Mapping[str, object]) -> None:
    """Write an object, whole or not at all; a failure is only logged."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=file.parent, suffix=".tmp", delete=False
        ) as temporary:
            json.dump(content, temporary, indent=1)
        os.replace(temporary.name, file)
    except OSError as error:
        logger.info("outcome not kept: %s cannot be written (%s)", file, error.strerror)


@cache
def _ops_digest() -> str:
    """Digest of the sources of the operations: an outcome is of the code that was probed."""
    digest = hashlib.sha256()
    for source in sorted(Path(path) for root in outrider.ops.__path__ for path in Path(root).rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


@cache
def _processor() -> str:
    """Model and flags of the first processor; what Python knows where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    # Names on x86 and on ARM; revisions of one model may round alike, but nothing says so.
    told = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
    told_arm = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features")
    first: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in told + told_arm:
            first.setdefault(name.strip(), value.strip())
    return json.dumps(first, sort_keys=True) if first else platform.processor()
