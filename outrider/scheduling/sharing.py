"""Samples of one prompt: the first computes it, the others take over its state from there.

What they can share ends at the last multiple of the chunk before the prompt's last token. Up to there one sample, the
leader, computes as it would alone, with a cut that changes no bit; its state at the cut is copied to the host, as for
a preemption, and every other sample goes on from that copy with the last few tokens, which give each its own first
draw. Nobody waits for a sample that is not running: if the leader leaves, another one leads.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.errors import RequestError
from outrider.plan import SharedPrompt
from outrider.scheduling.sequence import Sequence, SequenceStatus

__all__ = ["PromptSharing", "SharedStart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStart:
    """Where the next prompt chunk of a sequence begins, and where it has to end at the latest."""

    begin: int
    end: int
    copy: str | None  # prompt id whose copy the sequence takes in; None goes on with its own state


@dataclass(slots=True, kw_only=True, eq=False)
class _Group:
    """Unfinished samples of one prompt."""

    prompt_token_ids: tuple[int, ...]
    num_shared: int  # tokens up to the cut; at least one chunk
    members: dict[str, Sequence] = field(default_factory=dict)  # in order of arrival
    has_copy: bool = False

    def takers(self) -> list[Sequence]:
        """Samples that have computed nothing yet."""
        return [s for s in self.members.values() if s.num_computed_tokens == 0]

    def leads(self, sequence: Sequence) -> bool:
        """Whether the others wait for this one."""
        return sequence.status is SequenceStatus.RUNNING and sequence.num_computed_tokens < self.num_shared


class PromptSharing:
    """Who computes a shared prompt, who waits, and which copies the host holds.

    Args:
        chunk_multiple: prompts are cut at its multiples.
        max_copies: copies at once; without room for one, samples compute their prompts themselves.
    """

    def __init__(self, chunk_multiple: int, max_copies: int) -> None:
        self._chunk_multiple, self._max_copies = chunk_multiple, max_copies
        self._groups: dict[str, _Group] = {}
        self._spent: list[str] = []

    @property
    def copied_prompts(self) -> dict[str, int]:
        """Prompts with a copy on the host, and the tokens of each."""
        return {name: group.num_shared for name, group in self._groups.items() if group.has_copy}

    def join(self, sequence: Sequence) -> None:
        """Take in a new sequence; nothing happens unless its request names a prompt that samples share.

        Raises:
            RequestError: samples under one name have different prompts.
        """
        request = sequence.request
        num_shared = (sequence.num_prompt_tokens - 1) // self._chunk_multiple * self._chunk_multiple
        if request.prompt_id is None or num_shared == 0:
            return
        group = self._groups.get(request.prompt_id)
        if group is None:
            group = _Group(prompt_token_ids=request.prompt_token_ids, num_shared=num_shared)
        if group.prompt_token_ids != request.prompt_token_ids:
            raise RequestError(
                f"prompt_id={request.prompt_id!r} names another prompt of {len(group.prompt_token_ids)} tokens; use "
                "one id per prompt"
            )
        self._groups[request.prompt_id] = group
        group.members[request.request_id] = sequence

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, wherever it was."""
        name, group = self._group_of(sequence)
        if group is None:
            return
        group.members.pop(sequence.request.request_id, None)  # one that asks for no token never joined
        if not group.members:
            if group.has_copy:
                self._spent.append(name)
            del self._groups[name]

    def new_copies(self) -> tuple[SharedPrompt, ...]:
        """Copies that the next plan must make, before anything else touches the leaders' seats."""
        found = []
        for name, group in self._groups.items():
            if group.has_copy or not self._has_room() or not group.takers():
                continue
            leader = next((s for s in group.members.values() if _stands_at(s, group.num_shared)), None)
            if leader is not None:
                group.has_copy = True
                found.append(
                    SharedPrompt(
                        prompt_id=name,
                        state_slot=leader.state_slot,
                        page_ids=leader.page_ids,
                        num_tokens=group.num_shared,
                    )
                )
        return tuple(found)

    def start(self, sequence: Sequence) -> SharedStart | None:
        """Where a running sequence goes on with its prompt; None while another sample computes it."""
        begin, end = sequence.num_computed_tokens, sequence.num_prompt_tokens
        name, group = self._group_of(sequence)
        if group is None or begin >= group.num_shared:
            return SharedStart(begin=begin, end=end, copy=None)
        if begin == 0 and group.has_copy:
            return SharedStart(begin=group.num_shared, end=end, copy=name)
        if begin == 0 and self._waits(sequence, group):
            return None
        others_wait = self._has_room() and any(taker is not sequence for taker in group.takers())
        return SharedStart(begin=begin, end=group.num_shared if others_wait else end, copy=None)

    def spent_copies(self) -> tuple[str, ...]:
        """Copies that nobody takes in after the next plan; said once."""
        for name, group in self._groups.items():
            if group.has_copy and not group.takers():
                group.has_copy = False
                self._spent.append(name)
        spent = tuple(self._spent)
        self._spent.clear()
        return spent

    def clear_after(self, made: Iterable[SharedPrompt], spent: Iterable[str]) -> None:
        """After a faulted plan: whatever it was to copy may not be there, and what it was to drop may be."""
        names = [copy.prompt_id for copy in made]
        for name in names:
            if name in self._groups:
                self._groups[name].has_copy = False
        self._spent.extend((*names, *spent))

    def _group_of(self, sequence: Sequence) -> tuple[str, _Group | None]:
        name = sequence.request.prompt_id
        return ("", None) if name is None else (name, self._groups.get(name))

    def _waits(self, sequence: Sequence, group: _Group) -> bool:
        """Whether another running sample is ahead; of those that have computed nothing, the oldest."""
        return self._has_room() and any(
            group.leads(other) and (other.num_computed_tokens > 0 or other.arrival < sequence.arrival)
            for other in group.members.values()
            if other is not sequence
        )

    def _has_room(self) -> bool:
        return len(self.copied_prompts) < self._max_copies


def _stands_at(sequence: Sequence, num_tokens: int) -> bool:
    """Whether the device holds the state of a sequence at this very length."""
    running = sequence.status is SequenceStatus.RUNNING and not sequence.on_host
    return running and sequence.num_computed_tokens == num_tokens
