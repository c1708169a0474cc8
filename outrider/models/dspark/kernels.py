"""The operations of a drafter that exist in several forms, as chosen once for a loaded drafter."""

from dataclasses import dataclass

import torch

from outrider.ops.block_attention import AttendBlockFunction, StoreContextFunction, attend_block, store_context_rows
from outrider.ops.native.drafter import NativeDrafter
from outrider.ops.native.library import library_for
from outrider.ops.native.markov import NativeMarkov

__all__ = ["TORCH_BLOCK_KERNELS", "BlockKernels", "choose_block_kernels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKernels:
    """Forms of what a block needs besides products. All of them keep a row's bits its own."""

    attend: AttendBlockFunction = attend_block
    store: StoreContextFunction = store_context_rows
    markov: NativeMarkov | None = None  # greedy drafts under a vanilla head in one call; None: draft by draft


TORCH_BLOCK_KERNELS = BlockKernels()


def choose_block_kernels(dtype: torch.dtype, device: torch.device) -> BlockKernels:
    """The native forms where they exist."""
    library = library_for(dtype, device)
    if library is None:
        return TORCH_BLOCK_KERNELS
    drafter = NativeDrafter(library)
    return BlockKernels(attend=drafter.attend_block, store=drafter.store_context_rows, markov=NativeMarkov(library))
