"""What one measured pass leaves behind, in plain numbers; seconds unless a name says otherwise."""

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
    shared equally among the sequences that decoded in it, so the shares of a pass add up to its decode time.
    `num_rounds` counts the rounds in which the prompt took part, zero-draft rounds included.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """All prompts once through one engine, in a closed loop of fixed concurrency.

    `decode_s` is the wall time of steps that held decode rows, `prefill_s` of those that held prompt rows
    only. The window is the time during which as many requests as the concurrency allows were in flight.
    `phase_s` splits `decode_s` by `PHASES`.
    """

    prompts: tuple[PromptRecord, ...]
    prefill_s: float
    decode_s: float
    window_s: float
    window_tokens: int
    num_decode_steps: int
    phase_s: Mapping[str, float]
