"""Causal depthwise short convolution over ragged spans, with the inputs before the span carried.

Streams (q, k, v) lie side by side in the channel dim.

Dims: T rows, S sequences, M rows of the longest span, D channels, W = kernel - 1 carried inputs.
"""

import torch

from outrider.ops.invariant import island_dtype, silu
from outrider.ops.spans import SpanLayout, to_flat, to_padded

__all__ = ["shift_window", "short_conv", "short_conv_reference", "window_after_spans"]


def short_conv(
    inputs_TD: torch.Tensor, window_SWD: torch.Tensor, weight_DK: torch.Tensor, layout: SpanLayout
) -> torch.Tensor:
    """Convolution and SiLU in the island dtype, one rounding. Source: k3-architecture section 5.2.

    Args:
        inputs_TD: projection outputs of the group's rows.
        window_SWD: the W inputs before each span, oldest first; zeros at the start of a sequence.
        weight_DK: island dtype, K = W + 1 taps; the last tap multiplies the current token.
        layout: spans of the group.

    Returns:
        ``[T, D]`` in the dtype of the inputs.
    """
    island = island_dtype(inputs_TD.dtype)
    length = layout.max_length
    history_SXD = torch.cat([window_SWD, to_padded(inputs_TD, layout)], dim=1).to(island)
    taps_KD = weight_DK.transpose(0, 1)
    # Written as separate sums: a fixed order of additions, each element on its own.
    total_SMD = history_SXD[:, :length] * taps_KD[0]
    for tap in range(1, taps_KD.shape[0]):
        total_SMD.addcmul_(history_SXD[:, tap : tap + length], taps_KD[tap])
    return silu(to_flat(total_SMD, layout)).to(inputs_TD.dtype)


def short_conv_reference(
    inputs_TD: torch.Tensor, window_SWD: torch.Tensor, weight_DK: torch.Tensor, layout: SpanLayout
) -> torch.Tensor:
    """The same, one token at a time, in float64."""
    outputs, row = [], 0
    for sequence, length in enumerate(layout.lengths):
        history = list(window_SWD[sequence].double())
        for _ in range(length):
            history = [*history, inputs_TD[row].double()]
            total_D = torch.stack(history, dim=1).mul(weight_DK.double()).sum(1)
            outputs.append(total_D * torch.sigmoid(total_D))
            history, row = history[1:], row + 1
    return torch.stack(outputs).to(inputs_TD.dtype)


def shift_window(window_SWD: torch.Tensor, inputs_SMD: torch.Tensor, num_rows_S: torch.Tensor) -> torch.Tensor:
    """The carried inputs after the first ``num_rows`` rows of each span.

    Args:
        window_SWD: ``[..., S, W, D]`` before the span.
        inputs_SMD: ``[..., S, M, D]`` padded span inputs; rows from ``num_rows`` on are never read.
        num_rows_S: int64, 0..M, broadcast over the leading dims.

    Returns:
        ``[..., S, W, D]``, a new tensor.
    """
    num_carried = window_SWD.shape[-2]
    history = torch.cat([window_SWD, inputs_SMD], dim=-2)
    index_SW = num_rows_S[..., None] + torch.arange(num_carried, device=window_SWD.device)
    return history.gather(-2, index_SW[..., None].expand(window_SWD.shape))


def window_after_spans(window_SWD: torch.Tensor, inputs_TD: torch.Tensor, layout: SpanLayout) -> torch.Tensor:
    """The carried inputs after all rows of every span (a prompt chunk, committed at once)."""
    return shift_window(window_SWD, to_padded(inputs_TD, layout), layout.valid_SM.sum(1))
