"""Known faults, planted on purpose: what finds differences must find these, or it proves nothing.

A fault replaces one function of the engine by a wrong one while ``planted`` is open. It is the kind of
mistake that engines really shipped: no effect on one request alone without drafts, wrong text as soon as
drafts are rejected, requests share a step or one loses its seat. Production code knows nothing of this module.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

import outrider.engine.accept
import outrider.engine.prefill
import outrider.engine.round
import outrider.engine.runner
from outrider.batch import ForwardBatch, TargetOutput, TokenChoices
from outrider.cache.cache_set import CacheSet
from outrider.cache.recurrent import RecurrentCache
from outrider.engine.batching import PageTable, StepDrafts, StepSpans
from outrider.engine.preemption import HostCopy
from outrider.errors import ConfigError
from outrider.ops.conv import shift_window
from outrider.plan import ScheduledSequence
from outrider.speculative.drafter import Drafter, DSparkDrafter, ObservedSpans

__all__ = ["FAULTS", "Fault", "find_fault", "planted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One mistake and how to make it."""

    name: str
    summary: str
    changes_output: bool  # False: the control, which costs acceptance but may not change a token
    plant: Callable[[], AbstractContextManager[None]]


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """``owner.name`` replaced by ``make(original)`` inside the ``with`` body."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _commit_off_by_one() -> AbstractContextManager[None]:
    """One rejected row is folded into the recurrent state; a span of the anchor alone has none."""

    def make(commit: Callable[..., None]) -> Callable[..., None]:
        def wrong(self: CacheSet, batch: ForwardBatch, num_committed_S: torch.Tensor) -> None:
            lengths_S = num_committed_S.new_tensor(batch.step.lengths)
            commit(self, batch, torch.minimum(num_committed_S + 1, lengths_S))

        return wrong

    return _replaced(CacheSet, "commit", make)


def _conv_not_rolled_back() -> AbstractContextManager[None]:
    """The state is right, but the conv window ends with the last row of the span, accepted or not."""

    def make(commit: Callable[..., None]) -> Callable[..., None]:
        def wrong(self: RecurrentCache, batch: ForwardBatch, num_committed_S: torch.Tensor) -> None:
            step = batch.step
            before_LSWD = self._window_LBWD.index_select(1, step.state_slots_S)
            commit(self, batch, num_committed_S)
            if step.lengths:
                inputs_LSMD = self._inputs_LTD[:, step.padded_rows_SM]
                lengths_S = num_committed_S.new_tensor(step.lengths)
                after_LSWD = shift_window(before_LSWD, inputs_LSMD, lengths_S)
                self._window_LBWD.index_copy_(1, step.state_slots_S, after_LSWD)

        return wrong

    return _replaced(RecurrentCache, "commit", make)


@contextmanager
def _stale_page() -> Iterator[None]:
    """A seat keeps the pages of its first owner, whoever sits there later, for what is read and what is written."""
    first_pages: dict[tuple[int, int], tuple[int, ...]] = {}
    tables: list[PageTable] = []  # kept alive, so that no id is used twice

    def make_assign(assign: Callable[..., None]) -> Callable[..., None]:
        def wrong(self: PageTable, slot: int, page_ids: tuple[int, ...]) -> None:
            if (id(self), slot) not in first_pages:
                first_pages[id(self), slot] = page_ids
                tables.append(self)
                assign(self, slot, page_ids)

        return wrong

    def make_batch(build_batch: Callable[..., ForwardBatch]) -> Callable[..., ForwardBatch]:
        def wrong(spans: StepSpans, drafts: StepDrafts, page_table: PageTable) -> ForwardBatch:
            def stale(item: ScheduledSequence) -> ScheduledSequence:
                pages = first_pages[id(page_table), item.state_slot]
                behind = (0,) * max(0, len(item.page_ids) - len(pages))  # what a table holds where nothing was written
                return replace(item, page_ids=pages + behind)

            return build_batch(replace(spans, items=tuple(map(stale, spans.items))), drafts, page_table)

        return wrong

    with (
        _replaced(PageTable, "assign", make_assign),
        _replaced(outrider.engine.round, "build_batch", make_batch),
        _replaced(outrider.engine.prefill, "build_batch", make_batch),
    ):
        yield


def _neighbour_row() -> AbstractContextManager[None]:
    """The last row of a span, which gives the bonus token, is read one row too far: the neighbour's first."""

    def make(build_batch: Callable[..., ForwardBatch]) -> Callable[..., ForwardBatch]:
        def wrong(spans: StepSpans, drafts: StepDrafts, page_table: PageTable) -> ForwardBatch:
            batch = build_batch(spans, drafts, page_table)
            rows_N = batch.logits_rows_N.clone()
            ends_S = torch.tensor(batch.step.lengths, dtype=torch.int64, device=rows_N.device).cumsum(0) - 1
            rows_N[ends_S[:-1]] = ends_S[:-1] + 1  # decode spans come first and want all their rows
            return replace(batch, logits_rows_N=rows_N, place=None)

        return wrong

    return _replaced(outrider.engine.round, "build_batch", make)


