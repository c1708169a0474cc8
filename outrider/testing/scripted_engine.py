"""An engine whose clock and answers are scripted, for the accounting of `bench ab`."""

import random
from dataclasses import dataclass, field

from outrider.engine.metrics import EngineMetrics
from outrider.request import FinishReason, Request, RequestUpdate, RequestUsage

__all__ = ["Clock", "ScriptedEngine"]


@dataclass
class Clock:
    """Seconds that pass when an engine says so."""

    now_s: float = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


@dataclass
class ScriptedEngine:
    """One prompt a step, of 1 s, alone or (`mixes`) with the others' round of `round_s` and `per_round` tokens.

    The last id of a prompt says how many tokens its answer has.
    """

    per_round: int
    round_s: float
    clock: Clock = field(default_factory=Clock)
    drafts: int = 0  # verified per round; per_round - 1 of them stand
    mixes: bool = False
    noise: float = 0.0  # relative, uniform, of every round
    reason: FinishReason = FinishReason.LENGTH
    wrong: dict[int, int] = field(default_factory=dict)  # prompt -> from which of its requests on a token is wrong
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    max_in_flight: int = 0
    submitted: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    running: dict[str, Request] = field(default_factory=dict)
    emitted: dict[str, int] = field(default_factory=dict)
    dice: random.Random = field(default_factory=lambda: random.Random(1))

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.submitted.append(request)
        self.waiting.append(request)
        self.max_in_flight = max(self.max_in_flight, len(self.waiting) + len(self.running))

    def abort(self, request_id: str) -> None:
        """Forget a request."""
        self.aborted.append(request_id)
        self.waiting = [request for request in self.waiting if request.request_id != request_id]
        self.running.pop(request_id, None)

    def step(self) -> list[RequestUpdate]:
        """One prompt, or a round of all that decode, or both."""
        updates = []
        if self.waiting and not self.mixes:
            return [self._prefill()]
        decoding = list(self.running.values())
        if self.waiting:
            updates.append(self._prefill())
        return updates + self._round(decoding)

    def _prefill(self) -> RequestUpdate:
        self.clock.now_s += 1.0
        request = self.waiting.pop(0)
        self.running[request.request_id] = request
        self.emitted[request.request_id] = 1
        return RequestUpdate(request_id=request.request_id, new_token_ids=self._answer(request)[:1], new_text="")

    def _round(self, decoding: list[Request]) -> list[RequestUpdate]:
        if not decoding:
            return []
        seconds = self.round_s * (1 + self.noise * self.dice.uniform(-1, 1))
        self.clock.now_s += seconds
        metrics = self.metrics
        metrics.propose_s += 0.25 * seconds
        metrics.forward_s += 0.5 * seconds
        metrics.num_decode_spans += len(decoding)
        metrics.num_proposing_rounds += self.drafts > 0
        for _ in decoding:
            metrics.drafted_at.update(range(self.drafts))
            metrics.accepted_at.update(range(self.per_round - 1))
        return [self._decode(request) for request in decoding]

    def _decode(self, request: Request) -> RequestUpdate:
        name, answer = request.request_id, self._answer(request)
        begin = self.emitted[name]
        new = answer[begin : begin + self.per_round]
        self.emitted[name] = begin + len(new)
        usage = reason = None
        if self.emitted[name] == len(answer):
            rounds = -(-(len(answer) - 1) // self.per_round)
            usage = RequestUsage(
                num_prompt_tokens=3,
                num_output_tokens=len(answer),
                num_rounds=rounds,
                num_drafted=rounds * self.drafts,
                num_accepted=len(answer) - 1 - rounds,
            )
            reason = self.reason
            del self.running[name]
        return RequestUpdate(request_id=name, new_token_ids=new, new_text="", finish_reason=reason, usage=usage)

    def _answer(self, request: Request) -> tuple[int, ...]:
        prompt, length = request.prompt_token_ids[0], request.prompt_token_ids[-1]
        right = tuple(range(100, 100 + length))
        same = [other for other in self.submitted if other.prompt_token_ids[0] == prompt]
        is_wrong = prompt in self.wrong and same.index(request) >= self.wrong[prompt]
        return (right[0], 0, *right[2:]) if is_wrong else right
