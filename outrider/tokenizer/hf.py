"""Byte-level BPE from a `tokenizer.json` file.

Two encoders are built from the file. The full one matches every added token by name. The plain one has
never heard of the control tokens: they are gone from its added tokens, its vocabulary and its merges, so
no text, normalization or merge can lead to them. The library's `encode_special_tokens` switch is not
enough for this, because it covers only the added tokens declared `special`.
"""

import copy
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from outrider.errors import TokenizerError
from outrider.tokenizer.base import NamedToken, TokenTable, build_token_table, well_formed
from outrider.tokenizer.files import read_json_object

__all__ = ["HfEncoder", "load_hf"]


# Bytes that a vocabulary may lack: those that no UTF-8 text has, control characters that no text needs, and the
# first bytes of planes in which nothing is assigned but private use.
SPARE_BYTES = frozenset({*range(0x20), 0x7F, 0xC0, 0xC1, *range(0xF1, 0x100)} - set(b"\t\n\r"))


class HfEncoder:
    """Encodes with the `tokenizers` library; see the module text for the two encoders.

    Args:
        plain: knows no control token.
        full: knows every added token.
        lacking: bytes that the vocabulary has no token for; a character that needs one becomes U+FFFD, since the
            library would drop it.
    """

    def __init__(
        self, plain: tokenizers.Tokenizer, full: tokenizers.Tokenizer, lacking: frozenset[int] = frozenset()
    ) -> None:
        self._plain = plain
        self._full = full
        controls = "".join(re.escape(chr(byte)) for byte in sorted(lacking) if byte < 0x80)
        planes = "".join(
            f"{chr(max(0x10000, (byte & 7) << 18))}-{chr(min(sys.maxunicode, ((byte & 7) + 1 << 18) - 1))}"
            for byte in sorted(lacking)
            if 0xF0 <= byte <= 0xF4
        )
        self._lacking = re.compile(f"[{controls}{planes}]") if controls or planes else None

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text` with no control token matched."""
        return self._plain.encode(self._known(text), add_special_tokens=False).ids

    def encode_with_special(self, text: str) -> list[int]:
        """Token ids of `text` with added tokens matched by name."""
        return self._full.encode(self._known(text), add_special_tokens=False).ids

    def _known(self, text: str) -> str:
        return text if self._lacking is None else self._lacking.sub("\ufffd", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parsed:
    """The checked parts of a tokenizer.json."""

    document: dict[str, object]
    vocab: Mapping[str, int]
    merges: list[tuple[str, str]]
    named_tokens: tuple[NamedToken, ...]


def load_hf(path: Path, *, eos_names: Iterable[str], eos_ids: Iterable[int]) -> tuple[TokenTable, HfEncoder]:
    """Read the `tokenizer.json` at `path`.

    Raises TokenizerError when the file is malformed, is not byte-level BPE, lacks the token of a byte that
    text needs, or when an end-of-sequence token is not in it.
    """
    parsed = _parse(path)
    byte_of_char = byte_level_alphabet()
    named_ids = {token.token_id for token in parsed.named_tokens}
    table = build_token_table(
        base_tokens={
            token_id: _raw_bytes(text, byte_of_char)
            for text, token_id in parsed.vocab.items()
            if token_id not in named_ids
        },
        named_tokens=parsed.named_tokens,
        eos_names=eos_names,
        eos_ids=eos_ids,
    )
    control_names = {token.name for token in parsed.named_tokens if token.is_control()}
    plain = _without_tokens(parsed, control_names)
    full = _without_tokens(parsed, set())
    missing = [char for char in byte_of_char if plain.token_to_id(char) is None]
    lacking = frozenset(byte_of_char[char] for char in missing)
    if lacking - SPARE_BYTES:
        raise TokenizerError(
            f"{path.name} has no token for {len(missing)} of the 256 bytes, the first that text needs is "
            f"0x{min(lacking - SPARE_BYTES):02X}; such text would be lost: train the BPE on the full byte alphabet"
        )
    return table, HfEncoder(plain, full, lacking)


def byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of byte-level BPE stands for.

    Bytes that print in Latin-1 stand for themselves; the others take the code points from 256 on, in
    order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in sorted(printable)}
    alphabet.update({chr(256 + offset): byte for offset, byte in enumerate(shifted)})
    return alphabet


def _raw_bytes(text: str, byte_of_char: Mapping[str, int]) -> bytes:
    if all(char in byte_of_char for char in text):
        return bytes(byte_of_char[char] for char in text)
    return text.encode("utf-8")


def _parse(path: Path) -> _Parsed:
    document = read_json_object(path)
    model = document.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        raise TokenizerError(f"{path.name} holds a {kind} model; only byte-level BPE is supported")
    for part in ("pre_tokenizer", "decoder"):
        if "ByteLevel" not in set(_component_types(document.get(part))):
            raise TokenizerError(f"{path.name} has no ByteLevel {part}; only byte-level BPE is supported")
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        raise TokenizerError(f"{path.name} lacks model.vocab or model.merges; restore the file")
    if not all(type(token_id) is int for token_id in vocab.values()):
        raise TokenizerError(f"{path.name} has an id in model.vocab that is no integer; restore the file")
    if any(text != well_formed(text) for text in vocab):
        raise TokenizerError(f"{path.name} has a text in model.vocab without a UTF-8 form; restore the file")
    added = document.get("added_tokens") or []
    try:
        named = tuple(
            NamedToken(name=_text(item["content"]), token_id=int(item["id"]), special=bool(item["special"]))
            for item in added  # type: ignore[attr-defined]
        )
        pairs = [_merge_pair(merge) for merge in merges]
    except (TypeError, KeyError, ValueError) as error:
        raise TokenizerError(f"{path.name} has a malformed added token or merge ({error!r}); restore it") from error
    return _Parsed(document=document, vocab=vocab, merges=pairs, named_tokens=named)


def _component_types(component: object) -> Iterator[str]:
    if isinstance(component, dict):
        yield str(component.get("type"))
        for children in (component.get("pretokenizers"), component.get("decoders")):
            for child in children or []:
                yield from _component_types(child)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def _merge_pair(merge: object) -> tuple[str, str]:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list) or len(parts) != 2:
        raise ValueError(f"merge {merge!r} is not a pair")
    return str(parts[0]), str(parts[1])


def _without_tokens(parsed: _Parsed, removed: set[str]) -> tokenizers.Tokenizer:
    """A library tokenizer that does not know the tokens named `removed` and adds nothing around text."""
    document = copy.copy(parsed.document)
    added = document.get("added_tokens") or []
    assert isinstance(added, list), "checked while parsing"
    document["added_tokens"] = [item for item in added if item["content"] not in removed]
    document.update({"truncation": None, "padding": None, "post_processor": None})
    model = document["model"]
    assert isinstance(model, dict), "checked while parsing"
    removed_ids = {token.token_id for token in parsed.named_tokens if token.name in removed}
    vocab = {
        text: token_id for text, token_id in parsed.vocab.items() if text not in removed and token_id not in removed_ids
    }
    kept = [token for token in parsed.named_tokens if token.name not in removed]
    # The library numbers added tokens that the vocabulary lacks by itself; listing them keeps the file's ids.
    vocab.update({token.name: token.token_id for token in kept})
    merges = [
        [left, right] for left, right in parsed.merges if left in vocab and right in vocab and left + right in vocab
    ]
    unk_token = model.get("unk_token") if model.get("unk_token") in vocab else None
    document["model"] = {**model, "vocab": vocab, "merges": merges, "dropout": None, "unk_token": unk_token}
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the library raises the bare base class
        raise TokenizerError(f"tokenizer.json is not accepted by tokenizers: {error}; restore the file") from error
    for token in kept:
        found = tokenizer.token_to_id(token.name)
        if found != token.token_id:
            raise TokenizerError(
                f"added token {token.name!r} has id {token.token_id} in the file but the library gives {found}; "
                "repair added_tokens in tokenizer.json"
            )
    return tokenizer
