"""What the caches of an engine take, and what one request takes of them: counted from layouts, before use."""

from dataclasses import dataclass

from outrider.cache.layout import PagedLayout, RecurrentLayout
from outrider.config import EngineConfig
from outrider.models.inspect import readable_bytes
from outrider.models.protocol import TargetModel
from outrider.speculative.drafter import DSparkDrafter

__all__ = ["CacheReport", "count_caches", "num_log_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """Bytes on the device; weights and temporaries are not counted."""

    num_seqs: int  # seats
    num_cache_tokens: int  # of all seats together
    num_draft_tokens: int
    max_model_len: int
    latent_bytes: int  # per token
    context_bytes: int  # per token, of the drafter; 0 without one
    waiting_bytes: int  # taps of one request that wait for the drafter; 0 without one
    state_bytes: int  # recurrent states of one request, whatever its length
    window_bytes: int  # conv windows of one request
    log_row_bytes: int  # of one decode or verify row in the delta log
    num_log_rows: int

    @property
    def total_bytes(self) -> int:
        """All caches."""
        seat = self.state_bytes + self.window_bytes + self.waiting_bytes
        seats = self.num_seqs * seat + self.num_log_rows * self.log_row_bytes
        return seats + self.num_cache_tokens * (self.latent_bytes + self.context_bytes)

    def request_bytes(self, num_tokens: int, *, speculation: bool) -> int:
        """What one request of ``num_tokens`` tokens takes, its rows in the log included."""
        per_token = self.latent_bytes + (self.context_bytes if speculation else 0)
        num_rows = 1 + (self.num_draft_tokens if speculation else 0)
        waiting = self.waiting_bytes if speculation else 0
        seat = self.state_bytes + self.window_bytes + waiting
        return seat + num_rows * self.log_row_bytes + num_tokens * per_token

    def summary(self) -> str:
        """One line for a person."""
        size, longest = readable_bytes, self.max_model_len
        context = f" + {self.context_bytes:,} B of drafter context" if self.context_bytes else ""
        waiting = f", {size(self.waiting_bytes)} of waiting taps" if self.waiting_bytes else ""
        request = size(self.request_bytes(longest, speculation=False))
        if self.num_draft_tokens:
            with_drafts = size(self.request_bytes(longest, speculation=True))
            request = f"{with_drafts} with {self.num_draft_tokens} drafts, {request} without"
        return (
            f"caches {size(self.total_bytes)}: {self.num_seqs} seats of {size(self.state_bytes)} KDA states and "
            f"{size(self.window_bytes)} conv windows{waiting}, {self.num_cache_tokens:,} tokens of "
            f"{self.latent_bytes:,} B of latents{context}, {self.num_log_rows} log rows of "
            f"{size(self.log_row_bytes)}; a request of {longest:,} tokens takes {request}"
        )


def num_log_rows(config: EngineConfig) -> int:
    """Rows of the delta log: decode and verify rows of a step, no prompt rows."""
    scheduler = config.scheduler
    return min(scheduler.max_step_rows, scheduler.max_num_seqs * (1 + config.num_draft_tokens))


def count_caches(target: TargetModel, drafter: DSparkDrafter | None, config: EngineConfig) -> CacheReport:
    """The report of an engine of ``config``; layers of a kind that the target does not have count 0."""
    paged = [layout for layout in target.cache_layouts if isinstance(layout, PagedLayout)]
    recurrent = [layout for layout in target.cache_layouts if isinstance(layout, RecurrentLayout)]
    return CacheReport(
        num_seqs=config.scheduler.max_num_seqs,
        num_cache_tokens=config.cache.num_pages * config.cache.page_size,
        num_draft_tokens=config.num_draft_tokens,
        max_model_len=config.scheduler.max_model_len,
        latent_bytes=sum(layout.bytes_per_token for layout in paged),
        context_bytes=drafter.context_bytes_per_token if drafter else 0,
        waiting_bytes=drafter.waiting_bytes_per_slot if drafter else 0,
        state_bytes=sum(layout.state_bytes_per_slot for layout in recurrent),
        window_bytes=sum(layout.conv_bytes_per_slot for layout in recurrent),
        log_row_bytes=sum(layout.log_bytes_per_row for layout in recurrent),
        num_log_rows=num_log_rows(config),
    )
