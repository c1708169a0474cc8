"""Rotary position embedding, plain or scaled: linear, by parts (Llama 3), YaRN.

Dims: T rows, H heads, K head width, P positions, F = rotary width / 2 frequencies.
"""

import math
from dataclasses import dataclass

import torch

from outrider.errors import ConfigError
from outrider.ops.invariant import island_dtype

__all__ = [
    "LinearScaling",
    "Llama3Scaling",
    "RopeScaling",
    "RotaryTable",
    "YarnScaling",
    "apply_half",
    "apply_half_reference",
    "rotary_frequencies",
    "rotary_table",
    "yarn_magnitude",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN numbers under the names of the published configs."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: derived from factor and the two mscales
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # round the ends of the ramp outwards to whole dims


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All positions divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Long waves divided by a factor, short ones kept, a smooth change between; names of the published configs."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryTable:
    """Cosine and sine of every absolute position, attention factor multiplied in."""

    cos_PF: torch.Tensor
    sin_PF: torch.Tensor


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """``0.1 mscale ln(factor) + 1``, or 1 for factors up to 1. Source: dspark section 1.11."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def rotary_frequencies(rotary_dim: int, theta: float, scaling: RopeScaling | None = None) -> tuple[torch.Tensor, float]:
    """Inverse frequencies ``[F]`` in float64 and the factor on cosine and sine."""
    if rotary_dim % 2:
        raise ConfigError(f"rotary width {rotary_dim} is odd; use an even head width")
    exponent_F = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    plain_F = 1.0 / theta**exponent_F
    match scaling:
        case None:
            return plain_F, 1.0
        case LinearScaling():
            return plain_F / scaling.factor, 1.0
        case Llama3Scaling():
            return _by_parts(plain_F, scaling), 1.0
        case YarnScaling():
            return _yarn(plain_F, theta, scaling), _attention_factor(scaling)


def _by_parts(plain_F: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Llama 3.1's frequencies, as in transformers: a wave counts its turns within the original context."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns_F = scaling.original_max_positions * plain_F / (2 * math.pi)
    share_F = ((turns_F - low) / (high - low)).clamp(0.0, 1.0)  # 1 = as trained
    return plain_F * share_F + plain_F / scaling.factor * (1.0 - share_F)


def _yarn(plain_F: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    """Source: dspark section 1.11 (YaRN as in transformers).

    Frequencies that turn more than ``beta_fast`` times within the original context keep their speed, those below
    ``beta_slow`` turns are slowed by ``factor``, with a linear ramp between.
    """
    rotary_dim = 2 * plain_F.shape[0]

    def dim_of(num_rotations: float) -> float:
        turns = scaling.original_max_positions / (num_rotations * 2 * math.pi)
        return rotary_dim * math.log(turns) / (2 * math.log(theta))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    span = high - low if high != low else 0.001  # transformers' guard against a zero-width ramp
    ramp_F = ((torch.arange(rotary_dim // 2, dtype=torch.float64) - low) / span).clamp(0.0, 1.0)
    return plain_F * (1.0 - ramp_F) + plain_F / scaling.factor * ramp_F


def _attention_factor(scaling: YarnScaling) -> float:
    """Factor on cosine and sine; with both mscales given, their ratio."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_magnitude(scaling.factor, scaling.mscale) / yarn_magnitude(scaling.factor, scaling.mscale_all_dim)
    return yarn_magnitude(scaling.factor)


def rotary_table(
    num_positions: int,
    rotary_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> RotaryTable:
    """Table of positions ``0..num_positions - 1``; built once, so a row reads it by position.

    Angles are formed in float64 and rounded once to ``dtype`` (an island dtype).
    """
    inverse_F, factor = rotary_frequencies(rotary_dim, theta, scaling)
    angle_PF = torch.arange(num_positions, dtype=torch.float64)[:, None] * inverse_F
    return RotaryTable(cos_PF=(angle_PF.cos() * factor).to(dtype), sin_PF=(angle_PF.sin() * factor).to(dtype))


def apply_half(x_THK: torch.Tensor, table: RotaryTable, positions_T: torch.Tensor) -> torch.Tensor:
    """Rotate pairs ``(i, i + K/2)`` in the island dtype, one rounding.

    Args:
        x_THK: ``[T, H, K]``, K = 2 F; more leading dims are allowed when ``positions_T`` has them.
        table: from ``rotary_table``.
        positions_T: int64 absolute positions.
    """
    cos, sin = _rows_of(table, positions_T)
    first, second = x_THK.to(island_dtype(x_THK.dtype)).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_THK.dtype)


def _rows_of(table: RotaryTable, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine rows with a broadcast head dim."""
    return table.cos_PF[positions_T][..., None, :], table.sin_PF[positions_T][..., None, :]


def apply_half_reference(x_THK: torch.Tensor, table: RotaryTable, positions_T: torch.Tensor) -> torch.Tensor:
    """The rotation as a complex product, in float64."""
    first, second = x_THK.double().chunk(2, dim=-1)
    turn = torch.complex(table.cos_PF[positions_T].double(), table.sin_PF[positions_T].double())[..., None, :]
    turned = torch.complex(first.contiguous(), second.contiguous()) * turn
    return torch.cat([turned.real, turned.imag], dim=-1).to(x_THK.dtype)
