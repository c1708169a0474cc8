"""Copies of one sequence's device state on the host: out when it is preempted, in when it comes back.

Nothing is pending between rounds, so the committed positions are all there is: latents and drafter
context of positions ``0..num_tokens-1``, one recurrent state and one conv window per layer. They are
copied, not recomputed, hence the sequence goes on with the very bits it had, in another slot and on
other pages.

Bytes of one copy: ``RecurrentLayout.bytes_per_slot`` and, per token, ``PagedLayout.bytes_per_token`` plus
the drafter's context row. Running and preempted sequences together never exceed ``max_num_seqs``, so at
most that many copies of at most ``max_model_len`` tokens exist.

Dims: R cache rows of the sequence, in order of position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.cache.cache_set import CacheSet, CacheSnapshot
from outrider.engine.batching import upload
from outrider.speculative.drafter import Drafter

__all__ = ["HostCopy", "cache_rows", "copy_in", "copy_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """Everything the device knew about one sequence."""

    num_tokens: int
    caches: CacheSnapshot
    drafter: tuple[torch.Tensor, ...]  # opaque to everyone but its drafter

    @property
    def num_bytes(self) -> int:
        """Bytes on the host."""
        return self.caches.num_bytes + sum(tensor.nbytes for tensor in self.drafter)


def copy_out(caches: CacheSet, drafter: Drafter, *, slot: int, page_ids: Sequence[int], num_tokens: int) -> HostCopy:
    """Copy the committed state of the sequence in ``slot`` to the host; the device keeps it as it is."""
    rows_R = cache_rows(caches, page_ids, num_tokens)
    return HostCopy(num_tokens=num_tokens, caches=caches.snapshot(slot, rows_R), drafter=drafter.snapshot(slot, rows_R))


def copy_in(caches: CacheSet, drafter: Drafter, copy: HostCopy, *, slot: int, page_ids: Sequence[int]) -> None:
    """Let the sequence of a copy go on in an empty ``slot`` and on ``page_ids``."""
    rows_R = cache_rows(caches, page_ids, copy.num_tokens)
    caches.restore(slot, rows_R, copy.caches)
    drafter.restore(slot, rows_R, copy.drafter)


def cache_rows(caches: CacheSet, page_ids: Sequence[int], num_tokens: int) -> torch.Tensor:
    """Flat rows ``[R]`` of the paged caches that hold positions ``0..num_tokens-1``."""
    page_size = caches.latents.page_size
    (pages_P,) = upload(caches.latents.device, page_ids)
    offsets = torch.arange(page_size, device=caches.latents.device)
    return (pages_P[:, None] * page_size + offsets).flatten()[:num_tokens]
