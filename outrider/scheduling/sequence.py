"""One request on its way: the only mutable record, written by the scheduler alone."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from outrider.request import Request, RequestUsage

__all__ = ["Sequence", "SequenceStatus", "StopText"]


class StopText(Protocol):
    """Text of a sequence and its stop strings; ``tokenizer.IncrementalDetokenizer`` is one."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        ...

    @property
    def num_tokens_through_stop(self) -> int | None:
        """Tokens taken in up to and including the one that completed the stop string; None while not stopped."""
        ...

    @property
    def matched_stop(self) -> str | None:
        """The stop string that was found."""
        ...

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens, up to one that completes a stop string; return the text that is now certain."""
        ...

    def flush(self) -> str:
        """Return the text still held back at the end."""
        ...


class SequenceStatus(Enum):
    """Where a sequence is. Only a running one holds pages and a slot."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A request, its tokens and its reservations.

    Between rounds a running sequence whose prompt is done satisfies
    ``len(token_ids) - num_computed_tokens == 1``: the anchor is known, its state is in no cache yet.
    """

    request: Request
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    text: StopText | None  # None: no text and no stop strings
    token_ids: list[int]
    arrival: int = 0  # place in the order of arrival; the largest is the youngest
    num_computed_tokens: int = 0
    page_ids: tuple[int, ...] = ()
    state_slot: int = -1
    on_host: bool = False  # its state is, or with the next plan goes, in a host copy
    status: SequenceStatus = SequenceStatus.WAITING
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_prompt_tokens: int = field(init=False)
    takes_argmax: bool = field(init=False)  # and nobody asks for log probabilities

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.takes_argmax = sampling.is_argmax and sampling.logprobs is None

    @property
    def num_output_tokens(self) -> int:
        """Emitted tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def in_prompt(self) -> bool:
        """Whether prompt tokens are still to be computed."""
        return self.num_computed_tokens < self.num_prompt_tokens

    def usage(self) -> RequestUsage:
        """The counts of this sequence so far."""
        return RequestUsage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_rounds=self.num_rounds,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
        )
