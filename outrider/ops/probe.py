"""Whether an operation gives a row the same bits alone and in company, and with which geometry.

A check runs one operation at the sizes of a loaded model: each of three rows alone, then among 2 to 33
rows, first, in the middle and last, while the other rows hold random values, NaN or the largest numbers.
The first geometry whose bits never differ is taken. It samples: it covers neither every value nor every
row count.

Dims: N rows of a call, F features of a row (any shape).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product

import torch

__all__ = [
    "CASES",
    "FEW_CASES",
    "FIXED",
    "NUM_ROWS",
    "OpCheck",
    "ProbeOutcome",
    "RowFunction",
    "company_violation",
    "fixed_check",
    "random_rows",
    "run_checks",
    "same_bits",
]

RowFunction = Callable[[torch.Tensor], torch.Tensor]  # [N, F] -> [N, ...], row n from row n alone

ROW_COUNTS = (2, 3, 5, 8, 16, 17, 33)  # 16: a whole tile, which nothing pads
FILLS = ("random", "nan", "huge")
# Rows of a call and what the rows that are not followed hold. The few are for costly operations: every number of
# rows once, the contents in turn (no kernel looks at values; they show what leaks from row to row).
CASES = tuple(product(ROW_COUNTS, FILLS))
FEW_CASES = tuple(zip(ROW_COUNTS, cycle(FILLS), strict=False))
NUM_ROWS = 3  # rows that are followed
FIXED = "fixed"  # the name of an only geometry

_BIT_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCheck:
    """One operation of a model and the geometries it may have."""

    name: str  # unique in a list of checks; carries the sizes
    geometries: tuple[str, ...]  # ascending in cost; the first is the default
    find_violation: Callable[[str], str | None]  # what differs with this geometry, None if nothing does


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOutcome:
    """What a list of checks found, by name of the check."""

    geometries: Mapping[str, str]
    lost: Mapping[str, str]  # where no geometry holds: what differs with the default, which is used


def fixed_check(name: str, find_violation: Callable[[], str | None]) -> OpCheck:
    """A check of an operation that has one geometry only."""
    return OpCheck(name=name, geometries=(FIXED,), find_violation=lambda _: find_violation())


@torch.inference_mode()
def run_checks(checks: Iterable[OpCheck]) -> ProbeOutcome:
    """The first geometry of each check that holds, or the default and what is lost with it."""
    chosen, lost = {}, {}
    for check in checks:
        assert check.name not in chosen, f"two checks are named {check.name!r}"
        chosen[check.name] = check.geometries[0]
        violation = check.find_violation(check.geometries[0])
        if violation is None:
            continue
        for geometry in check.geometries[1:]:
            if check.find_violation(geometry) is None:
                chosen[check.name] = geometry
                break
        else:
            lost[check.name] = violation
    return ProbeOutcome(geometries=chosen, lost=lost)


def random_rows(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 1) -> torch.Tensor:
    """Standard normal values, the same on every machine and device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors agree bit for bit: the sign of zero counts, and NaN may equal NaN."""
    bits = _BIT_TYPES[left.dtype.itemsize]
    return left.dtype == right.dtype and torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


def company_violation(
    function: RowFunction,
    rows_3F: torch.Tensor,
    *,
    alone: RowFunction | None = None,
    cases: Sequence[tuple[int, str]] = CASES,
) -> str | None:
    """The first place where a row has other bits than alone; None if there is none.

    Args:
        function: what is checked.
        rows_3F: three rows of ordinary values.
        alone: gives the expected bits of one row, where another form must agree; None takes ``function``.
        cases: rows of a call and content of the others, of CASES.
    """
    single = function if alone is None else alone
    expected = [single(rows_3F[row : row + 1])[0] for row in range(NUM_ROWS)]
    if alone is not None:
        for row in range(NUM_ROWS):
            if not same_bits(function(rows_3F[row : row + 1])[0], expected[row]):
                return "one row alone differs between two forms"
    for num_rows, fill in cases:
        others_NF = _filler(rows_3F, num_rows, fill)
        for places in _placements(num_rows):
            batch_NF = others_NF.clone()
            for offset, row in places.items():
                batch_NF[offset] = rows_3F[row]
            out_N = function(batch_NF)
            for offset, row in places.items():
                if not same_bits(out_N[offset], expected[row]):
                    return f"row {offset} of {num_rows} differs from the row alone ({fill} neighbours)"
    return None


def _filler(rows_3F: torch.Tensor, num_rows: int, fill: str) -> torch.Tensor:
    """Rows for the company."""
    shape = (num_rows, *rows_3F.shape[1:])
    if fill == "random":
        return 3 * random_rows(*shape, dtype=rows_3F.dtype, device=rows_3F.device, seed=num_rows)
    value = {"nan": float("nan"), "huge": torch.finfo(rows_3F.dtype).max}[fill]
    return rows_3F.new_full(shape, value)


def _placements(num_rows: int) -> Iterator[dict[int, int]]:
    """Where the followed rows stand, as offset -> row: at once, or one by one in a small call."""
    places = {0: 0, num_rows // 2: 1, num_rows - 1: 2}
    if num_rows > NUM_ROWS:
        yield places
    else:
        yield from ({offset: row} for offset, row in places.items())
