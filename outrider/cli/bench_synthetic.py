"""The engines of `outrider bench step --synthetic-acceptance`: one with a drafter, plain ones in both numerics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.bench.synthetic import (
    ForcedTarget,
    SyntheticCell,
    check_rates,
    measure_synthetic,
    tokens_needed,
)
from outrider.config import EngineConfig
from outrider.engine.build import EngineLimits, build_engine, resolve_config
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.models.dspark.checkpoint import TargetTables
from outrider.models.dspark.config_json import read_config
from outrider.models.dspark.load import load_predictor
from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.numerics import NumericsChoice
from outrider.speculative.drafter import DSparkDrafter

__all__ = ["check_synthetic", "synthetic_cells"]

MAX_PREFILL_TOKENS = 4096  # prompt tokens of one round: the fewer rounds, the less a drafting engine runs ahead


def check_synthetic(rates: Sequence[float], drafter: Path | None) -> None:
    """Refuse rates that do not fit the drafter, before anything is loaded.

    Raises:
        ConfigError: there is no drafter, or a rate or their number is out of range.
    """
    if drafter is None:
        raise ConfigError("--synthetic-acceptance runs real proposals; give --drafter, or a shape that has one")
    check_rates(rates, read_config(drafter).num_draft_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """One cell: what each sequence is and may become."""

    slots: int
    context: int
    max_tokens: int
    prefill_tokens: int

    @property
    def max_model_len(self) -> int:
        return self.context + self.max_tokens


def synthetic_cells(
    plain: Mapping[str, KimiK3Model],
    drafted: KimiK3Model,
    drafter: Path,
    *,
    rates: Sequence[float],
    slots: Sequence[int],
    contexts: Sequence[int],
    limit: int,
    num_rounds: int,
    numerics: NumericsChoice,
    progress: Callable[[str], None],
) -> tuple[list[SyntheticCell], list[str]]:
    """Measure every combination of slots and contexts.

    Args:
        plain: targets of the plain arms, by numerics; nothing is tapped.
        drafted: a target of its own for the drafting arm, because taps are set on the model.
        drafter: its drafter.
        rates: acceptance.
        slots: sequences that decode together.
        contexts: prompt tokens.
        limit: positions of the model.
        num_rounds: speculative rounds of a cell.
        numerics: of the drafting arm.
        progress: gets a line now and then.

    Returns:
        The cells, and a line for each context that does not fit.
    """
    num_drafts = read_config(drafter).num_draft_tokens
    cells, left_out = [], []
    for context in contexts:
        for num_slots in slots:
            load = _load_of(num_slots, context, num_rounds, num_drafts, drafted.chunk_multiple)
            if load.max_model_len > limit:
                left_out.append(
                    f"{num_slots} slots, context {context}: with up to {load.max_tokens} tokens to generate it exceeds "
                    f"the {limit} positions of the model"
                )
                continue
            progress(f"rounds of {num_slots} slots, context {context}")
            cells.append(_cell(plain, drafted, drafter, load, rates, num_rounds, num_drafts, numerics))
    return cells, left_out


def _load_of(slots: int, context: int, num_rounds: int, num_drafts: int, chunk: int) -> _Load:
    prefill_tokens = max(chunk, min(MAX_PREFILL_TOKENS, slots * (context + chunk)))
    prefill_rounds = -(-slots * (context + chunk) // max(1, prefill_tokens - chunk)) + 1
    return _Load(
        slots=slots,
        context=context,
        max_tokens=tokens_needed(num_rounds, num_drafts, prefill_rounds),
        prefill_tokens=prefill_tokens,
    )


def _cell(
    plain: Mapping[str, KimiK3Model],
    drafted: KimiK3Model,
    drafter: Path,
    load: _Load,
    rates: Sequence[float],
    num_rounds: int,
    num_drafts: int,
    numerics: NumericsChoice,
) -> SyntheticCell:
    device = drafted.embedding.device
    predictor = load_predictor(
        drafter,
        drafted,
        TargetTables(embedding_VD=drafted.embedding, head_VD=drafted.lm_head),
        max_context=load.max_model_len,
        numerics=numerics,
    )
    forced = ForcedTarget(drafted, rates)
    config = _config(load, num_drafts, drafted.chunk_multiple)
    num_cache_rows = config.cache.num_pages * config.cache.page_size
    arms = {f"plain {mode}": _plain(target, load, device) for mode, target in plain.items()}
    arms["spec"] = build_engine(
        forced.as_target(), DSparkDrafter(predictor, num_cache_rows=num_cache_rows), config, device=device
    )
    return measure_synthetic(
        arms,
        forced,
        rates,
        slots=load.slots,
        context=load.context,
        num_rounds=num_rounds,
        max_tokens=load.max_tokens,
        vocab_size=drafted.vocab_size,
    )


def _config(load: _Load, num_drafts: int, chunk_multiple: int) -> EngineConfig:
    return resolve_config(
        EngineLimits(max_prefill_tokens=load.prefill_tokens),
        max_num_seqs=load.slots,
        max_model_len=load.max_model_len,
        num_draft_tokens=num_drafts,
        chunk_multiple=chunk_multiple,
    )


def _plain(target: KimiK3Model, load: _Load, device: torch.device) -> Engine:
    return build_engine(target, None, _config(load, 0, target.chunk_multiple), device=device)
