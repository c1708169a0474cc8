"""What a checkpoint directory says about vocabulary, dtype and context, beside its weights."""

import logging
from pathlib import Path

import torch

from outrider.errors import CheckpointError, ConfigError
from outrider.models.dspark.checkpoint import confidence_digest
from outrider.models.dspark.config_json import read_config
from outrider.models.fields import Fields, read_config_json
from outrider.speculative.calibration import CALIBRATION_FILE, Calibration, load_calibration
from outrider.tokenizer import Tokenizer, load_tokenizer
from outrider.tokenizer.compare import first_difference
from outrider.tokenizer.files import ids_of

__all__ = [
    "check_drafter_vocabulary",
    "load_drafter_calibration",
    "load_vocabulary",
    "resolve_device",
    "resolve_dtype",
    "resolve_model_len",
]

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


def check_drafter_vocabulary(
    model_path: Path, drafter_path: Path, tokenizer: Tokenizer | None, eos_token_ids: frozenset[int]
) -> None:
    """Refuse a drafter whose own files say that its ids are other tokens than the target's.

    Compared is what both sides state: ids that begin and end a text, and the tokenizer's table without the drafter's
    mask, which trainers name as they like. A drafter may name fewer ends than the target. Padding has no meaning
    here, and what splits text into tokens is not compared either: the drafter sees ids only.

    Args:
        model_path: directory of the target.
        drafter_path: directory of the drafter.
        tokenizer: the target's, None if it has none.
        eos_token_ids: all ends that the target's files name.

    Raises:
        CheckpointError: an id is another token.
        UserError: a file of the drafter is malformed.
    """
    places = (_text_fields(model_path), read_config_json(model_path))
    begins = {
        token_id for place in places for token_id in ids_of(place.get("bos_token_id"), "config.json", "bos_token_id")
    }
    drafter_config = read_config_json(drafter_path)
    for name, known in (("bos_token_id", begins), ("eos_token_id", eos_token_ids)):
        named = set(ids_of(drafter_config.get(name), str(drafter_path / "config.json"), name))
        if known and not named <= known:
            raise CheckpointError(
                f"drafter {name}={sorted(named)} but the target has {sorted(known)}; use the drafter trained for this "
                "target"
            )
    files = [name for name in TOKENIZER_FILES if (drafter_path / name).is_file()]
    if not files or tokenizer is None:
        return
    mask = frozenset({read_config(drafter_path).mask_token_id})
    difference = first_difference(tokenizer, load_tokenizer(drafter_path), ignored=mask)
    if difference is not None:
        raise CheckpointError(
            f"the tokenizer beside the drafter, {drafter_path / files[0]}, is not the target's: {difference}; use the "
            "drafter trained for this target"
        )


def load_drafter_calibration(drafter_path: Path) -> Calibration:
    """The calibration beside a drafter's weights; without fits if there is none, or if it is another head's.

    A drafter that was trained again says so in the log: its drafts are as exact as ever, and what its confidence
    is worth is learnt while serving.

    Raises:
        CheckpointError: the file is malformed.
    """
    calibration = load_calibration(drafter_path)
    if calibration.confidence_head and calibration.confidence_head != confidence_digest(drafter_path):
        logger.warning(
            "%s was fitted for other weights of the confidence head and is not used; run `outrider calibrate`",
            drafter_path / CALIBRATION_FILE,
        )
        return Calibration()
    return calibration


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
