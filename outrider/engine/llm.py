"""Offline use: load a checkpoint, generate for a list of prompts, or stream one.

There is no second engine here: ``generate`` and ``stream`` submit requests and step the same loop
that a server would, so they may be mixed freely from one thread.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import count
from pathlib import Path
from time import perf_counter
from types import TracebackType

import torch

from outrider.config import check_positive, resolve_num_draft_tokens
from outrider.engine.build import EngineLimits, build_engine, resolve_config
from outrider.engine.cost_file import cost_file, recall_costs, remember_costs
from outrider.engine.engine import Engine
from outrider.engine.load import (
    check_drafter_vocabulary,
    load_drafter_calibration,
    load_vocabulary,
    resolve_device,
    resolve_dtype,
    resolve_model_len,
)
from outrider.engine.memory import CacheReport, count_caches
from outrider.engine.metrics import EngineMetrics
from outrider.engine.outputs import RequestOutput, RunningSample, SampleOutput, collect_outputs
from outrider.engine.prefill import last_logits
from outrider.engine.profile import profile_rounds
from outrider.engine.resident import MemoryReport, count_memory
from outrider.engine.runner import Runner
from outrider.engine.watch import RoundWatch
from outrider.errors import RequestError, UnsupportedError, allocating
from outrider.models.dspark.block import BlockPredictor
from outrider.models.dspark.checkpoint import TargetTables
from outrider.models.dspark.config_json import read_config
from outrider.models.dspark.load import load_predictor
from outrider.models.kimi_k3.moe import ExpertForm
from outrider.models.numerics import NumericsChoice, NumericsMode, NumericsReport, ProbeMode, joined_report
from outrider.models.registry import load_target
from outrider.request import Request, RequestUpdate, SamplingParams, samples_of
from outrider.scheduling.admission import check_token_ids
from outrider.speculative.drafter import DSparkDrafter, NullDrafter
from outrider.speculative.lookup_drafter import LookupDrafter

__all__ = ["LLM", "Prompt", "RequestOutput", "SampleOutput"]

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


class LLM:
    """A target model, an optional drafter, and the engine around them.

    Args:
        model_path: checkpoint directory of the target.
        drafter: checkpoint directory of a DSpark drafter; None decodes plainly.
        speculation: "auto" (as much as measured cost and confidence say will pay), "off", or a fixed number of
            drafts in every round. A request may ask for less or for a fixed number, see SamplingParams.
        dtype: compute dtype, "bfloat16", "float32" or "float64"; None takes the checkpoint's.
        device: torch device.
        experts: "packed" keeps MXFP4 experts packed, "unpacked" decodes them once, "auto" takes the faster.
        max_num_seqs: sequences that run at once; each holds a recurrent state.
        max_model_len: prompt and output tokens of one sequence; None takes the model's, up to 8192.
        limits: further budgets.
        drafter_type: what stands around the drafter's model; a measurement may put a DSparkDrafter of its own here.
        lookup: draft from the text itself where it repeats, and ask the drafter's model where it does not.
        numerics: "exact" keeps a row's bits its own; "fast" takes the library's kernels and promises nothing.
        probe: start-up probe of exact numerics: "auto" takes the outcome of an earlier start on this machine,
            "force" probes anyway, "skip" never does.
        progress: called while the target loads, with (bytes done, bytes in total).
        watch: is shown every finished round, with the confidence of its drafts.

    Raises:
        UserError: a checkpoint or a value cannot be used; the message names it.
    """

    def __init__(  # noqa: PLR0913 - each is a choice that a caller may want to make
        self,
        model_path: str | Path,
        drafter: str | Path | None = None,
        *,
        speculation: str | int = "auto",
        dtype: str | None = None,
        device: str = "cpu",
        experts: ExpertForm = "auto",
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        limits: EngineLimits | None = None,
        drafter_type: Callable[..., DSparkDrafter] = DSparkDrafter,
        lookup: bool = True,
        numerics: NumericsMode = "exact",
        probe: ProbeMode = "auto",
        progress: Callable[[int, int], None] | None = None,
        watch: RoundWatch | None = None,
    ) -> None:
        model_path = Path(model_path)
        self._device = resolve_device(device)
        self.tokenizer, eos_token_ids = load_vocabulary(model_path)
        self.max_model_len = resolve_model_len(model_path, max_model_len)
        check_positive("max_model_len", self.max_model_len)
        choice = NumericsChoice(mode=numerics, probe=probe)
        self._target = load_target(
            model_path,
            dtype=resolve_dtype(model_path, dtype),
            device=self._device,
            experts=experts,
            numerics=choice,
            progress=progress,
        )
        predictor, calibration = None, None
        if drafter is not None and speculation not in ("off", 0):
            check_drafter_vocabulary(model_path, Path(drafter), self.tokenizer, eos_token_ids)
            wanted = speculation == "auto" or watch is not None
            predictor = self._load_predictor(Path(drafter), speculation, choice, confidence_wanted=wanted)
            calibration = load_drafter_calibration(Path(drafter))
        self.numerics: NumericsReport = (
            joined_report(self._target.numerics, predictor.numerics) if predictor else self._target.numerics
        )
        num_draft_tokens = predictor.num_draft_tokens if predictor else resolve_num_draft_tokens(speculation, 0)
        self.config = resolve_config(
            limits or EngineLimits(),
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            num_draft_tokens=num_draft_tokens,
            chunk_multiple=self._target.chunk_multiple,
            auto_lengths=speculation == "auto",
            drafter_context=predictor.config.max_context if predictor else None,
        )
        num_cache_rows = self.config.cache.num_pages * self.config.cache.page_size
        with allocating(f"the caches of {max_num_seqs} sequences and {num_cache_rows} tokens"):
            dspark = drafter_type(predictor, num_cache_rows=num_cache_rows) if predictor else None
            if dspark is not None:
                dspark.reserve(max_num_seqs)
            proposer = LookupDrafter(dspark) if dspark and lookup else dspark
            self._runner = Runner(
                self._target, proposer or NullDrafter(), self.config, self._device, calibration=calibration, watch=watch
            )
            self.engine: Engine = build_engine(
                self._target,
                proposer,
                self.config,
                device=self._device,
                tokenizer=self.tokenizer,
                eos_token_ids=eos_token_ids,
                runner=self._runner,
                watch=watch,
            )
        self.caches: CacheReport = count_caches(self._target, dspark, self.config)
        self.memory: MemoryReport = count_memory(self._target, predictor, self.caches)
        logger.info("%s", self.caches.summary())
        logger.info("%s", self.memory.summary())
        # None: drafts are not decided by cost.
        self._cost_file = self._find_costs(model_path, Path(drafter), experts) if drafter is not None else None
        self._ids = count()
        # Updates of live requests that their reader has not taken yet.
        self._mailbox: dict[str, list[RequestUpdate]] = {}

    def _load_predictor(
        self, drafter: Path, speculation: str | int, choice: NumericsChoice, *, confidence_wanted: bool
    ) -> BlockPredictor:
        config = read_config(drafter)
        return load_predictor(
            drafter,
            self._target,
            TargetTables(embedding_VD=self._target.embedding, head_VD=self._target.lm_head),
            max_context=self.max_model_len,
            num_draft_tokens=resolve_num_draft_tokens(speculation, config.num_draft_tokens),
            with_confidence=confidence_wanted and config.confidence is not None,
            numerics=choice,
        )

    def profile_costs(self) -> None:
        """Measure what rounds cost here, unless an earlier start on this machine did; for whoever serves for long.

        It takes a few seconds at most, while nothing runs. Without it, and without an earlier outcome, costs are
        learnt from the rounds that are served. Nothing happens where drafts are not decided by cost.

        Raises:
            RequestError: a request is running.
        """
        if self._cost_file is None or recall_costs(self._cost_file) is not None:
            return
        if self.engine.has_work:
            raise RequestError("costs are measured while requests run, which would disturb both; do it before")
        costs = profile_rounds(self._runner, self.config, self._target.vocab_size)
        if costs.is_profiled:
            self._runner.take_costs(costs)
            remember_costs(self._cost_file, costs)

    def _find_costs(self, model_path: Path, drafter_path: Path, experts: ExpertForm) -> Path | None:
        """Take the costs that an earlier start measured, if it did; the file they are or will be in."""
        if not self.config.auto_lengths:
            return None
        settings = {
            "dtype": str(self._target.embedding.dtype),
            "experts": experts,
            "numerics": self.numerics.summary(),
            "page_size": self.config.cache.page_size,
            "seats": self.config.scheduler.max_num_seqs,
            "max_model_len": self.max_model_len,
            "drafts": self.config.num_draft_tokens,
        }
        file = cost_file(model_path, drafter_path, self._device, settings)
        if (costs := recall_costs(file)) is not None:
            self._runner.take_costs(costs)
        return file

    @property
    def metrics(self) -> EngineMetrics:
        """Totals since loading."""
        return self.engine.metrics

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue every prompt; results in order of the prompts.

        Args:
            prompts: texts or token ids.
            sampling: for all prompts, or one each; None is the default.

        Raises:
            RequestError: a prompt cannot run; then none of them runs.
        """
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
            raise RequestError(f"prompts is {type(prompts).__name__}; pass a list of prompts")
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        if not isinstance(sampling, Sequence) or not all(isinstance(item, SamplingParams) for item in sampling):
            raise RequestError("sampling is neither SamplingParams nor a list of them; pass one for all or one each")
        if len(sampling) != len(prompts):
            raise RequestError(f"{len(sampling)} sampling parameters for {len(prompts)} prompts; pass one each")
        running: list[RunningSample] = []
        try:
            for prompt, params in zip(prompts, sampling, strict=True):
                self._submit(prompt, params, running)
            while any(request.last is None for request in running):
                for request in running:
                    request.take(self._mailbox[request.request.request_id])
                if any(request.last is None for request in running):
                    self._step()
        finally:
            for request in running:
                self._drop(request.request.request_id)
        return collect_outputs(running)

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generator[RequestUpdate]:
        """Continue one prompt, yielding an update per round and sample; the last of each has a ``finish_reason``.

        The request is submitted when the first update is asked for, which may raise RequestError.
        Closing the iterator early aborts it.
        """
        running: list[RunningSample] = []
        try:
            self._submit(prompt, sampling or SamplingParams(), running)
            mailboxes = [self._mailbox[sample.request.request_id] for sample in running]
            num_unfinished = len(running)
            while True:
                for mailbox in mailboxes:
                    for update in mailbox:
                        yield update
                        num_unfinished -= update.finish_reason is not None
                    mailbox.clear()
                if not num_unfinished:
                    return
                self._step()
        finally:
            for sample in running:
                self._drop(sample.request.request_id)

    def last_logits(self, prompt_token_ids: Sequence[int]) -> torch.Tensor:
        """Logits ``[V]`` after the prompt, compute dtype; running requests are not touched.

        Raises:
            RequestError: the prompt is empty, too long, or holds a foreign id.
        """
        if not isinstance(prompt_token_ids, Iterable):
            raise RequestError(f"prompt_token_ids is {type(prompt_token_ids).__name__}; pass a list of token ids")
        token_ids = tuple(prompt_token_ids)
        check_token_ids("prompt_token_ids", token_ids, self._target.vocab_size)
        if not 1 <= len(token_ids) <= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; use 1 up to the {self.max_model_len}-token context"
            )
        return last_logits(self._target, token_ids, self.config, self._device)

    def shutdown(self) -> None:
        """Abort what runs and refuse further requests."""
        self._deliver(self.engine.shutdown())

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _submit(self, prompt: Prompt, sampling: SamplingParams, running: list[RunningSample]) -> None:
        """Submit every sample of a prompt and append it to ``running``, also if a later one is refused."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UnsupportedError("the checkpoint has no tokenizer, so a text prompt cannot run; pass token ids")
            prompt = self.tokenizer.encode(prompt)
        elif isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise RequestError(f"the prompt is {type(prompt).__name__}; pass a text or a list of token ids")
        request = Request(
            request_id=f"request-{next(self._ids)}",
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            arrival_time=perf_counter(),
        )
        for sample in samples_of(request):
            update = self.engine.submit(sample)
            self._mailbox[sample.request_id] = [] if update is None else [update]
            running.append(RunningSample(request.request_id, sample))

    def _step(self) -> None:
        self._deliver(self.engine.step())

    def _deliver(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            if update.request_id in self._mailbox:
                self._mailbox[update.request_id].append(update)

    def _drop(self, request_id: str) -> None:
        """Forget a request; aborts it when it still runs."""
        self.engine.abort(request_id)
        del self._mailbox[request_id]
