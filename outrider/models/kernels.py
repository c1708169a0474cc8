"""The operations of a row that exist in several forms, as chosen once for a loaded model."""

from dataclasses import dataclass

from outrider.ops.activation import GluFunction, glu_fused
from outrider.ops.attention import (
    AbsorbedFunction,
    AbsorbFunction,
    AppendFunction,
    ExpandedFunction,
    absorb_weights,
    append_latents,
    mla_absorbed,
    mla_absorbed_plain,
    mla_expanded,
)
from outrider.ops.kda_step import PLAIN_KDA, KdaForm
from outrider.ops.linear import LinearFunction, linear, linear_padded, linear_plain
from outrider.ops.moe import ExpertsFunction, PrepareRouted, routed_experts, routed_experts_plain
from outrider.ops.norm import NormFunction, rms_norm
from outrider.ops.residual import MixNormFunction, residual_mix_norm
from outrider.ops.rows import PLAIN_ROWS, RowForm

__all__ = ["EXACT_KERNELS", "PLAIN_KERNELS", "Kernels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Forms of the products. The defaults keep a row's bits its own on the machines they were measured on."""

    linear: LinearFunction = linear  # dense layers and the head
    router: LinearFunction = linear_padded
    experts: ExpertsFunction = routed_experts
    routed: PrepareRouted | None = None  # router and experts in one call; None runs one after the other
    absorbed: AbsorbedFunction = mla_absorbed  # attention of decode and verify rows
    expanded: ExpandedFunction | None = mla_expanded  # of prompt rows; None: as of the others
    absorb: AbsorbFunction = absorb_weights  # makes its weights
    append_latents: AppendFunction = append_latents
    kda: KdaForm = PLAIN_KDA  # rows of the recurrent layers, and their commit
    norm: NormFunction = rms_norm
    mix_norm: MixNormFunction = residual_mix_norm  # what lies between two sublayers
    glu: GluFunction = glu_fused
    rows: RowForm = PLAIN_ROWS  # copies and sums of rows; the same bits in every form


EXACT_KERNELS = Kernels()
# What `--numerics fast` runs: whole calls, whose kernels the library picks by row count. Functions that are not
# here (norms, recurrence, prompt attention, element-wise) have no cheaper form.
PLAIN_KERNELS = Kernels(
    linear=linear_plain, router=linear_plain, experts=routed_experts_plain, absorbed=mla_absorbed_plain
)
