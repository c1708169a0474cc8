"""The operations of this family that exist in several forms, as chosen once for a loaded model."""

from dataclasses import dataclass

from outrider.ops.grouped_attention import AppendKeysFunction, GroupedAttentionFunction, append_keys, grouped_attention

__all__ = ["TORCH_GROUPED_KERNELS", "GroupedKernels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedKernels:
    """Forms of attention. The defaults keep a row's bits its own on the machines they were measured on."""

    append: AppendKeysFunction = append_keys
    attend: GroupedAttentionFunction = grouped_attention


TORCH_GROUPED_KERNELS = GroupedKernels()
