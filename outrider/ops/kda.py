"""Kimi Delta Attention, one token at a time: the form of decode and verify rows.

State is V-first ``[.., H, W, K]`` in the island dtype. Step, verify and commit share one update in one
rounding order, so folding a log gives the bits of having stepped.

Dims: T rows, S sequences, M rows of the longest span, H heads, K key width, W value width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.ops.invariant import batch_matmul, exp, island_dtype, sigmoid, softplus
from outrider.ops.norm import l2_norm_scaled
from outrider.ops.spans import SpanLayout, to_flat, to_padded_with

__all__ = [
    "KdaLog",
    "KdaResult",
    "KdaRows",
    "kda_beta",
    "kda_commit",
    "kda_commit_",
    "kda_gate",
    "kda_recurrent",
    "kda_recurrent_reference",
    "kda_rows",
    "kda_update",
]

COMMIT_ELEMENTS = 1 << 17  # state elements folded at a time, to stay in the processor cache


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaLog:
    """What each row does to the state: ``S = S * decay + u k^T``. Island dtype."""

    u_THW: torch.Tensor  # beta * (v - S' k), the scaled prediction error
    k_THK: torch.Tensor  # l2-normalised key
    decay_THK: torch.Tensor  # exp(log_decay)


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaResult:
    """Outputs of the rows and the state after each whole span."""

    out_THW: torch.Tensor  # dtype of v
    state_SHWK: torch.Tensor  # a new tensor
    log: KdaLog | None  # None from the chunk form, which is committed at once


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaRows:
    """Rows padded to a rectangle, island dtype; a padding row leaves the state exactly as it is."""

    keys_queries_SMH2K: torch.Tensor  # normalised key, then normalised query (not scaled)
    v_SMHW: torch.Tensor
    beta_SMH: torch.Tensor


def kda_gate(
    raw_THK: torch.Tensor, A_log_H: torch.Tensor, dt_bias_HK: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """Log decay of each key channel, at most 0, in the island dtype.

    Source: k3-architecture section 5.4. With a bound: ``bound * sigmoid(exp(A_log) * (raw + dt_bias))``;
    without: ``-exp(A_log) * softplus(raw + dt_bias)``. ``A_log_H`` and ``dt_bias_HK`` are island parameters.
    """
    rate_H1 = A_log_H.exp()[:, None]
    biased_THK = raw_THK.to(island_dtype(raw_THK.dtype)) + dt_bias_HK
    if lower_bound is None:
        return -rate_H1 * _across_heads(softplus, biased_THK)
    return lower_bound * _across_heads(sigmoid, rate_H1 * biased_THK)


def _across_heads(function: Callable[[torch.Tensor], torch.Tensor], x_THK: torch.Tensor) -> torch.Tensor:
    """Apply a non-linear function to whole rows, where less padding is needed than per head."""
    return function(x_THK.flatten(-2)).view(x_THK.shape)


def kda_beta(raw_TH: torch.Tensor) -> torch.Tensor:
    """Step size ``sigmoid(raw)`` in the island dtype."""
    return sigmoid(raw_TH.to(island_dtype(raw_TH.dtype)))


def kda_update(state_HWK: torch.Tensor, decay_HK: torch.Tensor, u_HW: torch.Tensor, k_HK: torch.Tensor) -> torch.Tensor:
    """``S * decay`` rounded, then ``+ u k^T`` as one fused multiply-add. Any equal leading dims.

    ``addcmul`` was found to fuse in vector and in scalar code alike, at every width and offset tried, in
    float32 and float64; where a build does not fuse, it does so nowhere.
    """
    return _add_outer_(_decayed(state_HWK, decay_HK), u_HW, k_HK)


# The one update of step, verify and commit, in its two halves: a step needs the decayed state between
# them to form ``u``. (Prompt chunks have their own form, ``kda_chunk``.)
def _decayed(state_HWK: torch.Tensor, decay_HK: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """First half: ``S * decay``, rounded; ``out`` may be the state itself."""
    return torch.mul(state_HWK, decay_HK[..., None, :], out=out)


def _add_outer_(decayed_HWK: torch.Tensor, u_HW: torch.Tensor, k_HK: torch.Tensor) -> torch.Tensor:
    """Second half, in place: add ``u k^T``, fused."""
    return decayed_HWK.addcmul_(u_HW[..., :, None], k_HK[..., None, :])


def kda_rows(
    q_THK: torch.Tensor, k_THK: torch.Tensor, v_THW: torch.Tensor, beta_TH: torch.Tensor, layout: SpanLayout
) -> KdaRows:
    """Normalise queries and keys, cast to the island dtype, pad with rows that change nothing."""
    keys_queries_TH2K = l2_norm_scaled(torch.stack([k_THK, q_THK], dim=-2))
    return KdaRows(
        keys_queries_SMH2K=to_padded_with(keys_queries_TH2K, layout, 0.0),
        v_SMHW=to_padded_with(v_THW.to(beta_TH.dtype), layout, 0.0),
        beta_SMH=to_padded_with(beta_TH, layout, 0.0),
    )


def kda_recurrent(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THW: torch.Tensor,
    log_decay_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    state_SHWK: torch.Tensor,
    layout: SpanLayout,
) -> KdaResult:
    """Step through each span row by row. Source: k3-architecture section 5.5.

    Args:
        q_THK: queries after the convolution, not normalised (l2 norm and K**-0.5 happen here); ``k_THK`` too.
        k_THK: keys.
        v_THW: values.
        log_decay_THK: island dtype, from ``kda_gate``.
        beta_TH: island dtype, from ``kda_beta``.
        state_SHWK: state before each span, island dtype; not modified.
        layout: spans of the group.
    """
    rows = kda_rows(q_THK, k_THK, v_THW, beta_TH, layout)
    decay_THK = _across_heads(exp, log_decay_THK)
    decay_SMHK = to_padded_with(decay_THK, layout, 1.0)
    num_sequences, num_heads, value_width, key_width = state_SHWK.shape
    matrices = num_sequences * num_heads
    keys_SMHK, queries_SMHK = rows.keys_queries_SMH2K.unbind(-2)
    # One read of the decayed state for both products: o = S q = S' q + (k . q) u.
    overlap_SMH1 = (keys_SMHK * queries_SMHK).sum(-1, keepdim=True)
    state, out_rows, u_rows = state_SHWK, [], []
    for m in range(layout.max_length):
        # The first row makes a new tensor: the caller's state stays as it is.
        decayed = _decayed(state, decay_SMHK[:, m], out=state if m else None)
        products = batch_matmul(
            decayed.view(matrices, value_width, key_width),
            rows.keys_queries_SMH2K[:, m].reshape(matrices, 2, key_width).transpose(1, 2),
        ).view(num_sequences, num_heads, value_width, 2)
        u_SHW = rows.beta_SMH[:, m, :, None] * (rows.v_SMHW[:, m] - products[..., 0])
        out_rows.append(torch.addcmul(products[..., 1], overlap_SMH1[:, m], u_SHW))
        u_rows.append(u_SHW)
        state = _add_outer_(decayed, u_SHW, keys_SMHK[:, m])
    log = KdaLog(
        u_THW=to_flat(torch.stack(u_rows, dim=1), layout), k_THK=to_flat(keys_SMHK, layout), decay_THK=decay_THK
    )
    out_SMHW = torch.stack(out_rows, dim=1) * key_width**-0.5
    return KdaResult(out_THW=to_flat(out_SMHW, layout).to(v_THW.dtype), state_SHWK=state, log=log)


def kda_recurrent_reference(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THW: torch.Tensor,
    log_decay_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    state_SHWK: torch.Tensor,
    layout: SpanLayout,
) -> KdaResult:
    """The textbook recurrence, one sequence and one token at a time, reading the updated state."""
    island = state_SHWK.dtype
    q_THK, k_THK, v_wide_THW = q_THK.to(island), k_THK.to(island), v_THW.to(island)
    states, outputs, logs, row = [], [], [], 0
    for sequence, length in enumerate(layout.lengths):
        state_HWK = state_SHWK[sequence]
        for _ in range(length):
            q_HK = q_THK[row] / (q_THK[row].pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() * q_THK.shape[-1] ** -0.5
            k_HK = k_THK[row] / (k_THK[row].pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
            decay_HK = log_decay_THK[row].exp()
            decayed_HWK = state_HWK * decay_HK[:, None, :]
            u_HW = beta_TH[row][:, None] * (v_wide_THW[row] - torch.einsum("hwk,hk->hw", decayed_HWK, k_HK))
            state_HWK = decayed_HWK + torch.einsum("hw,hk->hwk", u_HW, k_HK)
            outputs.append(torch.einsum("hwk,hk->hw", state_HWK, q_HK))
            logs.append((u_HW, k_HK, decay_HK))
            row += 1
        states.append(state_HWK)
    u_THW, k_log_THK, decay_THK = (torch.stack(column) for column in zip(*logs, strict=True))
    return KdaResult(
        out_THW=torch.stack(outputs).to(v_THW.dtype),
        state_SHWK=torch.stack(states),
        log=KdaLog(u_THW=u_THW, k_THK=k_log_THK, decay_THK=decay_THK),
    )


def kda_commit(
    state_SHWK: torch.Tensor,
    u_SMHW: torch.Tensor,
    k_SMHK: torch.Tensor,
    decay_SMHK: torch.Tensor,
    num_committed_S: torch.Tensor,
) -> torch.Tensor:
    """Fold the first ``num_committed`` log rows of each sequence into its state.

    The result equals the state after stepping through those rows only, bit for bit. Log rows from
    ``num_committed`` on may hold anything, also NaN.

    Args:
        state_SHWK: ``[..., S, H, W, K]``, any leading dims (all layers at once); not modified.
        u_SMHW: ``[..., S, M, H, W]``; ``k_SMHK`` and ``decay_SMHK`` likewise.
        k_SMHK: normalised keys.
        decay_SMHK: decays.
        num_committed_S: int64, 0..M, ``[S]`` or with the leading dims.
    """
    state = state_SHWK.clone()
    kda_commit_(state, u_SMHW, k_SMHK, decay_SMHK, num_committed_S)
    return state


def kda_commit_(
    state_SHWK: torch.Tensor,
    u_SMHW: torch.Tensor,
    k_SMHK: torch.Tensor,
    decay_SMHK: torch.Tensor,
    num_committed_S: torch.Tensor,
) -> None:
    """As ``kda_commit``, in place; the state must be contiguous."""
    num_rows = u_SMHW.shape[-3]
    live_SM = torch.arange(num_rows, device=u_SMHW.device) < num_committed_S[..., None]
    live = live_SM[..., None, None]
    # Selecting on the log, not on the state: S * 1 + 0 is exact and the log is far smaller.
    u_live = torch.where(live, u_SMHW, 0.0).flatten(0, -4)
    k_live = torch.where(live, k_SMHK, 0.0).flatten(0, -4)
    decay_live = torch.where(live, decay_SMHK, 1.0).flatten(0, -4)
    seats = state_SHWK.view(-1, *state_SHWK.shape[-3:])
    per_block = max(1, COMMIT_ELEMENTS // max(1, seats[:1].numel()))
    for first in range(0, seats.shape[0], per_block):
        block = slice(first, first + per_block)
        for m in range(num_rows):
            part = seats[block]
            _add_outer_(_decayed(part, decay_live[block, m], out=part), u_live[block, m], k_live[block, m])
