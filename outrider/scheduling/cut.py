"""Where a list of new tokens ends: the earliest terminator wins, nothing after it exists."""

from dataclasses import dataclass

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
    text = ""
    num_before = len(sequence.token_ids)

    def cut(reason: FinishReason | None, stop_reason: int | str | None = None, error: str | None = None) -> Cut:
        kept = tuple(sequence.token_ids[num_before:])
        return Cut(token_ids=kept, text=text, reason=reason, stop_reason=stop_reason, error=error)

    for token_id in output_token_ids:
        if token_id >= vocab_size:
            return cut(FinishReason.ERROR, error="the target's logits are not finite; the cause is in its weights")
        if token_id in sequence.stop_token_ids:
            return cut(FinishReason.STOP, token_id)
        if sequence.text is not None:
            text += sequence.text.push((token_id,))
        sequence.token_ids.append(token_id)
        if sequence.text is not None and sequence.text.stopped:
            return cut(FinishReason.STOP, sequence.text.matched_stop)
        if sequence.num_output_tokens == sequence.max_new_tokens:
            return cut(FinishReason.LENGTH)
    return cut(None)
