"""Where a list of new tokens ends: the earliest terminator wins, nothing after it exists."""

from dataclasses import dataclass, replace

from outrider.request import FinishReason
from outrider.scheduling.sequence import Sequence

__all__ = ["Cut", "append_until_end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What a round really added to a sequence."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    reason: FinishReason | None = None  # None = the sequence goes on
    stop_reason: int | str | None = None
    error: str | None = None


def append_until_end(sequence: Sequence, output_token_ids: tuple[int, ...], vocab_size: int) -> Cut:
    """Append tokens to ``sequence`` in order, up to and including its end.

    Per token: an id beyond the vocabulary, the mark of logits that are not finite, ends with an error
    before it, so that later rows of a span take nothing from what plain decoding emits; a stop id ends
    before it; then the token counts; then a stop string that it completes ends after it; then the length
    limit. So on a tie between a stop string and the limit, "stop" is reported, and a stop id right behind
    the limit is never seen, as without speculation.
    """
    num_before = sequence.num_output_tokens
    num_left = sequence.max_new_tokens - num_before
    token_ids = output_token_ids[:num_left]
    ending = _end_by_ids(token_ids, sequence.stop_token_ids, vocab_size)
    if ending is not None:
        token_ids = ending.token_ids
    text = ""
    if sequence.text is not None:
        text = sequence.text.push(token_ids)
        num_through_stop = sequence.text.num_tokens_through_stop
        if num_through_stop is not None:
            token_ids = token_ids[: num_through_stop - num_before]
            ending = Cut(token_ids=token_ids, reason=FinishReason.STOP, stop_reason=sequence.text.matched_stop)
    sequence.token_ids.extend(token_ids)
    if ending is not None:
        return replace(ending, text=text)
    reason = FinishReason.LENGTH if len(token_ids) == num_left else None
    return Cut(token_ids=token_ids, text=text, reason=reason)


def _end_by_ids(token_ids: tuple[int, ...], stop_token_ids: frozenset[int], vocab_size: int) -> Cut | None:
    """The tokens before the first that ends by itself; None when none does."""
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            error = "the target's logits are not finite; the cause is in its weights"
            return Cut(token_ids=token_ids[:index], reason=FinishReason.ERROR, error=error)
        if token_id in stop_token_ids:
            return Cut(token_ids=token_ids[:index], reason=FinishReason.STOP, stop_reason=token_id)
    return None
