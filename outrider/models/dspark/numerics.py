"""What the start-up probe checks of a drafter.

A row whose bits depend on its company changes drafts, hence acceptance, and under the rules with coins the tokens.
"""

from dataclasses import replace

import torch

from outrider.models.dspark.config import MarkovKind
from outrider.models.dspark.joined import block_mask
from outrider.models.dspark.model import DSparkModel
from outrider.models.numerics import linear_checks
from outrider.ops.activation import Activation
from outrider.ops.invariant import island_dtype, sigmoid, tanh
from outrider.ops.norm import rms_norm
from outrider.ops.probe import NUM_ROWS, OpCheck, company_violation, fixed_check, random_rows
from outrider.ops.probe_block import BlockSizes, block_attention_check
from outrider.ops.probe_ops import activation_check, norm_check

__all__ = ["LINEAR", "drafter_checks", "weight_shapes"]

LINEAR = "drafter linear"


def drafter_checks(model: DSparkModel, dtype: torch.dtype, device: torch.device) -> tuple[OpCheck, ...]:
    """Every operation that a row of the drafter passes through, at its sizes; all names begin with "drafter"."""
    config, eps = model.config, model.config.rms_norm_eps
    sizes = BlockSizes(
        num_rows=config.num_block_rows,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    masks = dict.fromkeys(block_mask(mask) for mask in config.layer_masks)
    widths = {config.hidden_size} | ({config.target_hidden_size} if config.aux_norm else set())
    checks = [block_attention_check(sizes, mask, dtype, device) for mask in masks]
    checks += [norm_check(width, eps, dtype, device) for width in sorted(widths)]
    checks.append(_head_norm_check(sizes, eps, dtype, device))
    checks.append(activation_check(Activation(name="silu"), config.intermediate_size, dtype, device))
    if config.markov in (MarkovKind.GATED, MarkovKind.RNN):
        checks.append(_gates_check(config.markov_rank, dtype, device))
    named = tuple(replace(check, name=f"drafter {check.name}") for check in checks)
    return (*linear_checks(LINEAR, weight_shapes(model), dtype, device), *named)


def weight_shapes(model: DSparkModel) -> set[tuple[int, int]]:
    """Shapes of all matrices that rows are multiplied with, in the joined form that inference uses."""
    config = model.config
    query_rows, key_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {(parameter.shape[0], parameter.shape[1]) for parameter in model.parameters() if parameter.dim() == 2}
    return shapes | {
        (query_rows + 2 * key_rows, config.hidden_size),
        (2 * config.num_layers * key_rows, config.hidden_size),  # keys and values of the context, all layers
        (2 * config.intermediate_size, config.hidden_size),
    }


def _head_norm_check(sizes: BlockSizes, eps: float, dtype: torch.dtype, device: torch.device) -> OpCheck:
    """Norm of every query and key head, with gains per head; the values lie between the rows, as in a block."""
    num_normed, width = sizes.num_heads + sizes.num_kv_heads, sizes.head_dim
    weight_NK = random_rows(num_normed, width, dtype=dtype, device=device)

    def find() -> str | None:
        shape = (NUM_ROWS, num_normed + sizes.num_kv_heads, width)
        rows = random_rows(*shape, dtype=dtype, device=device, seed=2)
        return company_violation(lambda x_TNK: rms_norm(x_TNK[:, :num_normed], weight_NK, eps), rows)

    return fixed_check(f"norm of {num_normed} heads of {width}", find)


def _gates_check(rank: int, dtype: torch.dtype, device: torch.device) -> OpCheck:
    """Sigmoid and tanh of a Markov head's gates."""

    def find() -> str | None:
        rows = random_rows(NUM_ROWS, rank, dtype=island_dtype(dtype), device=device, seed=2)
        return company_violation(sigmoid, rows) or company_violation(tanh, rows)

    return fixed_check(f"Markov gates of {rank}", find)
