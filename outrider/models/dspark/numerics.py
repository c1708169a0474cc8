"""What the start-up probe checks of a drafter besides its products, norms and activation.

A row whose bits depend on its company changes drafts, hence acceptance, and under the rules with coins the tokens.
"""

from dataclasses import replace

import torch

from outrider.models.dspark.config import DSparkConfig, MarkovKind
from outrider.models.dspark.joined import block_mask
from outrider.ops.invariant import island_dtype, sigmoid, tanh
from outrider.ops.probe import NUM_ROWS, OpCheck, company_violation, fixed_check, random_rows
from outrider.ops.probe_block import BlockSizes, block_attention_check

__all__ = ["block_checks"]


def block_checks(config: DSparkConfig, dtype: torch.dtype, device: torch.device) -> tuple[OpCheck, ...]:
    """Block attention under each mask of the layers, and Markov gates; all names begin with "drafter"."""
    sizes = BlockSizes(
        num_rows=config.num_block_rows,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    masks = dict.fromkeys(block_mask(mask) for mask in config.layer_masks)
    checks = [block_attention_check(sizes, mask, dtype, device) for mask in masks]
    if config.markov in (MarkovKind.GATED, MarkovKind.RNN):
        checks.append(_gates_check(config.markov_rank, dtype, device))
    return tuple(replace(check, name=f"drafter {check.name}") for check in checks)


def _gates_check(rank: int, dtype: torch.dtype, device: torch.device) -> OpCheck:
    """Sigmoid and tanh of a Markov head's gates."""

    def find() -> str | None:
        rows = random_rows(NUM_ROWS, rank, dtype=island_dtype(dtype), device=device, seed=2)
        return company_violation(sigmoid, rows) or company_violation(tanh, rows)

    return fixed_check(f"Markov gates of {rank}", find)
