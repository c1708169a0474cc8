"""The tokenizer of a checkpoint: a token table, an encoder and the checkpoint's chat wording."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from outrider.errors import EngineFault, TokenizerError
from outrider.tokenizer.base import TextEncoder, TokenTable, well_formed
from outrider.tokenizer.chat import has_k3_markers, render_k3_chat
from outrider.tokenizer.template import ChatTemplate

__all__ = ["CheckpointTokenizer"]


class CheckpointTokenizer:
    """Implements `outrider.tokenizer.Tokenizer` for both file formats.

    Args:
        table: what every id stands for.
        encoder: turns text into ids of that table.
        effort_message: text of the K3 thinking-effort message, or None when the checkpoint has none.
        template: the checkpoint's own chat template, for those without the K3 markers.
    """

    def __init__(
        self,
        table: TokenTable,
        encoder: TextEncoder,
        effort_message: str | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        self._table = table
        self._encoder = encoder
        self._effort_message = effort_message
        self._template = template
        self._special_token_ids = MappingProxyType(dict(table.id_by_name))

    @property
    def vocab_size(self) -> int:
        """Size of the id table: one more than the largest token id."""
        return len(self._table.bytes_by_id)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids that end generation."""
        return self._table.stop_ids

    @property
    def control_token_ids(self) -> frozenset[int]:
        """Ids that `encode` returns only with `allow_special=True`."""
        return self._table.control_ids

    @property
    def special_token_ids(self) -> Mapping[str, int]:
        """Added tokens of the checkpoint, by name."""
        return self._special_token_ids

    def special_token_id(self, name: str) -> int:
        """The id of the added token `name`; raises TokenizerError when there is none."""
        token_id = self._special_token_ids.get(name)
        if token_id is None:
            raise TokenizerError(
                f"{name!r} is not among the {len(self._special_token_ids)} added tokens of this tokenizer; "
                "use the tokenizer that belongs to the checkpoint"
            )
        return token_id

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Token ids of `text`; control tokens only with `allow_special=True`."""
        if allow_special:
            return self._encoder.encode_with_special(well_formed(text))
        token_ids = self._encoder.encode_plain(well_formed(text))
        if not self._table.control_ids.isdisjoint(token_ids):
            forged = sorted(self._table.control_ids.intersection(token_ids))
            raise EngineFault(f"plain text of {len(text)} characters produced control tokens {forged}")
        return token_ids

    def decode(self, token_ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `token_ids`, invalid UTF-8 as U+FFFD; raises TokenizerError for an unknown id."""
        bytes_of = self._table.bytes_of
        joined = b"".join(bytes_of(token_id, not skip_special) for token_id in token_ids)
        return joined.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, show_special: bool = False) -> bytes:
        """The raw bytes of one token; raises TokenizerError for an unknown id."""
        return self._table.bytes_of(token_id, show_special)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        thinking: bool = False,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a chat: in the K3 format where the markers exist, else by the checkpoint's template.

        See `outrider.tokenizer.chat.render_k3_chat` and `outrider.tokenizer.template.ChatTemplate.render`.
        """
        if self._template is not None and not has_k3_markers(self):
            return self._template.render(self, messages, thinking=thinking, add_generation_prompt=add_generation_prompt)
        return render_k3_chat(
            self,
            messages,
            thinking=thinking,
            add_generation_prompt=add_generation_prompt,
            effort_message=self._effort_message,
        )
