"""What a checkpoint directory says about vocabulary, dtype and context, beside its weights."""

import logging
from pathlib import Path

import torch

from outrider.errors import ConfigError
from outrider.models.fields import Fields, read_config_json
from outrider.tokenizer import Tokenizer, load_tokenizer
from outrider.tokenizer.files import ids_of

__all__ = ["load_vocabulary", "resolve_device", "resolve_dtype", "resolve_model_len"]

logger = logging.getLogger(__name__)

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
TOKENIZER_FILES = ("tiktoken.model", "tokenizer.json")
# A released model allows a million positions; memory for that is a choice, not a default.
MAX_DEFAULT_MODEL_LEN = 8192


def load_vocabulary(model_path: Path) -> tuple[Tokenizer | None, frozenset[int]]:
    """The tokenizer, if the directory holds one, and the ids that end a request.

    Raises:
        UserError: files are malformed.
    """
    declared = read_config_json(model_path).get("eos_token_id")
    if declared is None:  # the wrapper wins, as in the model's own config
        declared = _text_fields(model_path).get("eos_token_id")
    eos_ids = ids_of(declared, "config.json")
    if not any((model_path / name).is_file() for name in TOKENIZER_FILES):
        logger.info("%s holds no tokenizer: token ids only", model_path)
        return None, frozenset(eos_ids)
    tokenizer = load_tokenizer(model_path, eos_token_id=eos_ids)
    return tokenizer, tokenizer.stop_token_ids


def resolve_dtype(model_path: Path, dtype: str | None) -> torch.dtype:
    """The compute dtype by name; None takes the checkpoint's, bfloat16 when it names none.

    Raises:
        ConfigError: no such dtype is offered.
    """
    places = (read_config_json(model_path), _text_fields(model_path))
    declared = (place.get(key) for place in places for key in ("dtype", "torch_dtype"))
    name = next((str(value) for value in declared if value), "bfloat16") if dtype is None else dtype
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r} is not offered; use {', '.join(DTYPES)}")
    return DTYPES[name]


def resolve_device(name: str) -> torch.device:
    """The device by name.

    Raises:
        ConfigError: torch does not know it, or cannot use it on this machine.
    """
    if name in (None, "meta"):  # torch takes None for its default; a meta tensor has no values
        raise ConfigError(f"device={name!r} cannot be used; use cpu or a device of this machine")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device={name!r} cannot be used ({reason}); use cpu or a device of this machine") from error


def resolve_model_len(model_path: Path, chosen: int | None) -> int:
    """The context length to serve: as chosen, or the checkpoint's, then at most 8192.

    Raises:
        ConfigError: the checkpoint names no context length, or the chosen one exceeds it.
    """
    text = Fields(_text_fields(model_path), where="")
    name = "max_position_embeddings" if text.has("max_position_embeddings") else "model_max_length"
    longest = text.integer(name)
    if chosen is None:
        return min(longest, MAX_DEFAULT_MODEL_LEN)
    if isinstance(chosen, int) and chosen > longest:  # other types are refused with the other budgets
        raise ConfigError(f"max_model_len={chosen} exceeds the {longest} positions of {model_path}; lower it")
    return chosen


def _text_fields(model_path: Path) -> dict[str, object]:
    config = read_config_json(model_path)
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ConfigError(f"text_config={text!r} of {model_path} is not an object")
    return text
