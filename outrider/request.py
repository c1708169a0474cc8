"""What a caller asks for and what it gets back."""

import math
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral, Real

from outrider.errors import RequestError, UnsupportedError

__all__ = ["FinishReason", "Request", "RequestUpdate", "RequestUsage", "SamplingParams"]


class FinishReason(StrEnum):
    """Why a request ended. The earliest terminator in token order wins."""

    STOP = "stop"  # a stop id (not emitted) or a stop string
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the caller gave it up
    ERROR = "error"  # a fault touched it; the update carries the message


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt. Only greedy decoding is offered.

    A token of ``stop_token_ids`` ends the request and is not part of its token ids, text or usage.
    The end-of-sequence ids of the checkpoint act the same unless ``ignore_eos``, which makes them
    ordinary tokens; it does not touch ``stop_token_ids``. The token that completes a ``stop`` string
    is part of the token ids and usage; the text ends just before the string.

    Raises:
        RequestError: a value is out of range.
        UnsupportedError: the combination is not greedy, or asks for log probabilities.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    seed: int | None = None  # accepted: greedy output does not depend on it
    max_tokens: int | None = None  # None = up to the context length
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    speculation: bool = True  # False = this request never gets drafts

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        self._check_greedy()

    def _check_types(self) -> None:
        for name, value, kind in (
            ("temperature", self.temperature, Real),
            ("top_k", self.top_k, Integral),
            ("top_p", self.top_p, Real),
            ("seed", 0 if self.seed is None else self.seed, Integral),
            ("max_tokens", 0 if self.max_tokens is None else self.max_tokens, Integral),
            ("logprobs", 0 if self.logprobs is None else self.logprobs, Integral),
        ):
            if isinstance(value, bool) or not isinstance(value, kind):
                raise RequestError(f"{name}={value!r} is not {'an integer' if kind is Integral else 'a number'}")
        for name, flag in (("ignore_eos", self.ignore_eos), ("speculation", self.speculation)):
            if not isinstance(flag, bool):
                raise RequestError(f"{name}={flag!r} is neither True nor False")
        if isinstance(self.stop, str):
            raise RequestError(f"stop={self.stop!r} is one string; pass a tuple of strings")
        if not isinstance(self.stop, tuple | list) or not all(isinstance(text, str) for text in self.stop):
            raise RequestError(f"stop={self.stop!r} is no tuple of strings")
        if not isinstance(self.stop_token_ids, tuple | list):
            raise RequestError(f"stop_token_ids={self.stop_token_ids!r} is no tuple of token ids")

    def _check_ranges(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise RequestError(f"temperature={self.temperature} is not a finite number >= 0; use 0")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p={self.top_p} is outside (0, 1]; use 1")
        if self.top_k < 0:
            raise RequestError(f"top_k={self.top_k} is negative; use 0 to switch it off")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise RequestError(f"max_tokens={self.max_tokens} is negative; use 0 or more")
        if "" in self.stop:
            raise RequestError("stop contains an empty string, which would match at once; remove it")

    def _check_greedy(self) -> None:
        for name, value, greedy_values in (
            ("temperature", self.temperature, (0,)),
            ("top_k", self.top_k, (0, 1)),
            ("top_p", self.top_p, (1,)),
            ("logprobs", self.logprobs, (None,)),
        ):
            if value not in greedy_values:
                raise UnsupportedError(
                    f"{name}={value} is not supported: decoding is greedy and returns no log "
                    f"probabilities; use {name}={greedy_values[0]}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_time: float = 0.0  # monotonic seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUsage:
    """Counts of a finished request. Token counts do not depend on speculation."""

    num_prompt_tokens: int
    num_output_tokens: int  # emitted tokens, after every cut
    num_rounds: int  # rounds that verified its rows, the prompt's last chunk excluded
    num_drafted: int  # draft tokens sent to the target
    num_accepted: int  # draft tokens that were accepted and emitted


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUpdate:
    """News of one request after a round: flat, so that no token can follow the end."""

    request_id: str
    new_token_ids: tuple[int, ...]
    new_text: str  # "" without a tokenizer
    num_drafted: int = 0  # of this round
    num_accepted: int = 0  # of this round, after the cut
    finish_reason: FinishReason | None = None  # None = running
    stop_reason: int | str | None = None  # the stop id or stop string that matched
    error: str | None = None
    usage: RequestUsage | None = None  # set exactly when finish_reason is
