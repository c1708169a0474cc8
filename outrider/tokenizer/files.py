"""Checked reading of the JSON files of a checkpoint."""

import json
from collections.abc import Sequence
from pathlib import Path

from outrider.errors import TokenizerError

__all__ = ["eos_names_of", "ids_of", "read_json_object"]


def read_json_object(path: Path) -> dict[str, object]:
    """The JSON object in `path`; raises TokenizerError when it is missing or is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path.name} cannot be read as JSON ({error}); restore the file") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path.name} holds {type(content).__name__}, not a JSON object; restore the file")
    return content


def eos_names_of(tokenizer_config: dict[str, object]) -> list[str]:
    """The `eos_token` of a tokenizer_config.json: a name, an object with `content`, or nothing."""
    eos = tokenizer_config.get("eos_token")
    if isinstance(eos, dict):
        eos = eos.get("content")
    if eos is None:
        return []
    if not isinstance(eos, str):
        raise TokenizerError(f"eos_token={eos!r} in tokenizer_config.json is not a token name; correct it")
    return [eos]


def ids_of(value: object, source: str, name: str = "eos_token_id") -> list[int]:
    """Token ids given as one int, a list of ints or None; raises TokenizerError naming `source` otherwise."""
    if value is None:
        return []
    values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    ids = [item for item in values if isinstance(item, int) and not isinstance(item, bool)]
    if len(ids) != len(values):
        raise TokenizerError(f"{name}={value!r} in {source} is not an int or a list of ints; correct it")
    return ids
