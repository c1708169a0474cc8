"""A GGUF file by field and tensor name, read with the ``gguf`` package; every failure names the file."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from outrider.errors import CheckpointError, UnsupportedError

__all__ = ["READABLE_TYPES", "GgufFile"]

# Storage types that are turned into numbers; the quantised ones hold blocks of 32 with their scale.
READABLE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")

Value = TypeVar("Value")


class GgufFile:
    """Header and memory-mapped data of one file.

    Args:
        path: the file.

    Raises:
        UnsupportedError: the ``gguf`` package is not installed.
        CheckpointError: the file is missing, truncated or no GGUF file.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf  # noqa: PLC0415 - an optional dependency, needed nowhere else
            from gguf.quants import dequantize  # noqa: PLC0415
        except ImportError as error:
            raise UnsupportedError(
                "reading GGUF files needs the package gguf, which is not installed; pip install gguf"
            ) from error
        self.path = path
        if not path.is_file():
            raise CheckpointError(f"{path} is no file; give a .gguf file")
        # The package raises whatever numpy or struct raise on a damaged file.
        reader = self._checked(lambda: gguf.GGUFReader(path), "cannot be read")
        self._dequantize: Callable[[Any, Any], Any] = dequantize
        self._fields: dict[str, Any] = dict(reader.fields)
        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        if len(self._tensors) != len(reader.tensors):
            raise CheckpointError(f"{path.name} names a tensor twice; download it again")
        for tensor in reader.tensors:
            if tensor.tensor_type.name not in READABLE_TYPES:
                raise UnsupportedError(
                    f"{path.name}: tensor {tensor.name!r} is stored as {tensor.tensor_type.name}; imported are "
                    f"{', '.join(READABLE_TYPES)}: use a file in one of them"
                )

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """In file order."""
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Dims of a tensor, rows first, as torch has them (GGUF lists the innermost first)."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor as stored."""
        return int(self._tensors[name].n_bytes)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor as numbers, rounded once from the float32 value of its stored form."""
        stored = self._tensors[name]
        values = self._checked(
            lambda: self._dequantize(stored.data, stored.tensor_type), f"has damaged data of tensor {name!r}"
        )
        return torch.from_numpy(values.astype("float32")).reshape(self.shape(name)).to(dtype)

    def integer(self, name: str, default: int | None = None) -> int:
        """Integer field of at least 1."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.path.name}: {name}={value!r} is not an integer of 1 or more")
        return value

    def token_id(self, name: str) -> int | None:
        """Id field; None when absent."""
        value = self._contents(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise CheckpointError(f"{self.path.name}: {name}={value!r} is no token id")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Number field above 0."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(f"{self.path.name}: {name}={value!r} is not a number above 0")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        """Text field."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.path.name}: {name}={value!r} is not text")
        return value

    def optional_text(self, name: str) -> str | None:
        """Text field; None when absent."""
        return self.text(name) if name in self._fields else None

    def items(self, name: str, kind: type[Value]) -> Sequence[Value]:
        """List field whose items are all of one kind."""
        values = self._value(name, None)
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise CheckpointError(f"{self.path.name}: {name} is not a list of {kind.__name__}")
        return values

    def has(self, name: str) -> bool:
        """Whether there is such a field."""
        return name in self._fields

    def _value(self, name: str, default: object) -> Any:
        value = self._contents(name)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.path.name} has no field {name}; it is no complete model file")
        return value

    def _contents(self, name: str) -> Any:
        field = self._fields.get(name)
        return None if field is None else self._checked(field.contents, f"has a damaged field {name}")

    def _checked(self, read: Callable[[], Value], what: str) -> Value:
        try:
            return read()
        except MemoryError:
            raise
        except Exception as error:
            raise CheckpointError(f"{self.path.name} {what} ({error}); download it again") from error
