"""The tokenizer protocol and the token table that both file formats fill in."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.errors import TokenizerError

__all__ = ["NamedToken", "TextEncoder", "TokenTable", "Tokenizer", "build_token_table", "well_formed"]

MAX_TOKENS = 2**24  # of a table; a damaged id must not become a table of that length

# K3 declares these three `special: false`, yet they are pure structure and never part of an answer.
STRUCTURAL_NAMES = frozenset({"<|open|>", "<|close|>", "<|sep|>"})


class Tokenizer(Protocol):
    """Text to ids and back for one vocabulary.

    A *control token* is a token that text must not be able to produce: every added token of the
    checkpoint except runs of plain whitespace. A *hidden token* is a control token that is left out
    of decoded text: those declared `special`, plus the K3 markers `<|open|>`, `<|close|>`, `<|sep|>`.
    """

    @property
    def vocab_size(self) -> int:
        """Size of the id table: one more than the largest token id."""
        ...

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids that end generation: the union of all end-of-sequence ids known for the checkpoint."""
        ...

    @property
    def control_token_ids(self) -> frozenset[int]:
        """Ids that `encode` returns only with `allow_special=True`."""
        ...

    @property
    def special_token_ids(self) -> Mapping[str, int]:
        """Added tokens of the checkpoint, by name."""
        ...

    def special_token_id(self, name: str) -> int:
        """The id of the added token `name`; raises TokenizerError when there is none."""
        ...

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Token ids of `text`, without any token added around it.

        `allow_special=True` turns names of added tokens inside `text` into their ids. It is for text
        that the checkpoint's own template produced, never for text that a user wrote. Lone surrogates
        become U+FFFD.
        """
        ...

    def decode(self, token_ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `token_ids`, invalid UTF-8 as U+FFFD; raises TokenizerError for an unknown id.

        `skip_special=True` leaves hidden tokens out.
        """
        ...

    def token_bytes(self, token_id: int, show_special: bool = False) -> bytes:
        """The raw bytes of one token; raises TokenizerError for an unknown id.

        A hidden token gives `b""`, or its name in UTF-8 with `show_special=True`.
        """
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        thinking: bool = False,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a chat, in the K3 format or by the checkpoint's own template."""
        ...


class TextEncoder(Protocol):
    """The part of a tokenizer that differs between file formats. Text arrives well formed."""

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text` with no control token matched."""
        ...

    def encode_with_special(self, text: str) -> list[int]:
        """Token ids of `text` with added tokens matched by name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedToken:
    """An added token as the checkpoint declares it."""

    name: str
    token_id: int
    special: bool

    def is_control(self) -> bool:
        """Whether text must not produce this token. Whitespace runs carry no structure."""
        return self.special or not self.name.isspace()

    def is_hidden(self) -> bool:
        """Whether decoding leaves this token out."""
        return self.special or self.name in STRUCTURAL_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """What every id of a vocabulary stands for. `bytes_by_id` holds None where an id is unassigned."""

    bytes_by_id: tuple[bytes | None, ...]
    id_by_name: Mapping[str, int]
    control_ids: frozenset[int]
    hidden_ids: frozenset[int]
    stop_ids: frozenset[int]

    def bytes_of(self, token_id: int, show_special: bool) -> bytes:
        """Raw bytes of one token; raises TokenizerError when the id is outside the table or unassigned."""
        if not 0 <= token_id < len(self.bytes_by_id):
            raise TokenizerError(
                f"token id {token_id} is outside the table of {len(self.bytes_by_id)} tokens; "
                "use the tokenizer that belongs to the checkpoint"
            )
        content = self.bytes_by_id[token_id]
        if content is None:
            raise TokenizerError(
                f"token id {token_id} is not assigned in the table of {len(self.bytes_by_id)} tokens; "
                "mask unassigned ids before sampling"
            )
        if token_id in self.hidden_ids and not show_special:
            return b""
        return content


def build_token_table(
    *,
    base_tokens: Mapping[int, bytes],
    named_tokens: Sequence[NamedToken],
    eos_names: Iterable[str],
    eos_ids: Iterable[int],
) -> TokenTable:
    """Combine base tokens (raw bytes by id), added tokens and end-of-sequence tokens into one table.

    Raises TokenizerError for a name with two ids, an id with two names, or an end-of-sequence token
    that is not in the table.
    """
    id_by_name: dict[str, int] = {}
    name_by_id: dict[int, str] = {}
    for token in named_tokens:
        if id_by_name.get(token.name, token.token_id) != token.token_id or token.token_id in name_by_id:
            raise TokenizerError(
                f"added token {token.name!r} with id {token.token_id} collides with another added token; "
                "repair the tokenizer files of the checkpoint"
            )
        if token.name != well_formed(token.name):
            raise TokenizerError(f"added token {token.name!r} has no UTF-8 form; repair the tokenizer files")
        id_by_name[token.name] = token.token_id
        name_by_id[token.token_id] = token.name
    for token_id in (*base_tokens, *name_by_id):
        if type(token_id) is not int or not 0 <= token_id < MAX_TOKENS:
            raise TokenizerError(
                f"token id {str(token_id)[:80]} is not one of 0..{MAX_TOKENS - 1}; repair the tokenizer files of the "
                "checkpoint"
            )
    size = 1 + max([*base_tokens, *name_by_id], default=-1)
    table: list[bytes | None] = [None] * size
    for token_id, content in base_tokens.items():
        table[token_id] = content
    for token_id, name in name_by_id.items():
        table[token_id] = name.encode("utf-8")
    return TokenTable(
        bytes_by_id=tuple(table),
        id_by_name=id_by_name,
        control_ids=frozenset(token.token_id for token in named_tokens if token.is_control()),
        hidden_ids=frozenset(token.token_id for token in named_tokens if token.is_hidden()),
        stop_ids=_stop_ids(id_by_name, size, eos_names, eos_ids),
    )


def _stop_ids(
    id_by_name: Mapping[str, int], size: int, eos_names: Iterable[str], eos_ids: Iterable[int]
) -> frozenset[int]:
    stop_ids = set()
    for name in eos_names:
        if name not in id_by_name:
            raise TokenizerError(
                f"eos_token {name!r} is not an added token of this tokenizer; correct tokenizer_config.json"
            )
        stop_ids.add(id_by_name[name])
    for token_id in eos_ids:
        if not 0 <= token_id < size:
            raise TokenizerError(
                f"eos_token_id={token_id} is outside the table of {size} tokens; "
                "correct eos_token_id in the model or generation config"
            )
        stop_ids.add(token_id)
    return frozenset(stop_ids)


def well_formed(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates as U+FFFD, so that it has a UTF-8 form."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