def _shared_noise() -> AbstractContextManager[None]:
    """All rows of a span draw with the noise of its first row; without drafts there is no other row."""

    def make(build_choices: Callable[..., TokenChoices | None]) -> Callable[..., TokenChoices | None]:
        def wrong(spans: StepSpans, drafts: StepDrafts, vocab_size: int, device: torch.device) -> TokenChoices | None:
            choices = build_choices(spans, drafts, vocab_size, device)
            if choices is None:
                return None
            last = torch.iinfo(torch.int64).max
            firsts_Q = torch.full_like(choices.seed_Q, last).scatter_reduce(
                0, choices.sequence_R, choices.positions_R, "amin"
            )
            return replace(choices, positions_R=firsts_Q[choices.sequence_R])

        return wrong

    return _replaced(outrider.engine.accept, "build_choices", make)


def _window_left_behind() -> AbstractContextManager[None]:
    """A preempted sequence comes back into another seat and finds the conv window of whoever sat there."""

    def make(copy_in: Callable[..., None]) -> Callable[..., None]:
        def wrong(caches: CacheSet, drafter: Drafter, copy: HostCopy, *, slot: int, page_ids: Sequence[int]) -> None:
            windows_LBWD = caches.recurrent._window_LBWD
            found_LWD = windows_LBWD[:, slot].clone()
            copy_in(caches, drafter, copy, slot=slot, page_ids=page_ids)
            windows_LBWD[:, slot] = found_LWD

        return wrong

    return _replaced(outrider.engine.runner, "copy_in", make)


def _shifted_tap() -> AbstractContextManager[None]:
    """The drafter takes in each row's tap one position late: it drafts worse, and that is all."""

    def make(observe: Callable[..., None]) -> Callable[..., None]:
        def wrong(self: DSparkDrafter, batch: ForwardBatch, output: TargetOutput, spans: ObservedSpans) -> None:
            if output.aux_hidden_TAD is not None:
                output = replace(output, aux_hidden_TAD=output.aux_hidden_TAD.roll(1, dims=0))
            observe(self, batch, output, spans)

        return wrong

    return _replaced(DSparkDrafter, "observe", make)


def _by_name(*faults: Fault) -> Mapping[str, Fault]:
    return {fault.name: fault for fault in faults}


FAULTS: Mapping[str, Fault] = _by_name(
    Fault(
        name="commit-off-by-one",
        summary="one rejected row is folded into the recurrent state",
        changes_output=True,
        plant=_commit_off_by_one,
    ),
    Fault(
        name="conv-not-rolled-back",
        summary="rejected rows stay in the window of the short conv",
        changes_output=True,
        plant=_conv_not_rolled_back,
    ),
    Fault(
        name="stale-page",
        summary="a seat keeps the page table of its first owner",
        changes_output=True,
        plant=_stale_page,
    ),
    Fault(
        name="neighbour-row",
        summary="the bonus token is read from the next sequence's row",
        changes_output=True,
        plant=_neighbour_row,
    ),
    Fault(
        name="shared-noise",
        summary="all rows of a verify span draw with the noise of the first",
        changes_output=True,
        plant=_shared_noise,
    ),
    Fault(
        name="window-left-behind",
        summary="a preempted sequence comes back without its conv window",
        changes_output=True,
        plant=_window_left_behind,
    ),
    Fault(
        name="shifted-tap",
        summary="control: the drafter's taps are one position late, so it drafts worse",
        changes_output=False,
        plant=_shifted_tap,
    ),
)


def find_fault(name: str) -> Fault:
    """The fault of that name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if name not in FAULTS:
        raise ConfigError(f"fault {name!r} is unknown; known are {', '.join(FAULTS)}")
    return FAULTS[name]


@contextmanager
def planted(fault: Fault | None) -> Iterator[None]:
    """The engine with ``fault`` in it, for every engine of the process; None plants nothing."""
    if fault is None:
        yield
        return
    with fault.plant():
        yield
