"""What a model asks the caches to keep: names, shapes, dtypes and the bytes that follow from them."""

import math
from dataclasses import dataclass

import torch

from outrider.ops.kda_step import PLAIN_KDA, KdaCommit

__all__ = ["CacheLayout", "PagedLayout", "RecurrentLayout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayout:
    """One row per token and layer, append-only; undone by moving a length back.

    The page size is the engine's choice, not the model's, so it is an argument, not a field.
    """

    name: str
    num_layers: int
    row_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers."""
        return self.num_layers * math.prod(self.row_shape) * self.dtype.itemsize

    def bytes_per_page(self, page_size: int) -> int:
        """Bytes of one page of ``page_size`` tokens over all layers."""
        return page_size * self.bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentLayout:
    """One state and one short-conv window per slot and layer; fixed size, mutable.

    ``state_shape`` is (heads, value width, key width); ``conv_shape`` is (carried inputs, channels).
    """

    name: str
    num_layers: int
    state_shape: tuple[int, int, int]
    state_dtype: torch.dtype
    conv_shape: tuple[int, int]
    conv_dtype: torch.dtype
    fold: KdaCommit = PLAIN_KDA.commit  # the other half of the model's step, so the model brings it

    @property
    def state_bytes_per_slot(self) -> int:
        """Bytes of the recurrent states of one slot over all layers."""
        return self.num_layers * math.prod(self.state_shape) * self.state_dtype.itemsize

    @property
    def conv_bytes_per_slot(self) -> int:
        """Bytes of the carried conv inputs of one slot over all layers."""
        return self.num_layers * math.prod(self.conv_shape) * self.conv_dtype.itemsize

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all layers: states and conv windows."""
        return self.state_bytes_per_slot + self.conv_bytes_per_slot

    @property
    def log_bytes_per_row(self) -> int:
        """Bytes one tentative row takes in the delta log: decay, k, u and the raw conv inputs."""
        heads, value_width, key_width = self.state_shape
        floats = heads * (2 * key_width + value_width) * self.state_dtype.itemsize
        return self.num_layers * (floats + self.conv_shape[1] * self.conv_dtype.itemsize)


CacheLayout = PagedLayout | RecurrentLayout
