"""From a drafter directory to a predictor bound to its target."""

from pathlib import Path

from outrider.models.dspark.block import BlockPredictor
from outrider.models.dspark.checkpoint import TargetTables, load_model
from outrider.models.dspark.config import check_target
from outrider.models.dspark.numerics import LINEAR, drafter_checks, weight_shapes
from outrider.models.numerics import NumericsChoice, chosen_linear, resolve_numerics
from outrider.models.protocol import TargetModel
from outrider.ops.linear import linear_plain

__all__ = ["load_predictor"]


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
    report = resolve_numerics(drafter_checks(model, dtype, device), choice, dtype=dtype, device=device)
    exact = choice.mode == "exact"
    return BlockPredictor(
        model,
        embed=target.embed,
        head=target.head,
        linear=chosen_linear(LINEAR, weight_shapes(model), dtype, report.geometries) if exact else linear_plain,
        numerics=report,
        max_context=max_context,
        num_draft_tokens=num_draft_tokens,
        with_confidence=with_confidence,
    )
