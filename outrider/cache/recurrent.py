"""Recurrent state with a delta log: verify rows are tentative until ``commit`` folds them in.

The delta rule per head is ``S_t = S_{t-1} diag(decay_t) + u_t k_t^T`` (Kimi Linear, arXiv
2510.26692). A verify row logs the very ``decay``, ``u`` and ``k`` it used, so folding the accepted
rows in order repeats the same arithmetic and gives the same bits as decoding them one by one.

Dims: L layers, B slots, S sequences of the step group, M longest span, T rows of the step group,
H heads, V value width, K key width, W carried conv inputs, D conv channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.batch import ForwardBatch
from outrider.ops.kda_step import PLAIN_KDA, KdaCommit, KdaSeats

__all__ = ["RecurrentCache", "RecurrentSnapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSnapshot:
    """Committed state and conv window of one slot, all layers, on the host."""

    state_LHVK: torch.Tensor
    window_LWD: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of both."""
        return self.state_LHVK.nbytes + self.window_LWD.nbytes


class RecurrentCache:
    """One state and one short-conv window per slot and layer, and one log for the rows of a step.

    Nothing is pending between steps: a step's log is folded (or ignored) before the next forward.
    Only the slots named by a batch are read or written.

    Args:
        num_layers: recurrent layers.
        num_slots: seats; one per running sequence.
        max_step_rows: most decode and verify rows of one step, the capacity of the log.
        state_shape: ``(H, V, K)`` of one layer and slot.
        conv_shape: ``(W, D)`` of one layer and slot.
        state_dtype: island dtype of state and log.
        conv_dtype: compute dtype of the conv inputs.
        device: where everything lives.
        fold: folds log rows into seats; of the same form as the steps that write the log.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        max_step_rows: int,
        state_shape: tuple[int, int, int],
        conv_shape: tuple[int, int],
        state_dtype: torch.dtype,
        conv_dtype: torch.dtype,
        device: torch.device,
        fold: KdaCommit = PLAIN_KDA.commit,
    ) -> None:
        num_heads, value_width, key_width = state_shape
        self.num_slots = num_slots
        self.max_step_rows = max_step_rows
        self._state_LBHVK = torch.zeros((num_layers, num_slots, *state_shape), dtype=state_dtype, device=device)
        self._window_LBWD = torch.zeros((num_layers, num_slots, *conv_shape), dtype=conv_dtype, device=device)
        log_shape = (num_layers, max_step_rows)
        self._decay_LTHK = torch.zeros((*log_shape, num_heads, key_width), dtype=state_dtype, device=device)
        self._k_LTHK = torch.zeros_like(self._decay_LTHK)
        self._u_LTHV = torch.zeros((*log_shape, num_heads, value_width), dtype=state_dtype, device=device)
        self._inputs_LTD = torch.zeros((*log_shape, conv_shape[1]), dtype=conv_dtype, device=device)
        self._fold = fold
        self._all_layers = KdaSeats(
            state_BHWK=self._state_LBHVK,
            window_BXC=self._window_LBWD,
            u_RHW=self._u_LTHV,
            k_RHK=self._k_LTHK,
            decay_RHK=self._decay_LTHK,
            inputs_RC=self._inputs_LTD,
        )
        self._layers = tuple(self._all_layers.layer(index) for index in range(num_layers))

    @property
    def num_bytes(self) -> int:
        """Bytes of states, windows and log together."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def state(self, layer_index: int) -> torch.Tensor:
        """Committed states of one layer, ``[num_slots, H, V, K]`` (native form: ``K, V``), as a view for reading."""
        return self._state_LBHVK[layer_index]

    def conv_window(self, layer_index: int) -> torch.Tensor:
        """Carried conv inputs of one layer, oldest first, ``[num_slots, W, D]``, for reading."""
        return self._window_LBWD[layer_index]

    def seats(self, layer_index: int, *, num_rows: int = 0) -> KdaSeats:
        """Everything of one layer: state and window for reading, the log for the ``num_rows`` rows of a step.

        Row r of ``batch.step.rows_T`` belongs in row r of the log.
        """
        assert num_rows <= self.max_step_rows, (
            f"{num_rows} step rows exceed the log of {self.max_step_rows} rows; split the round"
        )
        return self._layers[layer_index]

    def write_log(
        self,
        layer_index: int,
        batch: ForwardBatch,
        u_THV: torch.Tensor,
        k_THK: torch.Tensor,
        decay_THK: torch.Tensor,
        conv_inputs_TD: torch.Tensor,
    ) -> None:
        """Log the tentative rows of one layer; T runs over ``batch.step.rows_T`` in that order.

        ``decay_THK`` is the factor the state was multiplied by, ``exp(log_decay)``, in the island
        dtype, and ``conv_inputs_TD`` are the raw inputs of the short conv (q, k, v side by side).
        """
        num_rows = sum(batch.step.lengths)
        seats = self.seats(layer_index, num_rows=num_rows)
        seats.u_RHW[:num_rows] = u_THV
        seats.k_RHK[:num_rows] = k_THK
        seats.decay_RHK[:num_rows] = decay_THK
        seats.inputs_RC[:num_rows] = conv_inputs_TD

    def store(
        self,
        layer_index: int,
        slots_S: torch.Tensor,
        state_SHVK: torch.Tensor,
        window_SWD: torch.Tensor,
    ) -> None:
        """Replace state and window of the slots of chunk spans, which are committed at once."""
        self._state_LBHVK[layer_index].index_copy_(0, slots_S, state_SHVK)
        self._window_LBWD[layer_index].index_copy_(0, slots_S, window_SWD)

    def commit(self, batch: ForwardBatch, num_committed_S: torch.Tensor) -> None:
        """Advance the slots of the step group by their first ``num_committed_S`` (int64) rows.

        All layers advance in one call. Rows beyond the committed ones have no effect, whatever they hold.
        """
        step = batch.step
        if not step.lengths:
            return
        self._fold(self._all_layers, step.state_slots_S, step.padded_rows_SM, num_committed_S)

    def reset(self, slots: Sequence[int]) -> None:
        """Put slots back to the state before the first token: zero state, zero window."""
        for slot in slots:
            self._state_LBHVK[:, slot] = 0
            self._window_LBWD[:, slot] = 0

    def snapshot(self, slot: int) -> RecurrentSnapshot:
        """Copy of one slot. Complete between steps, when no row of the log is pending."""
        return RecurrentSnapshot(
            # On a CPU device `cpu` alone would give a view.
            state_LHVK=self._state_LBHVK[:, slot].clone().cpu(),
            window_LWD=self._window_LBWD[:, slot].clone().cpu(),
        )

    def restore(self, slot: int, snapshot: RecurrentSnapshot) -> None:
        """Put a snapshot into any slot."""
        self._state_LBHVK[:, slot] = snapshot.state_LHVK.to(self._state_LBHVK.device)
        self._window_LBWD[:, slot] = snapshot.window_LWD.to(self._window_LBWD.device)

    def poison(self, slots: Sequence[int]) -> None:
        """Fill slots and the whole log with NaN; a test that reads what it does not own then fails."""
        for slot in slots:
            self._state_LBHVK[:, slot] = torch.nan
            self._window_LBWD[:, slot] = torch.nan
        for log in (self._decay_LTHK, self._k_LTHK, self._u_LTHV, self._inputs_LTD):
            log.fill_(torch.nan)

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return (
            self._state_LBHVK,
            self._window_LBWD,
            self._decay_LTHK,
            self._k_LTHK,
            self._u_LTHV,
            self._inputs_LTD,
        )
