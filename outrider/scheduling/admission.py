"""Pure budget arithmetic: can this request run, and what does its whole life need?"""

from collections.abc import Iterable
from numbers import Integral

from outrider.config import CacheConfig, SchedulerConfig
from outrider.errors import CapacityError, RequestError
from outrider.request import Request

__all__ = ["check_token_ids", "num_pages_for", "resolve_max_new_tokens"]


def resolve_max_new_tokens(request: Request, scheduler: SchedulerConfig, cache: CacheConfig) -> int:
    """The most tokens this request may emit: its ``max_tokens``, or what the context leaves.

    Drafts need no room of their own: they are clipped to the tokens that may still be emitted.

    Raises:
        RequestError: the prompt is empty, or prompt and ``max_tokens`` exceed the context.
        CapacityError: its pages exceed the whole cache.
    """
    num_prompt = len(request.prompt_token_ids)
    max_len = scheduler.max_model_len
    max_tokens = request.sampling.max_tokens
    if num_prompt == 0:
        raise RequestError("the prompt has 0 tokens, but the first token needs one; pass at least 1")
    if num_prompt > max_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, which exceeds the {max_len}-token context; "
            f"shorten it by {num_prompt - max_len}"
        )
    if max_tokens is None:
        if num_prompt == max_len:
            raise RequestError(
                f"the {num_prompt}-token prompt fills the {max_len}-token context; shorten it, or ask for max_tokens=0"
            )
        max_tokens = max_len - num_prompt
    elif num_prompt + max_tokens > max_len:
        raise RequestError(
            f"max_tokens={max_tokens} exceeds the {max_len}-token context; lower max_tokens to "
            f"{max_len - num_prompt} or shorten the {num_prompt}-token prompt"
        )
    num_pages = num_pages_for(num_prompt + max_tokens, cache.page_size)
    if max_tokens > 0 and num_pages > cache.num_pages:
        raise CapacityError(
            f"prompt and max_tokens need {num_pages} pages of {cache.page_size} tokens, but the cache has "
            f"{cache.num_pages}; lower max_tokens={max_tokens}, shorten the {num_prompt}-token prompt, or "
            "start with a larger cache"
        )
    return max_tokens


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold ``num_tokens`` tokens."""
    return -(-num_tokens // page_size)


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise RequestError unless every id is one of the integers ``0..vocab_size-1``."""
    for token_id in token_ids:
        # A float would be cut to an integer later on, in silence.
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            raise RequestError(f"{name} contains {token_id!r}, which is no integer; pass token ids")
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{name} contains {token_id}, which is outside the vocabulary of {vocab_size} tokens; "
                "use the tokenizer of this checkpoint"
            )
