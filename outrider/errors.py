"""The exception tree, and allocation failures as part of it.

OutriderError(Exception)
|-- UserError(OutriderError, ValueError)   what a caller can cause and can fix
|   |-- ConfigError                        engine or model configuration
|   |-- CheckpointError                    weight files and their metadata
|   |-- RequestError                       one request
|   |   |-- UnsupportedError               valid, but not offered here
|   |   `-- CapacityError                  valid, but can never fit the budget
|   `-- TokenizerError                     tokenizer files and token ids
`-- EngineFault(OutriderError)             what only the engine can cause

A UserError message names the value, the limit and the remedy. An EngineFault means that state may be
corrupt: it stops the engine and is never caught to continue.
"""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "EngineFault",
    "OutriderError",
    "RequestError",
    "TokenizerError",
    "UnsupportedError",
    "UserError",
    "allocating",
]


class OutriderError(Exception):
    """Root of every exception that Outrider raises on purpose."""


class UserError(OutriderError, ValueError):
    """A value that came from outside is wrong; the message says how to correct it."""


class ConfigError(UserError):
    """A configuration value is out of range, or two values contradict each other."""


class CheckpointError(UserError):
    """A checkpoint file is missing or malformed, or does not match its configuration."""


class RequestError(UserError):
    """A request is malformed or asks for something out of range."""


class UnsupportedError(RequestError):
    """A well-formed request needs a feature that this engine or checkpoint does not offer."""


class CapacityError(RequestError):
    """A well-formed request can never fit the configured memory or context budget."""


class TokenizerError(UserError):
    """Tokenizer files cannot be used, or a token id or token name is not in the vocabulary."""


class EngineFault(OutriderError):
    """An internal invariant is broken; the engine must stop."""


@contextmanager
def allocating(what: str) -> Iterator[None]:
    """Around allocations whose size a caller or a config file chose.

    Raises:
        CapacityError: they failed, whatever torch raised for it.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CapacityError(f"{what} cannot be allocated ({reason}); use smaller sizes or more memory") from error
