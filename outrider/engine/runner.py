"""Owns the device side of one engine: models, caches, page table; turns a plan into a result."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from outrider.cache.cache_set import CacheBudget, CacheSet
from outrider.config import EngineConfig
from outrider.engine.accept import Acceptance
from outrider.engine.batching import PageTable
from outrider.engine.memory import num_log_rows
from outrider.engine.preemption import HostCopy, copy_in, copy_out
from outrider.engine.round import RoundParts, run_round
from outrider.engine.watch import RoundWatch
from outrider.errors import ConfigError
from outrider.models.protocol import AuxStream, TargetModel
from outrider.plan import StepPlan, StepResult
from outrider.scheduling.admission import num_pages_for
from outrider.speculative.auto import AutoLengths
from outrider.speculative.calibration import Calibration
from outrider.speculative.confidence import SurvivalEstimator
from outrider.speculative.cost import RoundCosts
from outrider.speculative.drafter import Drafter
from outrider.speculative.lengths import AllDrafts, LengthPolicy
from outrider.trace import trace_range

__all__ = ["Runner"]


class Runner:
    """Runs rounds on one device.

    Args:
        target: the model; its tapped layers are set to what the drafter asks for.
        drafter: proposes; NullDrafter for plain decoding.
        config: budgets.
        device: where the caches are allocated.
        calibration: what the drafter's confidence is worth.
        watch: is shown every round.

    Raises:
        ConfigError: more drafts per round are asked for than the drafter proposes.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        config: EngineConfig,
        device: torch.device,
        *,
        calibration: Calibration | None = None,
        watch: RoundWatch | None = None,
    ) -> None:
        if config.num_draft_tokens > drafter.num_draft_tokens:
            raise ConfigError(
                f"num_draft_tokens={config.num_draft_tokens} exceeds the {drafter.num_draft_tokens} that the "
                "drafter proposes; lower it"
            )
        target.set_aux_layers(drafter.aux_layer_ids, cast(AuxStream, drafter.aux_hidden_stream))
        self._caches = CacheSet.build(
            target.cache_layouts,
            CacheBudget(
                num_pages=config.cache.num_pages,
                page_size=config.cache.page_size,
                num_slots=config.scheduler.max_num_seqs,
                max_step_rows=num_log_rows(config),
            ),
            device,
        )
        page_table = PageTable(
            num_slots=config.scheduler.max_num_seqs,
            max_pages=num_pages_for(config.scheduler.max_model_len, config.cache.page_size),
            page_size=config.cache.page_size,
            device=device,
        )
        num_drafts = self._num_draft_tokens = config.num_draft_tokens
        lengths: LengthPolicy = AllDrafts()
        if config.auto_lengths:
            lengths = AutoLengths(
                num_drafts,
                survival=SurvivalEstimator(num_drafts, calibration),
                prior=calibration.typical_survival(num_drafts) if calibration else None,
            )
        self._lengths = lengths
        self._parts = RoundParts(
            target=target,
            drafter=drafter,
            lengths=watch.wrap(lengths, num_drafts, calibration) if watch else lengths,
            caches=self._caches,
            acceptance=Acceptance(
                self._caches,
                max_sequences=config.scheduler.max_num_seqs,
                num_draft_tokens=config.num_draft_tokens,
            ),
            page_table=page_table,
            no_drafts=torch.empty((1, 0), dtype=torch.int64, device=device),
            max_step_rows=config.scheduler.max_step_rows,
        )
        # Slots the drafter knows, with the pages that the page table has. A slot that faulted before its
        # first round is in the scheduler's list of released slots, but not here.
        self._seated: dict[int, tuple[int, ...]] = {}
        self._host_copies: dict[str, HostCopy] = {}  # by request id
        self._prompt_copies: dict[str, HostCopy] = {}  # by prompt id

    @property
    def caches(self) -> CacheSet:
        """The device state, for inspection."""
        return self._caches

    @property
    def host_bytes(self) -> dict[str, int]:
        """Bytes that each preempted sequence holds on the host, by request id."""
        return {request_id: copy.num_bytes for request_id, copy in self._host_copies.items()}

    @property
    def prompt_bytes(self) -> dict[str, int]:
        """Bytes of each copy of a prompt that samples share, by prompt id."""
        return {prompt_id: copy.num_bytes for prompt_id, copy in self._prompt_copies.items()}

    @property
    def drafter(self) -> Drafter:
        """Who proposes."""
        return self._parts.drafter

    @property
    def num_draft_tokens(self) -> int:
        """Drafts per round at most."""
        return self._num_draft_tokens

    def take_costs(self, costs: RoundCosts) -> None:
        """Decide drafts by these costs from now on; nothing happens where drafts are not decided by cost."""
        if isinstance(self._lengths, AutoLengths):
            self._lengths.costs = costs

    @torch.inference_mode()
    def run(self, plan: StepPlan, *, lengths: LengthPolicy | None = None, drafter: Drafter | None = None) -> StepResult:
        """Release, copy out, seat and run; an empty plan only releases and copies out.

        Args:
            plan: of the round.
            lengths: decides the drafts of this round instead of the engine's own policy, to measure.
            drafter: proposes in this round instead of the engine's own, to which it passes everything else on.
        """
        with trace_range("round"):
            self._release(plan.released_slots)
            for request_id in plan.dropped_copies:
                # A copy that faulted is in the scheduler's list, but not here.
                self._host_copies.pop(request_id, None)
            self._copy_out(plan)
            self._seat(plan)
            for prompt_id in plan.spent_prompts:
                self._prompt_copies.pop(prompt_id, None)
            parts = self._parts
            if lengths is not None or drafter is not None:
                parts = replace(parts, lengths=lengths or parts.lengths, drafter=drafter or parts.drafter)
            return run_round(parts, plan)

    def _release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot in self._seated:
                del self._seated[slot]
                self._parts.drafter.release((slot,))

    def _copy_out(self, plan: StepPlan) -> None:
        for item in plan.preempted:
            self._host_copies[item.request_id] = copy_out(
                self._caches,
                self._parts.drafter,
                slot=item.state_slot,
                page_ids=item.page_ids,
                num_tokens=item.num_tokens,
            )
            self._release((item.state_slot,))
        for shared in plan.shared_prompts:
            self._prompt_copies[shared.prompt_id] = copy_out(
                self._caches,
                self._parts.drafter,
                slot=shared.state_slot,
                page_ids=shared.page_ids,
                num_tokens=shared.num_tokens,
            )

    def _seat(self, plan: StepPlan) -> None:
        caches, drafter = self._caches, self._parts.drafter
        for item in plan.scheduled:
            slot = item.state_slot
            if self._seated.get(slot) is not item.page_ids:  # new here, or grown
                self._parts.page_table.assign(slot, item.page_ids)
            if item.is_first:
                caches.reset((slot,))
                drafter.reset((slot,))
                if self._parts.lengths.gives_up(item, len(plan.scheduled)):
                    drafter.lapse((slot,))
            elif item.is_resumed:
                copy_in(caches, drafter, self._host_copies.pop(item.request_id), slot=slot, page_ids=item.page_ids)
            elif item.shared_prompt is not None:
                copy_in(caches, drafter, self._prompt_copies[item.shared_prompt], slot=slot, page_ids=item.page_ids)
            self._seated[slot] = item.page_ids
