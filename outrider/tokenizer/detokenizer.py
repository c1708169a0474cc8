"""Token ids to text, a few tokens at a time, with stop strings."""

import codecs
from collections import deque
from collections.abc import Iterable, Sequence

from outrider.errors import RequestError, TokenizerError
from outrider.tokenizer.base import Tokenizer

__all__ = ["IncrementalDetokenizer"]


class IncrementalDetokenizer:
    """Streams the text of one sequence; the text does not depend on how the ids are split into pushes.

    Without a stop string, the pushes and the flush concatenate to `tokenizer.decode(all ids)`. An id that
    the tokenizer does not have adds no text: the vocabulary of a model may be padded beyond its tokenizer,
    and what a model emits must not fail. `Tokenizer.decode` and `token_bytes` stay strict. A code
    point is emitted only when all its bytes are there, and text that may still become a stop string is
    held back. The stop string whose last character comes first in the text wins; among those that end
    at the same character, the longest. Output ends just before it, and later tokens are ignored.

    Args:
        tokenizer: source of the bytes of each token.
        stop: non-empty stop strings, compared with the decoded text.
        skip_special: leave hidden tokens out of the text.
        min_tokens: a stop string that an earlier token than this (counted from 1) completes is ordinary text.

    Raises:
        RequestError: `stop` is a single string or contains an empty one.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), skip_special: bool = True, min_tokens: int = 0
    ) -> None:
        if isinstance(stop, str):
            raise RequestError(f"stop={stop!r} is one string; pass a list of strings")
        if "" in stop:
            raise RequestError("stop contains an empty string, which would match at once; remove it")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._show_special = not skip_special
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._flushed = False
        self._matched_stop: str | None = None
        self._num_tokens = 0
        self._num_decoded_chars = 0
        self._num_emitted_chars = 0
        self._num_emitted_tokens = 0
        # Character offsets in the text where tokens end that are not fully emitted, in token order.
        self._token_ends: deque[int] = deque()
        # Latest tokens that end inside an unfinished code point; they have no offset yet.
        self._num_open_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matched_stop is not None

    @property
    def matched_stop(self) -> str | None:
        """The stop string that was found, or None."""
        return self._matched_stop

    @property
    def num_tokens(self) -> int:
        """Tokens taken in so far, in order; tokens after the one that completed the stop do not count."""
        return self._num_tokens

    @property
    def num_tokens_through_stop(self) -> int | None:
        """Tokens up to and including the one that completed the stop string; None while not stopped.

        Ids, logprobs and usage are cut to this many tokens. The kept ids decode to the emitted text,
        then the stop string, then whatever else the completing token carries.
        """
        return self._num_tokens if self.stopped else None

    @property
    def num_emitted_tokens(self) -> int:
        """Leading tokens whose whole text has been emitted, hidden tokens included.

        After a stop, a token that is partly or wholly inside the stop string does not count.
        """
        return self._num_emitted_tokens

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens of the sequence and return the text that is now certain.

        Returns "" once stopped.
        """
        assert not self._flushed, "push after flush; create one detokenizer per sequence"
        token_ids = tuple(token_ids)
        if not self._stop and not self._num_open_tokens:
            text = self._whole_text(token_ids)
            if text is not None:
                return text
        pieces: list[str] = []
        for token_id in token_ids:
            if self.stopped:
                break
            self._num_tokens += 1
            pieces.append(self._advance(self._decode(self._bytes_of(token_id))))
        return "".join(pieces)

    def flush(self) -> str:
        """Return the held text at the end of the sequence; an unfinished code point becomes U+FFFD.

        Call it once, after the last push. Returns "" when stopped.
        """
        assert not self._flushed, "flush called twice; create one detokenizer per sequence"
        self._flushed = True
        if self.stopped:
            return ""
        tail = self._decoder.decode(b"", final=True)
        self._close_open_tokens(len(tail))
        text = self._advance(tail)
        if not self.stopped:
            text += self._emit(len(self._held))
        return text

    def _whole_text(self, token_ids: tuple[int, ...]) -> str | None:
        """All of it at once, where no code point is open before or behind and nothing is held back; None elsewhere."""
        try:
            text = b"".join(map(self._bytes_of, token_ids)).decode()
        except UnicodeDecodeError:
            return None
        self._num_tokens += len(token_ids)
        self._num_emitted_tokens += len(token_ids)
        self._num_decoded_chars += len(text)
        self._num_emitted_chars += len(text)
        return text

    def _bytes_of(self, token_id: int) -> bytes:
        try:
            return self._tokenizer.token_bytes(token_id, self._show_special)
        except TokenizerError:
            return b""

    def _decode(self, content: bytes) -> str:
        text = self._decoder.decode(content)
        if text:
            # The bytes kept back form the start of one code point, so its first character closes them.
            self._close_open_tokens(1)
            self._num_decoded_chars += len(text) - 1
        unfinished, _ = self._decoder.getstate()
        if unfinished:
            self._num_open_tokens += 1
        else:
            self._token_ends.append(self._num_decoded_chars)
        return text

    def _close_open_tokens(self, num_chars: int) -> None:
        self._num_decoded_chars += num_chars
        self._token_ends.extend([self._num_decoded_chars] * self._num_open_tokens)
        self._num_open_tokens = 0

    def _advance(self, text: str) -> str:
        num_old_chars = len(self._held)
        self._held += text
        may_stop = bool(text) and self._num_tokens >= self._min_tokens
        # Held text may hold a whole stop string from before min_tokens; only one that ends in new text counts.
        match = _first_stop(self._held, self._stop, num_old_chars) if may_stop else None
        if match is None:
            return self._emit(len(self._held) - _num_held_back(self._held, self._stop))
        start, self._matched_stop = match
        emitted = self._emit(start)
        self._held = ""
        return emitted

    def _emit(self, num_chars: int) -> str:
        emitted, self._held = self._held[:num_chars], self._held[num_chars:]
        self._num_emitted_chars += num_chars
        while self._token_ends and self._token_ends[0] <= self._num_emitted_chars:
            self._token_ends.popleft()
            self._num_emitted_tokens += 1
        return emitted


def _first_stop(text: str, stop: Sequence[str], num_old_chars: int) -> tuple[int, str] | None:
    """Start and value of the stop string that ends first in `text` behind its old characters, the longest of equals."""
    best: tuple[int, int, str] | None = None
    for candidate in stop:
        start = text.find(candidate, max(0, num_old_chars - len(candidate) + 1))
        if start >= 0:
            found = (start + len(candidate), start, candidate)
            best = found if best is None else min(best, found)
    return None if best is None else best[1:]


def _num_held_back(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that starts a stop string without completing it."""
    longest = min(len(text), max((len(candidate) - 1 for candidate in stop), default=0))
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(candidate.startswith(end) for candidate in stop):
            return length
    return 0
