"""Types of flags that several commands share, for tyro."""

from typing import Annotated, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

__all__ = ["Acceptance", "Biases", "Dtype", "Experts", "Ints", "Model", "Names", "Numerics", "Probe", "Reals"]


def _comma_separated(
    kind: type[int] | type[float] | type[str], metavar: str
) -> PrimitiveConstructorSpec[tuple[int | float | str, ...]]:
    """One argument such as 1,2,3 that becomes a tuple."""

    def parse(arguments: list[str]) -> tuple[int | float | str, ...]:
        return tuple(kind(part.strip()) for part in arguments[0].split(",") if part.strip())

    def show(value: tuple[int | float | str, ...]) -> list[str]:
        return [",".join(str(part) for part in value)]

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=show,
    )


def _biases() -> PrimitiveConstructorSpec[tuple[tuple[int, float], ...]]:
    """One argument such as 17:-100,5:2.5 that becomes pairs of a token id and a number."""

    def parse(arguments: list[str]) -> tuple[tuple[int, float], ...]:
        pairs = (part.partition(":") for part in arguments[0].split(",") if part.strip())
        return tuple((int(token_id), float(bias)) for token_id, _, bias in pairs)

    def show(value: tuple[tuple[int, float], ...]) -> list[str]:
        return [",".join(f"{token_id}:{bias}" for token_id, bias in value)]

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="ID:BIAS,ID:BIAS",
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=show,
    )


Ints = Annotated[tuple[int, ...], _comma_separated(int, "1,2,3")]
Reals = Annotated[tuple[float, ...], _comma_separated(float, "0.9,0.8")]
Biases = Annotated[tuple[tuple[int, float], ...], _biases()]
Names = Annotated[tuple[str, ...], _comma_separated(str, "a,b")]
Dtype = Literal["auto", "float64", "float32", "bfloat16"]
Experts = Literal["auto", "unpacked", "packed"]
Acceptance = Literal["match", "rejection", "block"]
Numerics = Literal["exact", "fast"]
Probe = Literal["auto", "force", "skip"]
Model = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
