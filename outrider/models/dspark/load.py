"""From a drafter directory to a predictor bound to its target."""

from pathlib import Path

import torch

from outrider.models.dspark.block import SILU, BlockPredictor
from outrider.models.dspark.checkpoint import TargetTables, load_model
from outrider.models.dspark.config import DSparkConfig, check_target
from outrider.models.dspark.kernels import choose_block_kernels
from outrider.models.dspark.model import DSparkModel
from outrider.models.dspark.numerics import block_checks
from outrider.models.kernels import PLAIN_KERNELS, Kernels
from outrider.models.numerics import (
    NumericsChoice,
    NumericsReport,
    chosen_linear,
    linear_checks,
    resolve_numerics,
    with_native_rows,
)
from outrider.models.protocol import TargetModel
from outrider.ops.native.library import library_for
from outrider.ops.probe import OpCheck
from outrider.ops.probe_ops import activation_check, activation_name, norm_check, norm_name

__all__ = ["load_predictor"]

LINEAR = "drafter linear"


def load_predictor(
    path: Path,
    target: TargetModel,
    tables: TargetTables,
    *,
    max_context: int,
    num_draft_tokens: int | None = None,
    with_confidence: bool = False,
    numerics: NumericsChoice | None = None,
) -> BlockPredictor:
    """Load a drafter in the dtype and on the device of its target.

    Args:
        path: directory with ``config.json`` and safetensors files.
        target: the model whose embedding and head the drafter borrows.
        tables: that embedding and head as tensors; copies in the checkpoint must equal them.
        max_context: positions a sequence may reach.
        num_draft_tokens: drafts per round; None is all that the block was trained for.
        with_confidence: compute the confidence of each draft; off until a policy reads it.
        numerics: how products are computed and probed; None is exact.

    Raises:
        CheckpointError: weights do not match their config, or the drafter is another target's.
        ConfigError: the config contradicts itself, or too many drafts are asked for.
        UnsupportedError: a drafter family or feature that is not offered.
    """
    model = load_model(path, tables, dtype=tables.embedding_VD.dtype, device=tables.embedding_VD.device)
    check_target(
        model.config, vocab_size=target.vocab_size, hidden_size=target.hidden_size, num_layers=target.num_layers
    )
    choice, dtype, device = numerics or NumericsChoice(), tables.embedding_VD.dtype, tables.embedding_VD.device
    shapes = _weight_shapes(model)
    checks = [*linear_checks(LINEAR, shapes, dtype, device), *_row_checks(model.config, dtype, device)]
    checks += block_checks(model.config, dtype, device)
    report = resolve_numerics(checks, choice, dtype=dtype, device=device)
    fast = choice.mode == "fast"
    kernels = PLAIN_KERNELS if fast else _kernels(model.config, shapes, dtype, device, report)
    return BlockPredictor(
        model,
        embedding_VD=tables.embedding_VD,
        head=target.head,
        kernels=kernels,
        numerics=report,
        max_context=max_context,
        num_draft_tokens=num_draft_tokens,
        with_confidence=with_confidence,
        block_kernels=choose_block_kernels(model.config, dtype, device, None if fast else report.geometries),
    )


def _row_checks(config: DSparkConfig, dtype: torch.dtype, device: torch.device) -> list[OpCheck]:
    """Norms and activation."""
    native, eps = library_for(dtype, device), config.rms_norm_eps
    norms = [norm_check(width, eps, dtype, device, native) for width in sorted(_norm_widths(config))]
    return [*norms, activation_check(SILU, config.intermediate_size, dtype, device, native)]


def _norm_widths(config: DSparkConfig) -> set[int]:
    return {config.hidden_size, config.head_dim} | ({config.target_hidden_size} if config.aux_norm else set())


def _kernels(
    config: DSparkConfig, shapes: set[tuple[int, int]], dtype: torch.dtype, device: torch.device, report: NumericsReport
) -> Kernels:
    """Kernels in the geometries that were found."""
    norms = [norm_name(width) for width in _norm_widths(config)]
    return with_native_rows(
        Kernels(linear=chosen_linear(LINEAR, shapes, dtype, device, report.geometries)),
        norms=norms,
        mixes=norms,  # one candidate: a sum and a norm
        activations=[activation_name(SILU, config.intermediate_size)],
        dtype=dtype,
        device=device,
        geometries=report.geometries,
    )


def _weight_shapes(model: DSparkModel) -> set[tuple[int, int]]:
    """Shapes of all matrices that rows are multiplied with, in the joined form that inference uses."""
    config = model.config
    query_rows, key_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {(parameter.shape[0], parameter.shape[1]) for parameter in model.parameters() if parameter.dim() == 2}
    return shapes | {
        (query_rows + 2 * key_rows, config.hidden_size),
        (2 * config.num_layers * key_rows, config.hidden_size),  # keys and values of the context, all layers
        (2 * config.intermediate_size, config.hidden_size),
    }
