"""Typed reading of a JSON object from a checkpoint; every failure names the field and the value."""

import json
import math
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError

__all__ = ["MAX_INTEGER", "Fields", "is_finite_number", "read_config_json", "shown"]

MAX_INTEGER = 2**31 - 1  # no count, size or id of a checkpoint comes near it
MAX_SHOWN_CHARS = 80


def shown(value: object) -> str:
    """A value for a message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def is_finite_number(value: object) -> bool:
    """Whether a JSON value is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of more than 308 digits
        return False


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
        return ConfigError(f"{self.where}{name}={shown(value)}: expected {expected}")

    def integer(self, name: str, *, default: int | None = None, minimum: int = 1) -> int:
        """Integer field from ``minimum`` to MAX_INTEGER; a missing one is an error without a default."""
        value = self._value(name, default)
        if type(value) is not int or not minimum <= value <= MAX_INTEGER:
            raise self._wrong(name, value, f"an integer of at least {minimum} and at most {MAX_INTEGER}")
        return value

    def optional_integer(self, name: str) -> int | None:
        """Integer field of at least 1; None when absent or null."""
        return self.integer(name) if self.has(name) else None

    def number(self, name: str, *, default: float | None = None) -> float:
        """Finite number field."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or not is_finite_number(value):
            raise self._wrong(name, value, "a finite number")
        return float(value)

    def positive(self, name: str, *, default: float | None = None) -> float:
        """Finite number field above 0, such as a divisor or an epsilon."""
        value = self.number(name, default=default)
        if value <= 0:
            raise self._wrong(name, value, "a number above 0")
        return value

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
