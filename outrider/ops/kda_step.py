"""The rows of one KDA layer, from projections to the gated output, and the commit of all layers.

Decode and verify rows (a step) leave the state as it is; what each row does to it goes to a log, and ``commit`` folds
accepted rows of the log into the seats. A step and the commit that follows must come from one ``KdaForm``: only
then are the bits of a committed state those of having stepped. Prompt rows are committed at once.

Dims: T rows of the group, S sequences, B seats, L layers, R rows that the log can hold, M rows of the longest
span, C conv channels (q | k | v), J conv taps, H heads, K key width, W value width (= K here), I = H * W.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from outrider.ops.conv import shift_window, short_conv, window_after_spans
from outrider.ops.kda import kda_beta, kda_commit_, kda_gate, kda_recurrent
from outrider.ops.kda_chunk import kda_chunk
from outrider.ops.norm import gated_rms_norm
from outrider.ops.spans import SpanLayout

__all__ = [
    "PLAIN_KDA",
    "KdaCommit",
    "KdaForm",
    "KdaParameters",
    "KdaSeats",
    "LayerRows",
    "ProjectedRows",
    "kda_commit_seats",
    "kda_prompt",
    "kda_step",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaParameters:
    """What a layer's rows are mixed with. All tensors in the island dtype."""

    conv_CJ: torch.Tensor  # the last tap multiplies the current token
    a_log_H: torch.Tensor
    dt_bias_HK: torch.Tensor
    o_norm_W: torch.Tensor
    lower_bound: float | None  # of the log decay; None is the softplus gate
    eps: float  # of the output norm


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedRows:
    """Projections of the rows in group order, compute dtype; columns are contiguous, rows may be strided."""

    inputs_TC: torch.Tensor  # raw q | k | v
    gate_TI: torch.Tensor  # output gate logits
    forget_TI: torch.Tensor  # forget gate logits
    beta_TH: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class KdaSeats:
    """Committed state and delta log, of one layer or, with a leading dim L, of all.

    Whether a head's state lies as ``[W, K]`` or, where both widths are equal, as ``[K, W]`` is the form's own affair:
    nobody else looks inside, and seats belong to one form.
    """

    state_BHWK: torch.Tensor  # island dtype; the native form keeps its transpose
    window_BXC: torch.Tensor  # carried conv inputs, oldest first, X = J - 1; compute dtype
    # The log: row r of a step is row r here. Rows of earlier steps are left over behind them.
    u_RHW: torch.Tensor  # island dtype
    k_RHK: torch.Tensor
    decay_RHK: torch.Tensor  # exp(log decay)
    inputs_RC: torch.Tensor  # compute dtype

    def layer(self, index: int) -> "KdaSeats":
        """One layer of the seats of all."""
        return KdaSeats(
            state_BHWK=self.state_BHWK[index],
            window_BXC=self.window_BXC[index],
            u_RHW=self.u_RHW[index],
            k_RHK=self.k_RHK[index],
            decay_RHK=self.decay_RHK[index],
            inputs_RC=self.inputs_RC[index],
        )


