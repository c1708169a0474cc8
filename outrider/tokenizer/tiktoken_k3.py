"""K3's own tokenizer form: `tiktoken.model` ranks plus names from `tokenizer_config.json`.

The id table is the base ranks followed by 256 special ids. Names that a config lists past the table are
left out: some configs carry names of an older chat format, whose ids have no embedding row.
"""

import base64
import binascii
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import tiktoken

from outrider.errors import TokenizerError
from outrider.tokenizer.base import NamedToken, TokenTable, build_token_table

__all__ = ["K3_SPLIT_PATTERN", "NUM_SPECIAL_IDS", "TiktokenEncoder", "load_tiktoken"]

NUM_SPECIAL_IDS = 256
# The splitting regex runs out of stack on very long inputs. These two cuts are part of how K3 text is
# tokenized, so they hold for every text, not only for those that would fail.
MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000

_RUN = re.compile(r"\s+|\S+")
_CASELESS = r"\p{Lm}\p{Lo}\p{M}"
_UPPER = rf"[\p{{Lu}}\p{{Lt}}{_CASELESS}&&[^\p{{Han}}]]"
_LOWER = rf"[\p{{Ll}}{_CASELESS}&&[^\p{{Han}}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Used when the checkpoint does not carry its own pattern.
K3_SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_logger = logging.getLogger(__name__)


class TiktokenEncoder:
    """Encodes with the `tiktoken` library."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self._encoding = encoding

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text` with no special token matched."""
        return [token_id for piece in bounded_pieces(text) for token_id in self._encoding.encode_ordinary(piece)]

    def encode_with_special(self, text: str) -> list[int]:
        """Token ids of `text` with special tokens matched by name."""
        return [
            token_id
            for piece in bounded_pieces(text)
            for token_id in self._encoding.encode(piece, allowed_special="all", disallowed_special=())
        ]


def load_tiktoken(
    path: Path,
    tokenizer_config: Mapping[str, object],
    split_pattern: str,
    *,
    eos_names: Iterable[str],
    eos_ids: Iterable[int],
) -> tuple[TokenTable, TiktokenEncoder]:
    """Read the `tiktoken.model` at `path`.

    Args:
        path: text file of one "base64 rank" pair per line.
        tokenizer_config: its `added_tokens_decoder` names ids of the special range.
        split_pattern: regular expression that splits text before merging.
        eos_names: end-of-sequence tokens by name.
        eos_ids: end-of-sequence tokens by id.

    Raises TokenizerError when the ranks or names are malformed, or the pattern does not compile.
    """
    ranks = read_ranks(path)
    named_tokens = _special_tokens(tokenizer_config, len(ranks))
    table = build_token_table(
        base_tokens={rank: content for content, rank in ranks.items()},
        named_tokens=named_tokens,
        eos_names=eos_names,
        eos_ids=eos_ids,
    )
    try:
        encoding = tiktoken.Encoding(
            name=path.name,
            pat_str=split_pattern,
            mergeable_ranks=ranks,
            special_tokens={token.name: token.token_id for token in named_tokens},
        )
    except ValueError as error:
        raise TokenizerError(
            f"the split pattern of {len(split_pattern)} characters does not compile ({error}); correct pat_str"
        ) from error
    return table, TiktokenEncoder(encoding)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Rank by token bytes. Ranks must be 0, 1, 2, ... and cover all 256 single bytes."""
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().splitlines()
        for line in lines:
            if line.strip():
                encoded, rank = line.split()
                ranks[base64.b64decode(encoded, validate=True)] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        raise TokenizerError(f"{path.name} cannot be read as base64 ranks ({error}); restore the file") from error
    num_lines = sum(1 for line in lines if line.strip())
    if len(ranks) != num_lines or sorted(ranks.values()) != list(range(num_lines)):
        raise TokenizerError(
            f"{path.name} has {num_lines} lines but {len(ranks)} distinct tokens with ranks that are not "
            f"exactly 0 to {num_lines - 1}; restore the file"
        )
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerError(
            f"{path.name} has no token for {len(missing)} of the 256 bytes, the first is 0x{missing[0]:02X}; "
            "restore the file"
        )
    return ranks


def bounded_pieces(text: str) -> Iterator[str]:
    """Cut `text` every 400,000 characters, and any run of (non-)whitespace every 25,000 characters."""
    for offset in range(0, len(text), MAX_PIECE_CHARS):
        piece = text[offset : offset + MAX_PIECE_CHARS]
        start = 0
        if len(piece) > MAX_RUN_CHARS:
            for run in _RUN.finditer(piece):
                for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                    yield piece[start:cut]
                    start = cut
        yield piece[start:]


def _special_tokens(tokenizer_config: Mapping[str, object], num_base: int) -> tuple[NamedToken, ...]:
    """The 256 special tokens after `num_base` base ranks, in id order."""
    declared = tokenizer_config.get("added_tokens_decoder") or {}
    if not isinstance(declared, Mapping):
        raise TokenizerError("added_tokens_decoder in tokenizer_config.json is not an object; correct it")
    end = num_base + NUM_SPECIAL_IDS
    by_id: dict[int, NamedToken] = {}
    for key, item in declared.items():
        try:
            token = NamedToken(name=str(item["content"]), token_id=int(key), special=bool(item.get("special", True)))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise TokenizerError(f"added_tokens_decoder entry {key!r} is malformed ({error!r}); correct it") from error
        if token.token_id < num_base:
            raise TokenizerError(
                f"added token {token.name!r} has id {token.token_id}, inside the {num_base} base ranks; "
                "use the tokenizer_config.json that belongs to this tiktoken.model"
            )
        if token.token_id >= end:
            _logger.warning("ignored added token %r: id %d, table size %d", token.name, token.token_id, end)
            continue
        by_id[token.token_id] = token
    return tuple(
        by_id.get(token_id) or NamedToken(name=f"<|reserved_token_{token_id}|>", token_id=token_id, special=True)
        for token_id in range(num_base, end)
    )
