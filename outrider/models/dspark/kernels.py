"""The operations of a drafter that exist in several forms, as chosen once for a loaded drafter."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from outrider.models.dspark.config import DSparkConfig
from outrider.models.dspark.numerics import check_names
from outrider.ops.block_attention import (
    AttendBlockFunction,
    BlockHeads,
    BlockMask,
    StoreContextFunction,
    attend_block,
    store_context_rows,
)
from outrider.ops.native.drafter import NativeDrafter
from outrider.ops.native.library import library_for
from outrider.ops.native.markov import NativeMarkov
from outrider.ops.native.waiting import native_waiting
from outrider.ops.paged import PagedKeys
from outrider.ops.waiting import PLAIN_WAITING, WaitingForm

__all__ = ["TORCH_BLOCK_KERNELS", "BlockKernels", "choose_block_kernels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKernels:
    """Forms of what a block needs besides products. All of them keep a row's bits its own."""

    attend: AttendBlockFunction = attend_block
    store: StoreContextFunction = store_context_rows
    waiting: WaitingForm = PLAIN_WAITING  # copies: the same bits in every form
    markov: NativeMarkov | None = None  # greedy drafts under a vanilla head in one call; None: draft by draft


TORCH_BLOCK_KERNELS = BlockKernels()


def choose_block_kernels(
    config: DSparkConfig, dtype: torch.dtype, device: torch.device, geometries: Mapping[str, str] | None
) -> BlockKernels:
    """The native forms where they exist, each where its check found it to hold.

    Args:
        config: of the drafter.
        dtype: compute dtype.
        device: where the drafter runs.
        geometries: what the checks of ``block_checks`` found; None where nothing is probed or promised.
    """
    native = library_for(dtype, device)
    if native is None:
        return TORCH_BLOCK_KERNELS

    def holds(name: str) -> bool:
        return geometries is None or geometries[name] == native.geometry

    names, drafter = check_names(config), NativeDrafter(native)
    masks = frozenset(mask for mask, name in names.attention.items() if holds(name))
    return BlockKernels(
        attend=_attend_natively(drafter, masks, everywhere=len(masks) == len(names.attention)),
        waiting=native_waiting(native),
        store=drafter.store_context_rows if holds(names.context_rows) else store_context_rows,
        markov=NativeMarkov(native) if names.chain is not None and holds(names.chain) else None,
    )


def _attend_natively(drafter: NativeDrafter, masks: frozenset[BlockMask], *, everywhere: bool) -> AttendBlockFunction:
    """Attention that is native under these masks."""
    if everywhere:
        return drafter.attend_block

    def attend(
        qkv_TOK: torch.Tensor,
        heads: BlockHeads,
        context_keys_RJK: torch.Tensor,
        context_values_RJK: torch.Tensor,
        keys: PagedKeys,
    ) -> torch.Tensor:
        form: AttendBlockFunction = drafter.attend_block if heads.mask in masks else attend_block
        return form(qkv_TOK, heads, context_keys_RJK, context_values_RJK, keys)

    return attend if masks else attend_block
