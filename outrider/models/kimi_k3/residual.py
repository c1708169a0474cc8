"""The residual stream of one forward: ordinary, or with attention residuals (k3-architecture section 4).

Dims: B snapshots plus the running prefix, T rows, D model width.
"""

import torch
from torch import nn

from outrider.models.layers import Build
from outrider.ops.residual import MixNormFunction, attention_residual_mix, residual_mix_norm
from outrider.ops.rows import PLAIN_ROWS, RowForm

__all__ = ["ResidualMix", "ResidualStream"]


class ResidualMix(nn.Module):
    """Scoring vector of one mix."""

    def __init__(self, hidden_size: int, eps: float, build: Build) -> None:
        super().__init__()
        self.eps = eps
        self.weight = build.island_weight(hidden_size)

    def forward(self, candidates_BTD: torch.Tensor) -> torch.Tensor:
        """``[B, T, D]`` to ``[T, D]``."""
        return attention_residual_mix(candidates_BTD, self.weight.weight, self.eps)


class ResidualStream:
    """Snapshots and prefix in one slab; the last live plane is the prefix.

    Opening a block turns the prefix plane into a snapshot by moving on to the next plane, so nothing is
    copied and every view has one stride: plane first, rows contiguous inside it. The last sublayer output
    waits for the next read, which adds it in the call that mixes and norms.

    Args:
        token_ids_T: Rows of the embedding that the stream starts with.
        embedding_VD: The embedding.
        num_snapshots: How many blocks will be opened.
        mix_norm: Form of the read.
        rows: Form of copies and sums.
    """

    def __init__(
        self,
        token_ids_T: torch.Tensor,
        embedding_VD: torch.Tensor,
        num_snapshots: int,
        mix_norm: MixNormFunction = residual_mix_norm,
        rows: RowForm = PLAIN_ROWS,
    ) -> None:
        num_rows, width = token_ids_T.shape[0], embedding_VD.shape[1]
        self._planes_BTD = embedding_VD.new_empty(num_snapshots + 1, num_rows, width)
        self._rows = rows
        rows.gather(embedding_VD, token_ids_T, self._planes_BTD[0])
        self._num_snapshots = 0
        self._candidates_BTD = self._planes_BTD[:1]  # of the open block; most reads of a step share the view
        self._mix_norm = mix_norm
        self._waiting_TD: torch.Tensor | None = None

    @property
    def prefix_TD(self) -> torch.Tensor:
        """The running sum; a view that the next addition changes."""
        self._settle()
        return self._planes_BTD[self._num_snapshots]

    @property
    def candidates_BTD(self) -> torch.Tensor:
        """Snapshots in order, then the prefix; a view."""
        self._settle()
        return self._candidates_BTD

    def read(self, mix: ResidualMix | None) -> torch.Tensor:
        """What the next sublayer norms: the mixture, or the prefix without a mix or snapshots."""
        candidates_BTD = self.candidates_BTD
        if mix is None or self._num_snapshots == 0:
            return candidates_BTD[-1]
        mixed_TD: torch.Tensor = mix(candidates_BTD)
        return mixed_TD

    def read_normed(
        self, mix: ResidualMix | None, norm_weight_D: torch.Tensor, eps: float, rows_N: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``read`` gives, and its norm; ``rows_N`` restricts both to some rows."""
        if rows_N is None:
            candidates_BTD, waiting_TD = self._candidates_BTD, self._waiting_TD
            self._waiting_TD = None
        else:
            candidates_BTD, waiting_TD = self._gathered(self.candidates_BTD, rows_N), None
        mix_weight_D = None if mix is None else mix.weight.weight
        return self._mix_norm(candidates_BTD, waiting_TD, mix_weight_D, norm_weight_D, eps)

    def open_block(self) -> None:
        """Freeze the prefix as a snapshot; ``restart`` must follow before the next read."""
        self._settle()
        self._num_snapshots += 1
        self._candidates_BTD = self._planes_BTD[: self._num_snapshots + 1]

    def restart(self, out_TD: torch.Tensor) -> None:
        """First sublayer output of a block: it replaces the prefix (section 14.2)."""
        self._rows.copy(out_TD, self.prefix_TD)

    def add(self, out_TD: torch.Tensor) -> None:
        """Any other sublayer output: rounded sum in the compute dtype. It must not change before the next read."""
        self._settle()
        self._waiting_TD = out_TD

    def _settle(self) -> None:
        if self._waiting_TD is not None:
            prefix_TD = self._planes_BTD[self._num_snapshots]
            self._rows.add(prefix_TD, self._waiting_TD, prefix_TD)
            self._waiting_TD = None

    def _gathered(self, candidates_BTD: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor:
        num_candidates, _, width = candidates_BTD.shape
        gathered_BND = candidates_BTD.new_empty(num_candidates, rows_N.shape[0], width)
        self._rows.gather(candidates_BTD, rows_N, gathered_BND)
        return gathered_BND
