"""What one round will do and what it did, in host integers."""

from dataclasses import dataclass, field
from enum import StrEnum

from outrider.request import SamplingParams, Speculation, TokenLogprobs

__all__ = [
    "DraftReason",
    "PreemptedSequence",
    "RoundTimings",
    "ScheduledSequence",
    "SequenceChoice",
    "SharedPrompt",
    "SpeculationReport",
    "StepPlan",
    "StepResult",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceChoice:
    """How the tokens of a sequence are chosen, where that is more than the argmax of its logits.

    It is complete in every plan, so nothing of it lives on the device between rounds.
    """

    params: SamplingParams  # the seed is set
    sample_index: int
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]  # those that min_tokens masks
    history: tuple[int, ...]  # committed tokens, the anchor included; () unless a penalty counts them


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """The rows that one sequence contributes.

    A prompt chunk has its prompt tokens as query tokens and takes no drafts. A decode span has the
    anchor as its only query token and room for ``draft_budget`` draft rows behind it.
    """

    request_id: str
    state_slot: int
    page_ids: tuple[int, ...]  # in order; they cover every row of the span, drafts included
    start_position: int  # absolute position of the first query token = num_computed_tokens
    query_token_ids: tuple[int, ...]
    draft_budget: int
    is_prompt: bool
    wants_logits: bool  # False for every prompt chunk but the last
    is_first: bool  # the slot is new to this sequence and must be reset
    is_resumed: bool = False  # the slot and pages are new to it and take in its host copy
    shared_prompt: str | None = None  # likewise, but the copy of that prompt, which stays for others
    choice: SequenceChoice | None = None  # None = plain argmax, no log probabilities
    speculation: Speculation = "auto"  # of the request; a number is always drafted, within the budget


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptedSequence:
    """A sequence that lost its seat: its state goes to the host before anything else touches the seat."""

    request_id: str
    state_slot: int
    page_ids: tuple[int, ...]
    num_tokens: int  # its caches hold positions 0..num_tokens-1


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompt:
    """The state after the shared part of a prompt: copied to the host for other samples; the seat stays as it is."""

    prompt_id: str
    state_slot: int
    page_ids: tuple[int, ...]
    num_tokens: int  # the caches hold positions 0..num_tokens-1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Work of one round: decode spans first, then prompt chunks.

    The round runs it as one target step, or as several when its rows exceed the row budget.
    """

    step_id: int
    scheduled: tuple[ScheduledSequence, ...]
    released_slots: tuple[int, ...]  # given back since the previous plan; release before reuse
    preempted: tuple[PreemptedSequence, ...] = ()  # since the previous plan; copy out before their seats are reused
    dropped_copies: tuple[str, ...] = ()  # requests that ended while their state was on the host
    shared_prompts: tuple[SharedPrompt, ...] = ()  # copied out before anything runs
    spent_prompts: tuple[str, ...] = ()  # copies of prompts that nobody takes in after this plan

    @property
    def num_decodes(self) -> int:
        """Decode spans, which come before the prompt chunks."""
        return sum(not item.is_prompt for item in self.scheduled)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimings:
    """Seconds spent per verb of a round, measured on the host."""

    propose_s: float = 0.0
    batch_s: float = 0.0
    forward_s: float = 0.0
    accept_s: float = 0.0
    commit_s: float = 0.0
    observe_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all verbs."""
        return self.propose_s + self.batch_s + self.forward_s + self.accept_s + self.commit_s + self.observe_s


class DraftReason(StrEnum):
    """Why a decoding sequence did or did not get drafts in a round."""

    OFF = "off"  # the request takes none
    NO_ROOM = "no_room"  # no token may follow, no page is free, or the drafter's context ends
    FIXED = "fixed"  # the request or the engine asks for a fixed number
    LEARNING = "learning"  # a plain round, to learn what one costs
    PAYS = "pays"
    PROBE = "probe"  # not expected to pay; tried because a try was due
    UNLIKELY = "unlikely"  # proposed, but no draft was worth its row
    TOO_DEAR = "too_dear"  # not expected to pay


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationReport:
    """How the drafts of a round were decided."""

    reasons: tuple[DraftReason, ...]  # per decoding sequence
    # Tokens per round, the final one included, that drafting sequences must reach to be as fast as plain decoding;
    # of those that would draft where none does; 0 while costs are unknown.
    break_even: float = 0.0
    expected_rate: float = 0.0  # tokens a second, as of the speed of the machine at which costs are kept
    plain_rate: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Outcome per scheduled sequence, in plan order."""

    output_token_ids: tuple[tuple[int, ...], ...]  # accepted drafts, then the final token; () mid-prompt
    num_drafted: tuple[int, ...]
    num_accepted: tuple[int, ...]  # without the final token
    # Per output token, for sequences that ask for it, else None; () when no sequence does.
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = ()
    num_steps: int = 1  # target steps
    num_rows: int = 0  # rows of all target steps
    speculation: SpeculationReport | None = None
    num_proposed: int = 0  # sequences that the drafter proposed for, verified or not
    timings: RoundTimings = field(default_factory=RoundTimings)
