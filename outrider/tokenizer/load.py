"""Loads the tokenizer of a checkpoint folder."""

from collections.abc import Sequence
from pathlib import Path

from outrider.errors import TokenizerError
from outrider.tokenizer.base import Tokenizer
from outrider.tokenizer.checkpoint import CheckpointTokenizer
from outrider.tokenizer.files import eos_names_of, ids_of, read_json_object
from outrider.tokenizer.hf import load_hf
from outrider.tokenizer.literals import read_effort_message, read_split_pattern
from outrider.tokenizer.template import read_template
from outrider.tokenizer.tiktoken_k3 import K3_SPLIT_PATTERN, load_tiktoken

__all__ = ["load_tokenizer"]

DEFAULT_EFFORT = "max"


def load_tokenizer(path: str | Path, *, eos_token_id: int | Sequence[int] | None = None) -> Tokenizer:
    """Load the tokenizer in the folder `path`, or beside the file `path`.

    `tiktoken.model` is used when present, else `tokenizer.json`. `tokenizer_config.json`,
    `generation_config.json`, `tokenization_kimi.py`, `encoding_k3.py` and a chat template are read when present;
    Python files are parsed, never executed, and the template runs in a sandbox.

    Args:
        path: a checkpoint folder, or a file named `tokenizer.json` or `tiktoken.model`.
        eos_token_id: end-of-sequence ids of the model config, added to those of the tokenizer files.

    Raises:
        TokenizerError: no tokenizer file, a malformed one, or an end-of-sequence token not in it.
    """
    given = Path(path)
    folder = given if given.is_dir() else given.parent
    names = ("tiktoken.model", "tokenizer.json") if given.is_dir() else (given.name,)
    tokenizer_config = _read_optional(folder / "tokenizer_config.json")
    generation_config = _read_optional(folder / "generation_config.json")
    eos_names = eos_names_of(tokenizer_config)
    eos_ids = [
        *ids_of(generation_config.get("eos_token_id"), "generation_config.json"),
        *ids_of(eos_token_id, "the model config"),
    ]
    encoding_file = folder / "encoding_k3.py"
    effort_message = read_effort_message(encoding_file, DEFAULT_EFFORT) if encoding_file.is_file() else None
    template = read_template(folder, tokenizer_config)
    if "tiktoken.model" in names and (folder / "tiktoken.model").is_file():
        pattern_file = folder / "tokenization_kimi.py"
        pattern = read_split_pattern(pattern_file) if pattern_file.is_file() else K3_SPLIT_PATTERN
        table, tiktoken_encoder = load_tiktoken(
            folder / "tiktoken.model", tokenizer_config, pattern, eos_names=eos_names, eos_ids=eos_ids
        )
        return CheckpointTokenizer(table, tiktoken_encoder, effort_message, template)
    if "tokenizer.json" in names and (folder / "tokenizer.json").is_file():
        table, hf_encoder = load_hf(folder / "tokenizer.json", eos_names=eos_names, eos_ids=eos_ids)
        return CheckpointTokenizer(table, hf_encoder, effort_message, template)
    raise TokenizerError(
        f"{given} holds neither tiktoken.model nor tokenizer.json; pass the folder of a complete checkpoint"
    )


def _read_optional(path: Path) -> dict[str, object]:
    return read_json_object(path) if path.is_file() else {}
