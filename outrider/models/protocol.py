"""What the engine may ask of a target model, whatever its family.

Dims: T flat tokens, N rows that need logits, V vocabulary, D model width, A tapped layers.
"""

from typing import Literal, Protocol

import torch

from outrider.batch import ForwardBatch, TargetOutput
from outrider.cache.layout import CacheLayout
from outrider.cache.paged import LatentCache
from outrider.cache.recurrent import RecurrentCache
from outrider.models.numerics import NumericsReport

__all__ = ["AuxStream", "TargetCaches", "TargetModel"]

# Which tensor "after layer t" a tap means: what layer t + 1 reads before its norm, or the raw residual
# stream. They are the same tensor for models without attention residuals.
AuxStream = Literal["mixture", "prefix"]


class TargetCaches(Protocol):
    """The device state a target reads and appends to."""

    @property
    def latents(self) -> LatentCache:
        """Paged rows of the attention layers."""
        ...

    @property
    def recurrent(self) -> RecurrentCache:
        """State and conv windows of the recurrent layers."""
        ...


class TargetModel(Protocol):
    """A decoder whose forward appends tentative state and never commits step rows."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    aux_layer_ids: tuple[int, ...]
    chunk_multiple: int  # prompts are cut at absolute multiples of this, or bits change
    numerics: NumericsReport

    @property
    def cache_layouts(self) -> tuple[CacheLayout, ...]:
        """What the caches must hold for this model."""
        ...

    @property
    def embedding(self) -> torch.Tensor:
        """Embedding table ``[V, D]``, which drafter checkpoints may copy."""
        ...

    @property
    def lm_head(self) -> torch.Tensor:
        """Output head ``[V, D]``, which drafter checkpoints may copy."""
        ...

    def set_aux_layers(self, layer_ids: tuple[int, ...], stream: AuxStream) -> None:
        """Choose the taps of ``TargetOutput.aux_hidden_TAD``; an empty tuple turns them off."""
        ...

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding table, ``[T, D]``."""
        ...

    def head(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Output head on already normalised rows, ``[N, V]``."""
        ...

    def forward(self, batch: ForwardBatch, caches: TargetCaches) -> TargetOutput:
        """Run one flat batch; chunk rows are committed, step rows are logged."""
        ...