# rows, seats, slots_S, layout -> [T, I]. A step reads state and window and writes the first T rows of the log;
# a prompt writes state and window and no log.
LayerRows = Callable[[ProjectedRows, KdaSeats, torch.Tensor, SpanLayout], torch.Tensor]
# seats of all layers, slots_S, rows_SM, num_committed_S; in place
KdaCommit = Callable[[KdaSeats, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaForm:
    """A step with the commit that belongs to it, and a prompt. Parameters may be copied, so bind when filled."""

    name: str
    bind_step: Callable[[KdaParameters], LayerRows]
    # int: the multiple at which prompts are cut, which a form may build on
    bind_prompt: Callable[[KdaParameters, int], LayerRows]
    commit: KdaCommit


def kda_step(
    parameters: KdaParameters, rows: ProjectedRows, seats: KdaSeats, slots_S: torch.Tensor, layout: SpanLayout
) -> torch.Tensor:
    """Convolution, gates, recurrence, output norm and gate. Source: k3-architecture sections 5.2 to 5.6.

    Args:
        parameters: of the layer.
        rows: projections.
        seats: of the layer. State and window are not modified; the log receives the rows.
        slots_S: int64, seat of each sequence.
        layout: spans of the group.

    Returns:
        ``[T, I]`` in the dtype of the rows, what the output projection reads.
    """
    num_rows = layout.num_rows
    window_SXC = seats.window_BXC.index_select(0, slots_S)
    state_SHWK = seats.state_BHWK.index_select(0, slots_S)
    result = kda_recurrent(*_mixed(parameters, rows, window_SXC, layout), state_SHWK, layout)
    log = result.log
    assert log is not None, "the per-token form logs every row"
    seats.u_RHW[:num_rows] = log.u_THW
    seats.k_RHK[:num_rows] = log.k_THK
    seats.decay_RHK[:num_rows] = log.decay_THK
    seats.inputs_RC[:num_rows] = rows.inputs_TC
    return _gated(parameters, result.out_THW, rows)


def kda_prompt(
    parameters: KdaParameters,
    chunk_size: int,
    rows: ProjectedRows,
    seats: KdaSeats,
    slots_S: torch.Tensor,
    layout: SpanLayout,
) -> torch.Tensor:
    """As ``kda_step`` in chunks of ``chunk_size`` rows at absolute multiples; the seats advance, nothing is logged."""
    window_SXC = seats.window_BXC.index_select(0, slots_S)
    state_SHWK = seats.state_BHWK.index_select(0, slots_S)
    mixed = _mixed(parameters, rows, window_SXC, layout)
    result = kda_chunk(*mixed, state_SHWK, layout, chunk_size=chunk_size)
    seats.state_BHWK.index_copy_(0, slots_S, result.state_SHWK)
    seats.window_BXC.index_copy_(0, slots_S, window_after_spans(window_SXC, rows.inputs_TC, layout))
    return _gated(parameters, result.out_THW, rows)


def _mixed(
    parameters: KdaParameters, rows: ProjectedRows, window_SXC: torch.Tensor, layout: SpanLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v after conv and SiLU, log decay and beta: what the recurrence takes."""
    heads = (-1, *parameters.dt_bias_HK.shape)
    mixed_TC = short_conv(rows.inputs_TC, window_SXC, parameters.conv_CJ, layout)
    log_decay_THK = kda_gate(
        rows.forget_TI.reshape(heads), parameters.a_log_H, parameters.dt_bias_HK, parameters.lower_bound
    )
    q_THK, k_THK, v_THW = torch.unbind(mixed_TC.view(layout.num_rows, 3, *heads[1:]), dim=1)
    return q_THK, k_THK, v_THW, log_decay_THK, kda_beta(rows.beta_TH)


def _gated(parameters: KdaParameters, out_THW: torch.Tensor, rows: ProjectedRows) -> torch.Tensor:
    """Output norm and gate, ``[T, I]``."""
    gate_THW = rows.gate_TI.reshape(out_THW.shape)
    return gated_rms_norm(out_THW, parameters.o_norm_W, gate_THW, parameters.eps).flatten(1)


def kda_commit_seats(
    seats: KdaSeats, slots_S: torch.Tensor, rows_SM: torch.Tensor, num_committed_S: torch.Tensor
) -> None:
    """Fold the first ``num_committed_S`` rows of each span into the seats of all layers, in place.

    Args:
        seats: of all layers, with a leading dim L.
        slots_S: int64, seat of each sequence; no seat twice.
        rows_SM: int64, row of the log of each row of a span; arbitrary valid rows where padded.
        num_committed_S: int64, 0 to the length of the span. Rows from there on may hold anything, also NaN.
    """
    state_LSHWK = seats.state_BHWK.index_select(1, slots_S)
    window_LSXC = seats.window_BXC.index_select(1, slots_S)
    kda_commit_(
        state_LSHWK, seats.u_RHW[:, rows_SM], seats.k_RHK[:, rows_SM], seats.decay_RHK[:, rows_SM], num_committed_S
    )
    window_LSXC = shift_window(window_LSXC, seats.inputs_RC[:, rows_SM], num_committed_S)
    seats.state_BHWK.index_copy_(1, slots_S, state_LSHWK)
    seats.window_BXC.index_copy_(1, slots_S, window_LSXC)


PLAIN_KDA = KdaForm(
    name="torch",
    bind_step=lambda parameters: partial(kda_step, parameters),
    bind_prompt=lambda parameters, chunk_size: partial(kda_prompt, parameters, chunk_size),
    commit=kda_commit_seats,
)
