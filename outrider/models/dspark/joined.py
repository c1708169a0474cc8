"""A draft layer's weights as inference uses them: joined projections, per-head gains, mask, rotary table.

Dims: O joined outputs, D model width, I joined MLP width, P = query and key heads, K head width.
"""

from dataclasses import dataclass

import torch

from outrider.models.dspark.config import DraftLayerMask, DSparkConfig, RopeConfig, WindowOrigin
from outrider.models.dspark.model import DraftLayer
from outrider.ops.block_attention import BlockHeads, BlockMask
from outrider.ops.invariant import island_dtype
from outrider.ops.rope import RotaryTable, YarnScaling, rotary_frequencies, rotary_table

__all__ = ["JoinedLayer", "block_mask", "drafter_rotary_table", "join_layer", "rope_frequencies"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedLayer:
    """One layer, projections joined so that a block costs few calls."""

    input_norm_D: torch.Tensor
    qkv_OD: torch.Tensor  # rows of queries, then keys, then values
    heads: BlockHeads
    output_DO: torch.Tensor
    mlp_norm_D: torch.Tensor
    gate_up_ID: torch.Tensor
    down_DI: torch.Tensor


def join_layer(layer: DraftLayer, config: DSparkConfig, mask: DraftLayerMask, table: RotaryTable) -> JoinedLayer:
    """Join the layer's projections; its parameters become views of the joined storage."""
    attention, mlp = layer.self_attn, layer.mlp
    heads = BlockHeads(
        num_heads=config.num_heads,
        num_rows=config.num_block_rows,
        gains_PK=torch.cat(
            (
                attention.q_norm.weight.expand(config.num_heads, -1),
                attention.k_norm.weight.expand(config.num_kv_heads, -1),
            )
        ),
        eps=config.rms_norm_eps,
        table=table,
        mask=block_mask(mask),
        scale=config.head_dim**-0.5,
    )
    return JoinedLayer(
        input_norm_D=layer.input_layernorm.weight,
        qkv_OD=_join_rows(attention.q_proj, attention.k_proj, attention.v_proj),
        heads=heads,
        output_DO=attention.o_proj.weight,
        mlp_norm_D=layer.post_attention_layernorm.weight,
        gate_up_ID=_join_rows(mlp.gate_proj, mlp.up_proj),
        down_DI=mlp.down_proj.weight,
    )


@torch.no_grad()
def _join_rows(*projections: torch.nn.Linear) -> torch.Tensor:
    joined_OI = torch.cat([projection.weight for projection in projections])
    begin = 0
    for projection in projections:
        end = begin + projection.out_features
        projection.weight.data = joined_OI[begin:end]
        begin = end
    return joined_OI


def block_mask(mask: DraftLayerMask) -> BlockMask:
    """A layer's mask as its attention takes it."""
    return BlockMask(
        causal=mask.causal_block,
        window=mask.window,
        window_from_anchor=mask.window_origin is WindowOrigin.ANCHOR,
    )


def drafter_rotary_table(
    config: DSparkConfig, num_positions: int, dtype: torch.dtype, device: torch.device
) -> RotaryTable:
    """Cosines and sines of positions 0..num_positions - 1, YaRN included, for compute dtype ``dtype``."""
    rope = config.rope
    table = rotary_table(num_positions, config.head_dim, rope.theta, _scaling(rope), dtype=island_dtype(dtype))
    return RotaryTable(cos_PF=table.cos_PF.to(device), sin_PF=table.sin_PF.to(device))


def rope_frequencies(config: DSparkConfig) -> tuple[torch.Tensor, float]:
    """Radians per position of every rotary pair ``[F]``, float64, and the factor on cosine and sine."""
    return rotary_frequencies(config.head_dim, config.rope.theta, _scaling(config.rope))


def _scaling(rope: RopeConfig) -> YarnScaling | None:
    if rope.yarn is None:
        return None
    return YarnScaling(
        factor=rope.yarn.factor,
        original_max_positions=rope.yarn.original_max_position,
        beta_fast=rope.yarn.beta_fast,
        beta_slow=rope.yarn.beta_slow,
        attention_factor=rope.yarn.attention_factor,
    )
