"""What a caller asks for and what it gets back."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from numbers import Integral, Real
from typing import Literal, get_args

from outrider.errors import RequestError

__all__ = [
    "AcceptanceRule",
    "FinishReason",
    "Request",
    "RequestUpdate",
    "RequestUsage",
    "SamplingParams",
    "Speculation",
    "TokenLogprobs",
    "samples_of",
]

AcceptanceRule = Literal["match", "rejection", "block"]
ACCEPTANCE_RULES = get_args(AcceptanceRule)
Speculation = Literal["auto", "off"] | int

MIN_TEMPERATURE = 1e-3  # below it scores leave float32; greedy is what is meant
MAX_BIASED_TOKENS = 1024
MAX_BIAS = 100.0

_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTEGERS = ("top_k", "n", "min_tokens")
_OPTIONAL_INTEGERS = ("seed", "max_tokens", "logprobs")
_INT64_MAX = 2**63 - 1  # seeds and counts travel as int64
_RANGES: dict[str, tuple[float, float, float]] = {  # lowest, highest, neutral value
    "temperature": (0, 100, 0),
    "top_k": (0, _INT64_MAX, 0),
    "top_p": (0, 1, 1),
    "min_p": (0, 1, 0),
    "repetition_penalty": (0, 100, 1),
    "presence_penalty": (-100, 100, 0),
    "frequency_penalty": (-100, 100, 0),
    "n": (1, 128, 1),
    "seed": (0, _INT64_MAX, 0),
    "max_tokens": (0, _INT64_MAX, 128),
    "min_tokens": (0, _INT64_MAX, 0),
    "logprobs": (0, 20, 0),
}


class FinishReason(StrEnum):
    """Why a request ended. The earliest terminator in token order wins."""

    STOP = "stop"  # a stop id (not emitted) or a stop string
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the caller gave it up
    ERROR = "error"  # a fault touched it; the update carries the message


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt. The default is greedy: the most likely token, ties to the lowest id.

    Every row of logits goes through ``logit_bias``, the penalties, ``min_tokens``, ``temperature``,
    ``top_k``, ``top_p``, ``min_p``, in this order, each on what the one before left. Log probabilities are
    those of the model, before all of this.

    A token of ``stop_token_ids`` ends the request and is not part of its token ids, text or usage.
    The end-of-sequence ids of the checkpoint act the same unless ``ignore_eos``, which makes them
    ordinary tokens; it does not touch ``stop_token_ids``. The token that completes a ``stop`` string
    is part of the token ids and usage; the text ends just before the string. Before ``min_tokens`` tokens,
    no stop id can be drawn and no stop string ends the request.

    ``acceptance`` is the rule by which drafts stand. ``match``: while they equal the target's own draw, so
    that speculation changes no token. ``rejection`` and ``block``: by coins, which accepts more drafts; the
    distribution is the same, the tokens of one seed are not. Greedy requests always match.

    Raises:
        RequestError: a value is out of range.
    """

    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # of tokens in prompt and output
    presence_penalty: float = 0.0  # of tokens in the output
    frequency_penalty: float = 0.0  # of tokens in the output, per occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    n: int = 1  # samples of the prompt, see samples_of
    seed: int | None = None  # None = a fresh one, reported with the last update
    max_tokens: int | None = None  # None = up to the context length
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # log probability of every token, and this many best ones beside it
    speculation: Speculation = "auto"  # as the engine does; "off" = never; a number = so many drafts in every round
    acceptance: AcceptanceRule = "match"

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        self._check_logit_bias()

    @property
    def is_argmax(self) -> bool:
        """Whether every token is the argmax of the model's own logits."""
        return self.temperature == 0 and not self.shapes_logits

    @property
    def shapes_logits(self) -> bool:
        """Whether logits are changed before a token is chosen from them."""
        return self.shapes_beyond(0)

    def shapes_beyond(self, num_output_tokens: int) -> bool:
        """Whether logits are still changed after so many output tokens."""
        return self.counts_tokens or bool(self.logit_bias) or self.min_tokens > num_output_tokens

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty looks at the tokens so far."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def with_seed(self) -> "SamplingParams":
        """These parameters with a seed: their own, or a fresh one."""
        # 53 bits: the seed is reported in JSON, whose readers may hold numbers as doubles.
        return self if self.seed is not None else replace(self, seed=secrets.randbits(53))

    def _check_types(self) -> None:
        for name in _REALS:
            _check_number(name, getattr(self, name), Real)
        for name in _INTEGERS:
            _check_number(name, getattr(self, name), Integral)
        for name in _OPTIONAL_INTEGERS:
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), Integral)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos={self.ignore_eos!r} is neither True nor False")
        self._check_speculation()
        if self.acceptance not in ACCEPTANCE_RULES:
            raise RequestError(f"acceptance={self.acceptance!r} is unknown; use {', '.join(ACCEPTANCE_RULES)}")
        if isinstance(self.stop, str):
            raise RequestError(f"stop={self.stop!r} is one string; pass a tuple of strings")
        if not isinstance(self.stop, tuple | list) or not all(isinstance(text, str) for text in self.stop):
            raise RequestError(f"stop={self.stop!r} is no tuple of strings")
        if not isinstance(self.stop_token_ids, tuple | list):
            raise RequestError(f"stop_token_ids={self.stop_token_ids!r} is no tuple of token ids")

    def _check_speculation(self) -> None:
        wanted = self.speculation
        is_number = isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0
        if not is_number and wanted not in ("auto", "off"):
            raise RequestError(f"speculation={wanted!r} is unknown; use 'auto', 'off' or a number of drafts from 0")

    def _check_ranges(self) -> None:
        for name, (low, high, neutral) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise RequestError(f"{name}={value} is outside {low}..{high}; use {neutral}")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature={self.temperature} is positive but below {MIN_TEMPERATURE}; use 0 for greedy decoding"
            )
        if self.top_p == 0:
            raise RequestError(f"top_p={self.top_p} keeps no token; use 1 to switch it off")
        if self.repetition_penalty == 0:
            raise RequestError(f"repetition_penalty={self.repetition_penalty} divides by zero; use 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; lower it")
        if "" in self.stop:
            raise RequestError("stop contains an empty string, which would match at once; remove it")

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias={self.logit_bias!r} is no mapping of token ids to numbers")
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} tokens, more than {MAX_BIASED_TOKENS}; bias fewer"
            )
        for token_id, bias in self.logit_bias.items():
            _check_number(f"logit_bias[{token_id!r}]", bias, Real)
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise RequestError(f"logit_bias[{token_id}]={bias} is outside -{MAX_BIAS}..{MAX_BIAS}; use 0")


def _check_number(name: str, value: object, kind: type) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise RequestError(f"{name}={value!r} is not {'an integer' if kind is Integral else 'a number'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_time: float = 0.0  # monotonic seconds
    sample_index: int = 0  # which of the n samples of its prompt this is
    prompt_id: str | None = None  # requests with the same one have the same prompt, which is computed once


def samples_of(request: Request) -> tuple[Request, ...]:
    """One request per sample: an engine runs them as any other requests.

    They share the seed, which is drawn here if it is missing, and the work on the prompt, and differ in
    ``sample_index``, a word of every draw. A single sample keeps its id; the others get ``#index`` behind it.
    """
    sampling = request.sampling.with_seed()
    if sampling.n == 1:
        return (replace(request, sampling=sampling),)
    return tuple(
        replace(
            request,
            request_id=f"{request.request_id}#{index}",
            sampling=sampling,
            sample_index=index,
            prompt_id=request.request_id,
        )
        for index in range(sampling.n)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural logarithms of the model's probabilities at one position."""

    token_id: int  # the emitted token
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most likely tokens, descending, ties by ascending id


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
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of new_token_ids; None unless asked for
    seed: int | None = None  # what the draws depend on; set exactly when finish_reason is
    sample_index: int = 0
