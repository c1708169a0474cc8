"""How a model computes: exact or fast, what the start-up probe chose, and what it could not keep."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch

from outrider.errors import ConfigError
from outrider.models.kernels import Kernels
from outrider.models.probe_cache import probe_file, recall, remember
from outrider.ops.linear import LinearFunction, LinearTable, linear, tile_candidates
from outrider.ops.native.activation import NativeGlu
from outrider.ops.native.library import library_for
from outrider.ops.native.linear import PackedLinear
from outrider.ops.native.norm import NativeNorm
from outrider.ops.native.rows import native_rows
from outrider.ops.probe import OpCheck, ProbeOutcome, run_checks
from outrider.ops.probe_ops import linear_check, probed_shape, tiles_named

__all__ = [
    "UNPROBED",
    "NumericsChoice",
    "NumericsMode",
    "NumericsReport",
    "ProbeMode",
    "chosen_linear",
    "joined_report",
    "linear_checks",
    "resolve_numerics",
    "with_native_rows",
]

NumericsMode = Literal["exact", "fast"]
ProbeMode = Literal["auto", "force", "skip"]
ProbeSource = Literal["probed", "cached", "skipped", "none"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsChoice:
    """What a caller asks for.

    Raises:
        ConfigError: a word is unknown.
    """

    mode: NumericsMode = "exact"
    probe: ProbeMode = "auto"  # auto takes the outcome of an earlier start, force probes anyway, skip never does

    def __post_init__(self) -> None:
        if self.mode not in ("exact", "fast"):
            raise ConfigError(f"numerics={self.mode!r} is unknown; use exact or fast")
        if self.probe not in ("auto", "force", "skip"):
            raise ConfigError(f"probe={self.probe!r} is unknown; use auto, force or skip")


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsReport:
    """How a loaded model computes."""

    mode: NumericsMode
    source: ProbeSource  # "none": nothing to probe, as nothing is promised
    geometries: Mapping[str, str]  # check -> geometry in use
    replaced: Mapping[str, str]  # the part of them that is not the default
    lost: Mapping[str, str]  # check -> what differs: a row's bits may depend on its company there

    @property
    def promises_identity(self) -> bool:
        """Whether output is promised not to depend on speculation and company."""
        return self.mode == "exact" and not self.lost

    def summary(self) -> str:
        """One line for a person."""
        if self.mode == "fast":
            return "numerics fast: output may depend on speculation and on the other requests"
        if self.lost:
            what = "; ".join(f"{name}: {reason}" for name, reason in self.lost.items())
            return f"numerics exact, but NOT KEPT on this machine for {what}"
        if self.source == "skipped":
            return "numerics exact, not probed on this machine"
        changed = "".join(f"; {name}: {geometry}" for name, geometry in self.replaced.items())
        return f"numerics exact, {len(self.geometries)} operations {self.source}{changed}"


UNPROBED = NumericsReport(mode="exact", source="skipped", geometries={}, replaced={}, lost={})


def resolve_numerics(
    checks: Sequence[OpCheck], choice: NumericsChoice, *, dtype: torch.dtype, device: torch.device
) -> NumericsReport:
    """Probe, or recall an earlier probe, as ``choice`` asks; logs what a user should know.

    Args:
        checks: every operation of the model that a row passes through.
        choice: what the caller wants.
        dtype: compute dtype.
        device: where the model runs.
    """
    if choice.mode == "fast":
        report = NumericsReport(mode="fast", source="none", geometries={}, replaced={}, lost={})
        logger.info("%s", report.summary())
        return report
    outcome, source = _outcome(checks, choice.probe, dtype, device)
    defaults = {check.name: check.geometries[0] for check in checks}
    report = NumericsReport(
        mode="exact",
        source=source,
        geometries=MappingProxyType(dict(outcome.geometries)),
        replaced=MappingProxyType({name: g for name, g in outcome.geometries.items() if g != defaults[name]}),
        lost=MappingProxyType(dict(outcome.lost)),
    )
    level = logging.WARNING if report.lost else logging.INFO if report.replaced else logging.DEBUG
    logger.log(level, "%s", report.summary())
    return report


def _outcome(
    checks: Sequence[OpCheck], probe: ProbeMode, dtype: torch.dtype, device: torch.device
) -> tuple[ProbeOutcome, ProbeSource]:
    if probe == "skip":
        defaults = {check.name: check.geometries[0] for check in checks}
        return ProbeOutcome(geometries=defaults, lost={}), "skipped"
    file = probe_file(checks, dtype, device)
    recalled = recall(file, checks) if probe == "auto" else None
    if recalled is not None:
        return recalled, "cached"
    outcome = run_checks(checks)
    remember(file, outcome)
    return outcome, "probed"


def linear_checks(
    label: str, shapes_OI: Iterable[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> tuple[OpCheck, ...]:
    """One check for each shape that stands for some of the weights."""
    shapes = sorted({probed_shape(*shape) for shape in shapes_OI})
    native = library_for(dtype, device)
    return tuple(linear_check(_name(label, shape), shape, dtype, device, native) for shape in shapes)


def chosen_linear(
    label: str,
    shapes_OI: Iterable[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    geometries: Mapping[str, str],
) -> LinearFunction:
    """The product of rows with these weights, each weight in the geometry that its check found."""
    found = {shape: geometries[_name(label, probed_shape(*shape))] for shape in sorted(set(shapes_OI))}
    native = library_for(dtype, device)
    packed = frozenset(s for s, name in found.items() if native is not None and name == native.geometry)
    default = tile_candidates(dtype)[0]
    tiles = {shape: tiles_named(name, dtype) for shape, name in found.items() if shape not in packed}
    replaced = {shape: tile for shape, tile in tiles.items() if tile != default}
    others: LinearFunction = LinearTable(tiles=replaced, dtype=dtype) if replaced else linear
    return others if native is None or not packed else PackedLinear(native, others, packed)


def with_native_rows(
    kernels: Kernels,
    *,
    norms: Iterable[str],
    mixes: Iterable[str],
    activations: Iterable[str],
    dtype: torch.dtype,
    device: torch.device,
    geometries: Mapping[str, str],
) -> Kernels:
    """Native norms, mixes and activations, each where all checks of its kind found the native form to hold.

    Args:
        kernels: what the rest runs.
        norms: names of the checks of norms.
        mixes: of residual mixes.
        activations: of gated activations.
        dtype: compute dtype.
        device: where the model runs.
        geometries: what the checks found.
    """
    native = library_for(dtype, device)
    if native is None:
        return kernels

    def hold(names: Iterable[str]) -> bool:
        return all(geometries[name] == native.geometry for name in names)

    rows = NativeNorm(native)
    return replace(
        kernels,
        rows=native_rows(native),
        norm=rows.rms_norm if hold(norms) else kernels.norm,
        mix_norm=rows.mix_norm if hold(mixes) else kernels.mix_norm,
        glu=NativeGlu(native) if hold(activations) else kernels.glu,
    )


def _name(label: str, shape_OI: tuple[int, int]) -> str:
    return f"{label} {shape_OI[0]}x{shape_OI[1]}"


def joined_report(first: NumericsReport, second: NumericsReport) -> NumericsReport:
    """The report of two models that run together, such as a target and its drafter."""
    return NumericsReport(
        mode=first.mode,
        source="probed" if "probed" in (first.source, second.source) else first.source,
        geometries={**first.geometries, **second.geometries},
        replaced={**first.replaced, **second.replaced},
        lost={**first.lost, **second.lost},
    )
