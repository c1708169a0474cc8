"""The frozen config tree of an engine. Every value is final: "auto" is resolved before it gets here."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError

__all__ = [
    "CacheConfig",
    "EngineConfig",
    "SchedulerConfig",
    "check_positive",
    "kernel_environment",
    "native_ops_wanted",
    "recorded_steps_wanted",
    "resolve_num_draft_tokens",
    "user_cache_directory",
    "user_models_directory",
]

# Variables by which the CPU libraries under torch choose their kernels, and how their threads wait.
KERNEL_VARIABLES = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "OUTRIDER_")
MAX_VALUE = 2**31 - 1  # products of two budgets still fit the 64 bits of a tensor size


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Paged memory. Recurrent seats are ``SchedulerConfig.max_num_seqs``, a separate number."""

    page_size: int  # tokens per page
    num_pages: int

    def __post_init__(self) -> None:
        check_positive("page_size", self.page_size)
        check_positive("num_pages", self.num_pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Budgets of a round. Seats (sequences) and rows (tokens per target step) are separate."""

    max_num_seqs: int  # recurrent seats = sequences running at once
    max_model_len: int  # prompt and output tokens of one sequence
    max_step_rows: int  # rows of one target step; a larger round is split
    max_prefill_tokens: int  # prompt tokens per round, over all sequences
    chunk_multiple: int  # the KDA chunk; prompts are cut at its absolute multiples only
    oversubscribe: bool = False  # admit on the pages needed now, and preempt the youngest when they run out

    def __post_init__(self) -> None:
        check_positive("max_num_seqs", self.max_num_seqs)
        check_positive("max_model_len", self.max_model_len)
        check_positive("max_step_rows", self.max_step_rows)
        check_positive("max_prefill_tokens", self.max_prefill_tokens)
        check_positive("chunk_multiple", self.chunk_multiple)
        if not isinstance(self.oversubscribe, bool):
            raise ConfigError(f"oversubscribe={self.oversubscribe!r} is neither True nor False")
        for name, value in (
            ("max_step_rows", self.max_step_rows),
            ("max_prefill_tokens", self.max_prefill_tokens),
        ):
            if value < min(self.chunk_multiple, self.max_model_len):
                raise ConfigError(
                    f"{name}={value} is below the prefill chunk of {self.chunk_multiple} tokens, "
                    f"so a long prompt could never advance; raise {name}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that an engine needs beside its models."""

    cache: CacheConfig
    scheduler: SchedulerConfig
    num_draft_tokens: int  # drafts per round at most; 0 = plain decoding
    auto_lengths: bool = False  # draft and verify as much as pays; otherwise all, in every round
    drafter_context: int | None = None  # tokens of context that the drafter takes at most; longer ones get no drafts

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 0:
            raise ConfigError(f"num_draft_tokens={self.num_draft_tokens} is negative; use 0 or more")
        if self.drafter_context is not None:
            check_positive("drafter_context", self.drafter_context)
        if 1 + self.num_draft_tokens > self.scheduler.max_step_rows:
            raise ConfigError(
                f"a verify span of {1 + self.num_draft_tokens} rows exceeds "
                f"max_step_rows={self.scheduler.max_step_rows}; raise it or draft fewer tokens"
            )


def resolve_num_draft_tokens(speculation: str | int, drafter_num_draft_tokens: int) -> int:
    """Drafts per round for ``speculation`` = ``"auto"`` | ``"off"`` | a number.

    A drafter is trained for its block: asking for more rows changes what every row attends to and
    ruins all positions, so that is refused rather than tried.

    Raises:
        ConfigError: the value is unknown, negative or beyond the drafter's block.
    """
    if speculation == "auto":
        return drafter_num_draft_tokens
    if speculation == "off":
        return 0
    if isinstance(speculation, bool) or not isinstance(speculation, int) or speculation < 0:
        raise ConfigError(f"speculation={speculation!r} is unknown; use 'auto', 'off' or a number >= 0")
    if speculation > drafter_num_draft_tokens:
        raise ConfigError(
            f"speculation={speculation} exceeds the {drafter_num_draft_tokens} draft tokens that the "
            "drafter proposes; lower it or use 'auto'"
        )
    return speculation


def check_positive(name: str, value: int) -> None:
    """Raise ConfigError unless a value is an integer from 1 to MAX_VALUE."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} is no integer; use 1 or more")
    if value < 1:
        raise ConfigError(f"{name}={value} is not positive; use 1 or more")
    if value > MAX_VALUE:
        raise ConfigError(f"{name}={value} exceeds {MAX_VALUE}, the most that is offered; lower it")


def user_cache_directory() -> Path:
    """Where this user's rebuildable files go: ``$XDG_CACHE_HOME/outrider``, by default under ``~/.cache``."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    # The base directory specification: a relative path is invalid and is ignored.
    base = Path(chosen) if os.path.isabs(chosen) else Path(os.path.expanduser("~")) / ".cache"
    return base / "outrider"


def user_models_directory() -> Path:
    """Where imported models go: ``$OUTRIDER_HOME/models``, by default beside the rebuildable files of this user.

    Raises:
        ConfigError: the variable holds a relative path.
    """
    chosen = os.environ.get("OUTRIDER_HOME", "")
    if chosen and not os.path.isabs(chosen):
        raise ConfigError(f"OUTRIDER_HOME={chosen!r} is a relative path; give an absolute one")
    return (Path(chosen) if chosen else user_cache_directory()) / "models"


def kernel_environment() -> Mapping[str, str]:
    """Environment variables that may change which kernels the CPU libraries run, sorted by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(KERNEL_VARIABLES)}


def native_ops_wanted() -> bool:
    """Whether the C++ forms of CPU operations may run; ``OUTRIDER_NATIVE=0`` turns all of them off, to compare.

    Raises:
        ConfigError: the variable holds another word.
    """
    return _is_on("OUTRIDER_NATIVE", "use 0 for the torch forms or 1 for the native ones")


def recorded_steps_wanted() -> bool:
    """Whether decode steps may run from recordings; ``OUTRIDER_RECORD=0`` runs each one eagerly, to compare.

    Raises:
        ConfigError: the variable holds another word.
    """
    return _is_on("OUTRIDER_RECORD", "use 0 to run every step eagerly or 1 to record steps")


def _is_on(name: str, remedy: str) -> bool:
    word = os.environ.get(name, "1")
    if word not in ("0", "1"):
        raise ConfigError(f"{name}={word!r} is unknown; {remedy}")
    return word == "1"
