"""Who holds which slot and pages, and what the device must be told about it."""

from dataclasses import dataclass

from outrider.config import CacheConfig
from outrider.plan import PreemptedSequence, StepPlan
from outrider.scheduling.admission import num_pages_for
from outrider.scheduling.page_pool import IdPool
from outrider.scheduling.sequence import Sequence

__all__ = ["SeatNews", "Seats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatNews:
    """What happened to seats since the previous plan; the fields of ``StepPlan`` of the same names."""

    released_slots: tuple[int, ...]
    preempted: tuple[PreemptedSequence, ...]
    dropped_copies: tuple[str, ...]


NO_NEWS = SeatNews(released_slots=(), preempted=(), dropped_copies=())


class Seats:
    """Slots and pages of all sequences.

    A seat is one slot and the pages of one sequence. Whoever leaves it for good releases the slot;
    whoever is preempted takes its state to the host, unless the device has nothing of it yet or the
    host has it still.

    Args:
        num_slots: seats at once.
        cache: page size and number of pages.
    """

    def __init__(self, num_slots: int, cache: CacheConfig) -> None:
        self.page_size = cache.page_size
        self.pages = IdPool("page", cache.num_pages)
        self.slots = IdPool("state slot", num_slots)
        self._released: list[int] = []
        self._leaving: dict[str, PreemptedSequence] = {}  # copied out by the next plan
        self._dropped: list[str] = []

    def take(self, sequence: Sequence, num_pages: int) -> None:
        """Give a sequence a slot and pages. The caller has checked that they are free."""
        sequence.page_ids = self.pages.allocate(num_pages)
        (sequence.state_slot,) = self.slots.allocate(1)

    def grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Add free pages until they cover ``num_tokens`` tokens; returns how many tokens they cover."""
        missing = num_pages_for(num_tokens, self.page_size) - len(sequence.page_ids)
        if missing > 0:
            sequence.page_ids += self.pages.allocate(min(missing, self.pages.num_free))
        return len(sequence.page_ids) * self.page_size

    def preempt(self, sequence: Sequence) -> None:
        """Take the seat away from a sequence that goes on later."""
        if sequence.num_computed_tokens and not sequence.on_host:
            self._leaving[sequence.request.request_id] = PreemptedSequence(
                request_id=sequence.request.request_id,
                state_slot=sequence.state_slot,
                page_ids=sequence.page_ids,
                num_tokens=sequence.num_computed_tokens,
            )
            sequence.on_host = True
        self._free(sequence)

    def end(self, sequence: Sequence) -> None:
        """Give back for good whatever a sequence holds: a seat, a host copy, both or neither."""
        if sequence.state_slot >= 0:
            self._released.append(sequence.state_slot)
            self._free(sequence)
        if sequence.on_host:
            leaving = self._leaving.pop(sequence.request.request_id, None)
            if leaving is None:
                self._dropped.append(sequence.request.request_id)
            else:  # the copy was never made
                self._released.append(leaving.state_slot)
            sequence.on_host = False

    def is_leaving(self, sequence: Sequence) -> bool:
        """Whether the next plan copies the sequence out."""
        return sequence.request.request_id in self._leaving

    def clear_after(self, plan: StepPlan) -> None:
        """Have everything given back that a plan may have left on device and host when it faulted midway."""
        self._released.extend(item.state_slot for item in plan.preempted)
        self._dropped.extend(item.request_id for item in plan.preempted)
        self._dropped.extend(item.request_id for item in plan.scheduled if item.is_resumed)

    def take_news(self) -> SeatNews:
        """What the next plan must say; said once."""
        if not (self._released or self._leaving or self._dropped):
            return NO_NEWS
        news = SeatNews(
            released_slots=tuple(self._released),
            preempted=tuple(self._leaving.values()),
            dropped_copies=tuple(self._dropped),
        )
        self._released.clear()
        self._leaving.clear()
        self._dropped.clear()
        return news

    def _free(self, sequence: Sequence) -> None:
        self.pages.free(sequence.page_ids)
        self.slots.free((sequence.state_slot,))
        sequence.page_ids, sequence.state_slot = (), -1
