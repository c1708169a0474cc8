"""Finished requests of offline use, and how their updates become them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from time import perf_counter

from outrider.request import FinishReason, Request, RequestUpdate, RequestUsage, TokenLogprobs

__all__ = ["RequestOutput", "RunningSample", "SampleOutput", "collect_outputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """One finished sample of a prompt."""

    sample_index: int
    token_ids: tuple[int, ...]  # without a stop id
    text: str  # "" without a tokenizer
    logprobs: tuple[TokenLogprobs, ...] | None  # one per token; None unless asked for
    finish_reason: FinishReason
    stop_reason: int | str | None
    error: str | None  # set when finish_reason is "error"
    usage: RequestUsage
    time_to_first_token_s: float | None  # since submission; None when no token was emitted
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request. What it says of tokens, text and times is that of its first sample."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    seed: int  # what was asked for, or the fresh one
    samples: tuple[SampleOutput, ...]  # n of them, by index

    @property
    def token_ids(self) -> tuple[int, ...]:
        """See SampleOutput."""
        return self.samples[0].token_ids

    @property
    def text(self) -> str:
        """See SampleOutput."""
        return self.samples[0].text

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """See SampleOutput."""
        return self.samples[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """See SampleOutput."""
        return self.samples[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """See SampleOutput."""
        return self.samples[0].stop_reason

    @property
    def error(self) -> str | None:
        """See SampleOutput."""
        return self.samples[0].error

    @property
    def usage(self) -> RequestUsage:
        """See SampleOutput."""
        return self.samples[0].usage

    @property
    def time_to_first_token_s(self) -> float | None:
        """See SampleOutput."""
        return self.samples[0].time_to_first_token_s

    @property
    def total_s(self) -> float:
        """See SampleOutput."""
        return self.samples[0].total_s


class RunningSample:
    """Collects the updates of one sample of a request."""

    def __init__(self, parent_id: str, request: Request) -> None:
        self.parent_id = parent_id
        self.request = request
        self.last: RequestUpdate | None = None
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._first_token_time: float | None = None
        self._end_time = 0.0

    def take(self, updates: list[RequestUpdate]) -> None:
        """Consume updates."""
        for update in updates:
            self._token_ids.extend(update.new_token_ids)
            self._text.append(update.new_text)
            self._logprobs.extend(update.logprobs or ())
            if self._first_token_time is None and update.new_token_ids:
                self._first_token_time = perf_counter()
            if update.finish_reason is not None:
                self.last, self._end_time = update, perf_counter()
        updates.clear()

    def output(self) -> SampleOutput:
        """The finished sample."""
        last = self.last
        assert last is not None and last.finish_reason is not None and last.usage is not None
        begin = self.request.arrival_time
        return SampleOutput(
            sample_index=self.request.sample_index,
            token_ids=tuple(self._token_ids),
            text="".join(self._text),
            logprobs=None if self.request.sampling.logprobs is None else tuple(self._logprobs),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            error=last.error,
            usage=last.usage,
            time_to_first_token_s=None if self._first_token_time is None else self._first_token_time - begin,
            total_s=self._end_time - begin,
        )


def collect_outputs(running: Sequence[RunningSample]) -> list[RequestOutput]:
    """One output per request; samples of a request are neighbours, in order of their index."""
    outputs = []
    for parent_id, group in groupby(running, key=lambda sample: sample.parent_id):
        samples = list(group)
        request = samples[0].request
        assert request.sampling.seed is not None, "samples_of sets the seed"
        outputs.append(
            RequestOutput(
                request_id=parent_id,
                prompt_token_ids=request.prompt_token_ids,
                seed=request.sampling.seed,
                samples=tuple(sample.output() for sample in samples),
            )
        )
    return outputs
