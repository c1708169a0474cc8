"""Typed reading of a JSON object from a checkpoint; every failure names the field and the value."""

import json
import math
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError

__all__ = ["Fields", "read_config_json"]


def read_config_json(directory: Path) -> dict[str, Any]:
    """Read ``config.json`` of a checkpoint directory.

    Raises:
        ConfigError: the file is missing, unreadable, not JSON or not an object.
    """
    file = directory / "config.json"
    try:
        raw = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; expected a checkpoint directory") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} holds a JSON {type(raw).__name__}, expected an object")
    return raw


class Fields:
    """One JSON object with its place in the file, read field by field."""

    def __init__(self, raw: dict[str, Any], *, where: str) -> None:
        """``where`` is the dotted prefix of messages, empty or ending in a dot."""
        self._raw = raw
        self.where = where

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._raw.get(name) is not None

    def _value(self, name: str, default: object) -> object:
        value = self._raw.get(name)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{self.where}{name} is missing")
        return default

    def _wrong(self, name: str, value: object, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}{name}={value!r}: expected {expected}")

    def integer(self, name: str, *, default: int | None = None, minimum: int = 1) -> int:
        """Integer field of at least ``minimum``; a missing one is an error without a default."""
        value = self._value(name, default)
        if type(value) is not int or value < minimum:
            raise self._wrong(name, value, f"an integer of at least {minimum}")
        return value

    def optional_integer(self, name: str) -> int | None:
        """Integer field of at least 1; None when absent or null."""
        return self.integer(name) if self.has(name) else None

    def number(self, name: str, *, default: float | None = None) -> float:
        """Finite number field."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(name, value, "a finite number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Finite number field; None when absent or null."""
        return self.number(name) if self.has(name) else None

    def flag(self, name: str, *, default: bool | None = None) -> bool:
        """Boolean field."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, *, default: str | None = None) -> str:
        """String field."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """String field that must be one of ``choices``."""
        value = self.text(name)
        if value not in choices:
            raise self._wrong(name, value, " or ".join(repr(choice) for choice in choices))
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Field that is one integer or a list of integers."""
        value = self._value(name, None)
        items = value if isinstance(value, list) else [value]
        if not all(type(item) is int for item in items):
            raise self._wrong(name, value, "an integer or a list of integers")
        return tuple(items)

    def section(self, name: str) -> "Fields":
        """Nested object."""
        value = self._value(name, None)
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return Fields(value, where=f"{self.where}{name}.")

    def optional_section(self, name: str) -> "Fields | None":
        """Nested object; None when absent or null."""
        return self.section(name) if self.has(name) else None
