"""What one measured pass leaves behind, in plain numbers; seconds unless a name says otherwise."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["MODEL_PHASES", "PHASES", "PassRecord", "PromptRecord"]

PHASES = ("propose", "forward", "accept", "commit", "observe", "host")
"""Parts of a round, in order. `observe` feeds committed rows to the drafter; `host` is the rest of the step:
planning, building the batch, bookkeeping."""
MODEL_PHASES = ("propose", "forward", "observe")
"""What the two models do; everything else in a round is host overhead, `host_ms` in reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """One prompt of a pass.

    `decode_s` is this prompt's share of the wall time of every step in which it decoded; a step's time is
    shared equally among the sequences that decoded in it. `num_rounds` counts the rounds in which the prompt
    took part, zero-draft rounds included.
    """

    question_id: str
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str
    submitted_s: float
    first_token_s: float
    last_token_s: float
    decode_s: float
    num_rounds: int
    num_decode_tokens: int
    num_drafted: int
    num_accepted: int

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.submitted_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None when there is only one."""
        if len(self.token_ids) < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (len(self.token_ids) - 1)

    @property
    def output_hash(self) -> str:
        """Sixteen hex digits of the SHA-256 of the token ids."""
        return hashlib.sha256(",".join(map(str, self.token_ids)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """All prompts through one engine, in a closed loop of fixed concurrency.

    A round with prompt rows only is prefill time, one with decode rows only decode time, one with both is mixed
    and counts for neither. The window is the decode time in which every seat decoded. `phase_s` splits `decode_s`
    by `PHASES`. `refills_agree` says whether requests that only kept the seats busy wrote what the prompt's own
    request wrote. Counts of rounds and drafts are of the whole pass, drafts before any cut.
    """

    prompts: tuple[PromptRecord, ...]
    refills_agree: bool
    prefill_s: float
    mixed_s: float
    decode_s: float
    decode_tokens: int
    num_decode_steps: int  # rounds of `decode_s`
    window_s: float
    window_tokens: int
    window_rounds: int
    num_rounds: int  # with decode rows, mixed ones included
    num_proposing_rounds: int  # with a proposal
    num_decode_spans: int  # (sequence, round) pairs
    drafted_at: Mapping[int, int]  # drafts verified, by position in the block from 0
    accepted_at: Mapping[int, int]  # of these, how many stood
    phase_s: Mapping[str, float]
