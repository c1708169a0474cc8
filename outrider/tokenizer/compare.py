"""Whether two tokenizers mean the same tokens by the same ids."""

from outrider.errors import TokenizerError
from outrider.tokenizer.base import Tokenizer

__all__ = ["first_difference"]


def first_difference(ours: Tokenizer, theirs: Tokenizer, *, ignored: frozenset[int] = frozenset()) -> str | None:
    """The first id that is another token in the other tokenizer, in words; None if there is none.

    Args:
        ours: the reference.
        theirs: the other one.
        ignored: ids that are not compared.
    """
    for token_id in range(max(ours.vocab_size, theirs.vocab_size)):
        one, other = _meaning(ours, token_id), _meaning(theirs, token_id)
        if one != other and token_id not in ignored:
            return f"token {token_id} is {_words(one)} here and {_words(other)} there"
    return None


def _meaning(tokenizer: Tokenizer, token_id: int) -> tuple[bytes, bool] | None:
    """Bytes of a token and whether text can produce it; None if the id is not assigned."""
    try:
        content = tokenizer.token_bytes(token_id, show_special=True)
    except TokenizerError:
        return None
    return content, token_id not in tokenizer.control_token_ids


def _words(meaning: tuple[bytes, bool] | None) -> str:
    if meaning is None:
        return "not assigned"
    content, is_text = meaning
    return f"{'text' if is_text else 'control token'} {content[:40]!r}"
