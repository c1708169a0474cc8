"""What is compared: an arm is an engine, with or without a drafter, and how it speculates."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.errors import ConfigError

__all__ = ["AUTO", "OFF", "PLAIN", "SPEC", "ArmSpec", "fixed_arm", "main_arm", "parse_arm", "parse_arms"]

PLAIN, AUTO, OFF, SPEC = "plain", "auto", "off", "spec"
FIXED = re.compile(r"fixed(\d{1,3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSpec:
    """One arm: `plain` has no drafter; `off` has one that nobody uses, so taps and context still cost."""

    name: str
    with_drafter: bool
    speculation: str | int = "off"  # of the engine
    drafts: bool = False  # whether its requests want drafts

    @property
    def must_draft(self) -> bool:
        """Whether every cell must have verified a draft; `auto` may find that none pays."""
        return self.drafts and isinstance(self.speculation, int)


def fixed_arm(num_drafts: int, name: str = "") -> ArmSpec:
    """An arm that verifies `num_drafts` drafts in every round."""
    return ArmSpec(name=name or f"fixed{num_drafts}", with_drafter=True, speculation=num_drafts, drafts=True)


def parse_arm(name: str, *, spec: str | int = AUTO) -> ArmSpec:
    """The arm of a name: plain, off, auto, fixedK.

    Args:
        name: as on the command line.
        spec: what the arm `spec` of older command lines runs: auto or a number of drafts.

    Raises:
        ConfigError: there is no such arm, or it would have no drafts.
    """
    if name == PLAIN:
        return ArmSpec(name=PLAIN, with_drafter=False)
    if name == OFF:
        return ArmSpec(name=OFF, with_drafter=True, speculation=AUTO)
    if name == SPEC:
        if spec in ("off", 0):
            raise ConfigError(f"--speculation {spec} leaves the arm spec without drafts; use --arms plain,off")
        if isinstance(spec, int):
            return fixed_arm(spec, SPEC)
        if spec != AUTO:
            raise ConfigError(f"--speculation {spec!r} is unknown; use auto or a number of drafts")
        return ArmSpec(name=SPEC, with_drafter=True, speculation=AUTO, drafts=True)
    if name == AUTO:
        return ArmSpec(name=AUTO, with_drafter=True, speculation=AUTO, drafts=True)
    match = FIXED.fullmatch(name)
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"arm {name!r} is unknown; use plain, off, auto, or fixedK with K drafts, such as fixed7")
    return fixed_arm(int(match[1]))


def parse_arms(names: Sequence[str], *, spec: str | int = AUTO) -> tuple[ArmSpec, ...]:
    """The arms of a comparison, each once.

    Raises:
        ConfigError: an arm is unknown, named twice, or there is none.
    """
    arms = tuple(parse_arm(name, spec=spec) for name in names)
    if not arms or len({arm.name for arm in arms}) != len(arms):
        raise ConfigError(f"--arms {','.join(names)!r}: name at least one arm, and each once")
    return arms


def main_arm(names: Iterable[str]) -> str | None:
    """The arm whose ratio over `plain` is that of the cell; None if there is none."""
    present = set(names)
    return next((name for name in (AUTO, SPEC) if name in present and PLAIN in present), None)
