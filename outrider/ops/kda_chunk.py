"""Kimi Delta Attention in chunks: the form of prompt rows.

Every chunk is computed at its full geometry, with padding rows that change nothing, so the bits of a
prompt depend neither on the other sequences nor on how the scheduler cuts it, as long as it cuts at
absolute multiples of the chunk.

Dims: T rows, S sequences, A sequences that reach the chunk, M padded rows, C rows of a chunk, H heads,
K key width, W value width, B = A * H.
"""

import torch

from outrider.ops.invariant import batch_matmul, exp
from outrider.ops.kda import KdaResult, KdaRows, kda_rows
from outrider.ops.spans import SpanLayout, span_layout, to_flat, to_padded_with

__all__ = ["kda_chunk"]


def kda_chunk(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THW: torch.Tensor,
    log_decay_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    state_SHWK: torch.Tensor,
    layout: SpanLayout,
    *,
    chunk_size: int,
) -> KdaResult:
    """Same mathematics as ``kda_recurrent``. Source: k3-architecture section 5.7.

    Args:
        q_THK: as for ``kda_recurrent``, and so are the other tensors.
        k_THK: keys.
        v_THW: values.
        log_decay_THK: island dtype.
        beta_TH: island dtype.
        state_SHWK: state before each span; not modified.
        layout: spans; a span that starts inside a chunk begins with the rest of that chunk.
        chunk_size: rows per chunk.
    """
    aligned = _align_to_chunks(layout, chunk_size)
    rows = kda_rows(q_THK, k_THK, v_THW, beta_TH, aligned)
    log_decay_SMHK = to_padded_with(log_decay_THK, aligned, 0.0)
    num_chunks = [
        -(-(start % chunk_size + n) // chunk_size) for start, n in zip(layout.starts, layout.lengths, strict=True)
    ]
    state_SHWK = state_SHWK.clone()
    outputs = torch.zeros_like(rows.v_SMHW)
    for chunk in range(max(num_chunks, default=0)):
        span = slice(chunk * chunk_size, (chunk + 1) * chunk_size)
        active = [sequence for sequence, count in enumerate(num_chunks) if count > chunk]
        # A tensor index only where sequences drop out: the common single prompt stays a view.
        select = slice(None) if len(active) == len(num_chunks) else torch.tensor(active, device=state_SHWK.device)
        out_ACHW, state_AHWK = _one_chunk(
            _rows_of(rows, select, span), log_decay_SMHK[select, span], state_SHWK[select]
        )
        outputs[select, span] = out_ACHW
        state_SHWK[select] = state_AHWK
    return KdaResult(out_THW=to_flat(outputs, aligned).to(v_THW.dtype), state_SHWK=state_SHWK, log=None)


def _align_to_chunks(layout: SpanLayout, chunk_size: int) -> SpanLayout:
    """Re-pad every span so that column 0 is an absolute multiple of the chunk."""
    device = layout.valid_SM.device
    offsets = [start % chunk_size for start in layout.starts]
    longest = max((offset + n for offset, n in zip(offsets, layout.lengths, strict=True)), default=0)
    width = -(-longest // chunk_size) * chunk_size
    lengths_S1 = torch.tensor(layout.lengths, device=device)[:, None]
    column_SM = torch.arange(width, device=device) - torch.tensor(offsets, device=device)[:, None]
    valid_SM = (column_SM >= 0) & (column_SM < lengths_S1)
    rows_SM = layout.padded_rows_SM[:, :1] + column_SM
    return span_layout(torch.where(valid_SM, rows_SM, 0), valid_SM, lengths=layout.lengths, starts=layout.starts)


def _rows_of(rows: KdaRows, select: slice | torch.Tensor, span: slice) -> KdaRows:
    """The rows of one chunk for the chosen sequences."""
    return KdaRows(
        keys_queries_SMH2K=rows.keys_queries_SMH2K[select, span],
        v_SMHW=rows.v_SMHW[select, span],
        beta_SMH=rows.beta_SMH[select, span],
    )


def _one_chunk(
    rows: KdaRows, log_decay_ACHK: torch.Tensor, state_AHWK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs ``[A, C, H, W]`` and the state after one chunk."""
    num_sequences, chunk_size, num_heads, key_width = log_decay_ACHK.shape
    value_width = state_AHWK.shape[-2]
    v_BCW = _by_head(rows.v_SMHW)
    keys_queries_BC2K = _by_head(rows.keys_queries_SMH2K)
    k_BCK = keys_queries_BC2K[:, :, 0]
    beta_BC1 = _by_head(rows.beta_SMH[..., None])
    cumulative_BCK = _by_head(log_decay_ACHK).cumsum(1)
    state_BWK = state_AHWK.reshape(-1, value_width, key_width)

    within_BCC, read_BCC = _pair_products(keys_queries_BC2K, cumulative_BCK)
    decay_BCK = exp(cumulative_BCK)
    decayed_BC2K = (keys_queries_BC2K * decay_BCK[:, :, None]).flatten(1, 2)
    from_state_BC2W = batch_matmul(decayed_BC2K, state_BWK.transpose(1, 2)).view(-1, chunk_size, 2, value_width)
    # (I + beta L) U = beta (V - decayed K S): forward substitution keeps the small terms small, while
    # the powers of L that a doubling scheme forms grow binomially when keys repeat.
    # The solver's bits depend on how its operands lie in memory (measured in float32), and one sequence
    # gives views where several give copies.
    u_BCW = torch.linalg.solve_triangular(
        (beta_BC1 * within_BCC).contiguous(),
        (beta_BC1 * (v_BCW - from_state_BC2W[:, :, 0])).contiguous(),
        upper=False,
        unitriangular=True,
    )
    out_BCW = (from_state_BC2W[:, :, 1] + batch_matmul(read_BCC, u_BCW)) * key_width**-0.5
    to_end_BCK = exp(cumulative_BCK[:, -1:] - cumulative_BCK) * k_BCK
    new_state_BWK = state_BWK * decay_BCK[:, -1:] + batch_matmul(u_BCW.transpose(1, 2), to_end_BCK)
    out_ACHW = out_BCW.view(num_sequences, num_heads, chunk_size, value_width).transpose(1, 2)
    return out_ACHW, new_state_BWK.view(state_AHWK.shape)


def _by_head(x_ACHK: torch.Tensor) -> torch.Tensor:
    """``[A, C, H, K] -> [A * H, C, K]``, contiguous."""
    # The flattened transpose of one sequence would be a view and that of several is a copy. Strides of operands
    # reach the solver and the products, whose bits depend on them (float32 on AMD Zen 4).
    return x_ACHK.transpose(1, 2).flatten(0, 1).contiguous()


def _pair_products(keys_queries_BC2K: torch.Tensor, cumulative_BCK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``sum_d x_i[d] k_j[d] exp(G_i[d] - G_j[d])`` for x = k (j < i) and x = q (j <= i), ``[B, C, C]``.

    The exponential is taken of each difference, never as a product of two factors: without a bound on
    the gate ``exp(-G_j)`` alone overflows.
    """
    num_matrices, chunk_size, _, key_width = keys_queries_BC2K.shape
    difference = cumulative_BCK[:, :, None] - cumulative_BCK[:, None]  # [B, C (i), C (j), K]
    weighted = exp(difference.flatten(2)).view(difference.shape) * keys_queries_BC2K[:, None, :, 0]
    pairs = batch_matmul(
        weighted.view(-1, chunk_size, key_width), keys_queries_BC2K.reshape(-1, 2, key_width).transpose(1, 2)
    ).view(num_matrices, chunk_size, chunk_size, 2)
    # Above the diagonal the exponents are positive and may overflow: selected away, not multiplied.
    below = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=cumulative_BCK.device).tril()
    zero = pairs.new_zeros(())
    return (
        torch.where(below.tril(-1), pairs[..., 0], zero),
        torch.where(below, pairs[..., 1], zero),
    )
