"""The checks of ``probe`` for what mixes rows of a sequence: KDA and latent attention.

Dims: N rows of a call, T rows, S sequences, H heads, K key and value width, C latent and shared key width,
R rows of the flat cache, L keys, P pages, F features of a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from outrider.ops.attention import (
    AbsorbedFunction,
    AbsorbFunction,
    absorb_weights,
    append_latents,
    mla_absorbed,
    mla_expanded,
)
from outrider.ops.invariant import ROW_TILE, island_dtype
from outrider.ops.kda import KdaResult, kda_beta, kda_commit, kda_gate, kda_recurrent
from outrider.ops.kda_chunk import kda_chunk
from outrider.ops.native.library import Library
from outrider.ops.native.mla import NativeMla, absorb_into_panels
from outrider.ops.paged import KEY_TILE, PagedSpans, paged_spans
from outrider.ops.probe import FEW_CASES, NUM_ROWS, OpCheck, company_violation, fixed_check, random_rows, same_bits
from outrider.ops.spans import SpanLayout, spans_from_lengths, to_padded

__all__ = [
    "MlaSizes",
    "absorbed_check",
    "absorbed_name",
    "expanded_check",
    "kda_check",
    "kda_chunk_check",
    "query_tile_named",
]

# Heads probed at most; their number is a batch dim, and the batch varies with the rows anyway.
PROBE_HEADS = 8
# Keys before a probed row: more than one key tile, and not a whole number of them.
NUM_KEYS = KEY_TILE + 6
SPAN = 8  # rows of the verify span that is compared with single steps
QUERY_TILES = (ROW_TILE, 32, 64)
# The prompt forms cost a whole chunk or tile per sequence, and few prompts meet in a step.
PROMPT_CASES = FEW_CASES[:4]

Cases = Sequence[tuple[int, str]]

KdaFunction = Callable[..., KdaResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class _KdaSizes:
    """One KDA layer in a check; key and value width are equal."""

    num_heads: int
    width: int
    bound: float | None  # lower bound of the log decay
    dtype: torch.dtype
    device: torch.device

    def rows(self, *leading: int, seed: int) -> torch.Tensor:
        """Random rows ``[..., 4, H, K]``: q, k, v and the raw gate."""
        return random_rows(*leading, 4, self.num_heads, self.width, dtype=self.dtype, device=self.device, seed=seed)

    def run(
        self, function: KdaFunction, x_T4HK: torch.Tensor, state_SHKK: torch.Tensor, layout: SpanLayout
    ) -> KdaResult:
        """Gates and update of such rows."""
        q, k, v, raw = x_T4HK.unbind(1)
        shape = (self.num_heads, self.width)
        parameter = torch.linspace(-0.5, 0.5, self.num_heads * self.width, dtype=state_SHKK.dtype, device=self.device)
        log_decay = kda_gate(raw, parameter[: self.num_heads], parameter.view(shape), self.bound)
        return function(q, k, v, log_decay, kda_beta(raw[..., 0]), state_SHKK, layout)


def _kda_company(sizes: _KdaSizes, function: KdaFunction, num_rows: int, cases: Cases) -> str | None:
    """Sequences of ``num_rows`` rows each: output and state alone and in company."""

    def run(x_NM4HK: torch.Tensor) -> torch.Tensor:
        # A sequence's state is made of its first row, so that neighbours have other states, NaN included.
        wide = x_NM4HK[:, 0].to(island_dtype(sizes.dtype))
        state_NHKK = wide[:, 2, :, :, None] * wide[:, 1, :, None, :]
        layout = spans_from_lengths((num_rows,) * x_NM4HK.shape[0], device=sizes.device)
        result = sizes.run(function, x_NM4HK.flatten(0, 1), state_NHKK, layout)
        out = result.out_THW.reshape(x_NM4HK.shape[0], -1).to(result.state_SHWK.dtype)
        return torch.cat([out, result.state_SHWK.flatten(1)], dim=1)

    return company_violation(run, sizes.rows(NUM_ROWS, num_rows, seed=1), cases=cases)


def _kda_spans(sizes: _KdaSizes) -> str | None:
    """Two ragged spans, and their commit, against stepping through them."""
    lengths = (NUM_ROWS, SPAN)
    rows_T4HK = sizes.rows(sum(lengths), seed=2)
    shape = (len(lengths), sizes.num_heads, sizes.width, sizes.width)
    before_SHKK = random_rows(*shape, dtype=island_dtype(sizes.dtype), device=sizes.device, seed=3)
    layout = spans_from_lengths(lengths, device=sizes.device)
    together = sizes.run(kda_recurrent, rows_T4HK, before_SHKK, layout)
    log = together.log
    assert log is not None, "the per-token form logs every row"
    committed_SHKK = kda_commit(
        before_SHKK,
        to_padded(log.u_THW, layout),
        to_padded(log.k_THK, layout),
        to_padded(log.decay_THK, layout),
        torch.tensor(lengths, device=sizes.device),
    )
    one, row = spans_from_lengths((1,), device=sizes.device), 0
    for sequence, length in enumerate(lengths):
        state_1HKK = before_SHKK[sequence : sequence + 1]
        for m in range(length):
            step = sizes.run(kda_recurrent, rows_T4HK[row : row + 1], state_1HKK, one)
            if not same_bits(step.out_THW[0], together.out_THW[row]):
                return f"row {m} of a span of {length} differs from the row stepped"
            state_1HKK, row = step.state_SHWK, row + 1
        for state_SHKK in (together.state_SHWK, committed_SHKK):
            if not same_bits(state_1HKK[0], state_SHKK[sequence]):
                return f"the state after a span of {length}, or after its commit, differs from the state stepped"
    return None


def kda_check(num_heads: int, width: int, bound: float | None, dtype: torch.dtype, device: torch.device) -> OpCheck:
    """Gates and per-token update: one row per sequence in company, then spans and their commit against steps."""
    sizes = _KdaSizes(num_heads=min(num_heads, PROBE_HEADS), width=width, bound=bound, dtype=dtype, device=device)
    return fixed_check(
        f"KDA step of {num_heads} heads of {width}",
        lambda: _kda_company(sizes, kda_recurrent, 1, FEW_CASES) or _kda_spans(sizes),
    )


def kda_chunk_check(
    num_heads: int, width: int, bound: float | None, chunk_size: int, dtype: torch.dtype, device: torch.device
) -> OpCheck:
    """Prompt form of the update: a whole chunk, and one that is not, per sequence."""
    sizes = _KdaSizes(num_heads=min(num_heads, PROBE_HEADS), width=width, bound=bound, dtype=dtype, device=device)
    function = partial(kda_chunk, chunk_size=chunk_size)
    return fixed_check(
        f"KDA chunk of {num_heads} heads of {width}",
        lambda: (
            _kda_company(sizes, function, chunk_size, PROMPT_CASES)
            or _kda_company(sizes, function, chunk_size // 2 + 1, PROMPT_CASES[:2])
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSizes:
    """Widths of latent attention."""

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    latent_dim: int

    @property
    def name(self) -> str:
        """As a report says it."""
        return f"{self.num_heads} heads of {self.nope_dim + self.rope_dim}"

    def cut(self) -> "MlaSizes":
        """The sizes that stand for these in a check."""
        return MlaSizes(
            num_heads=min(self.num_heads, PROBE_HEADS),
            nope_dim=self.nope_dim,
            rope_dim=self.rope_dim,
            value_dim=self.value_dim,
            latent_dim=self.latent_dim,
        )

    @property
    def suit_native(self) -> bool:
        """Whether native attention takes them: it multiplies pairs of values."""
        return self.nope_dim % 2 == self.rope_dim % 2 == self.latent_dim % 2 == 0

    @property
    def row_features(self) -> int:
        """Values of a query of all heads and of one cached row."""
        return self.num_heads * (self.nope_dim + self.rope_dim) + self.latent_dim + self.rope_dim

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return float((self.nope_dim + self.rope_dim) ** -0.5)


# q_nope, q_rope, cached rows, spans -> [T, H, W]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PagedSpans], torch.Tensor]


def _attend_rows(
    attend: Attend, sizes: MlaSizes, x_NF: torch.Tensor, layout: SpanLayout, extra_tiles: int
) -> torch.Tensor:
    """Attention of rows that hold a query and a cached row; keys of a sequence are multiples of its first row's.

    Row m of a span sees ``starts + 1 + m`` keys. ``extra_tiles`` are key tiles that only a longer neighbour has.
    """
    num_heads, nope, rope = sizes.num_heads, sizes.nope_dim, sizes.rope_dim
    query, cached_NC = x_NF.split([num_heads * (nope + rope), sizes.latent_dim + rope], dim=1)
    q_nope, q_rope = query.view(-1, num_heads, nope + rope).split([nope, rope], dim=-1)
    num_keys = NUM_KEYS + SPAN
    factors_L1 = torch.linspace(-1.0, 1.0, num_keys, device=x_NF.device).to(x_NF.dtype)[:, None]
    sequence_T = torch.tensor([s for s, length in enumerate(layout.lengths) for _ in range(length)], device=x_NF.device)
    context_lens_T = torch.tensor(
        [start + 1 + m for start, length in zip(layout.starts, layout.lengths, strict=True) for m in range(length)],
        device=x_NF.device,
    )
    rows_RC = (cached_NC[layout.padded_rows_SM[:, 0]][:, None] * factors_L1).flatten(0, 1)
    page_table_SP = torch.arange(rows_RC.shape[0], device=x_NF.device).view(layout.num_sequences, num_keys)
    max_context = max(start + length for start, length in zip(layout.starts, layout.lengths, strict=True))
    spans = paged_spans(
        layout, context_lens_T, sequence_T, page_table_SP, page_size=1, max_context=max_context + extra_tiles * KEY_TILE
    )
    return attend(q_nope, q_rope, rows_RC, spans)


def _attention_violation(
    attend: Attend, sizes: MlaSizes, cases: Cases, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Sequences of one row in company, then spans against single rows."""

    def one_row_each(x_NF: torch.Tensor) -> torch.Tensor:
        num_rows = x_NF.shape[0]
        layout = spans_from_lengths((1,) * num_rows, starts=(NUM_KEYS - 1,) * num_rows, device=device)
        return _attend_rows(attend, sizes, x_NF, layout, extra_tiles=min(num_rows - 1, 2))

    rows_3F = random_rows(NUM_ROWS, sizes.row_features, dtype=dtype, device=device, seed=2)
    violation = company_violation(one_row_each, rows_3F, cases=cases)
    if violation is not None:
        return violation
    rows_NF = random_rows(SPAN + NUM_ROWS, sizes.row_features, dtype=dtype, device=device, seed=3)
    first = NUM_KEYS - 1
    ragged = spans_from_lengths((NUM_ROWS, SPAN), starts=(first, first), device=device)
    together = _attend_rows(attend, sizes, rows_NF, ragged, extra_tiles=1)
    for row in range(rows_NF.shape[0]):
        begin = 0 if row < NUM_ROWS else NUM_ROWS
        alone_1F = rows_NF[row : row + 1].clone()
        cached = sizes.latent_dim + sizes.rope_dim
        alone_1F[:, -cached:] = rows_NF[begin, -cached:]
        layout = spans_from_lengths((1,), starts=(first + row - begin,), device=device)
        alone = _attend_rows(attend, sizes, alone_1F, layout, extra_tiles=0)
        if not same_bits(alone[0], together[row]):
            return f"row {row - begin} of a span differs from the row alone"
    return None


def _query_tile_name(num_rows: int) -> str:
    return f"query rows in multiples of {num_rows}"


def query_tile_named(geometry: str) -> int:
    """The ``row_tile`` that a geometry of ``absorbed_check`` means."""
    return {_query_tile_name(num_rows): num_rows for num_rows in QUERY_TILES}[geometry]


def absorbed_check(sizes: MlaSizes, dtype: torch.dtype, device: torch.device, native: Library | None = None) -> OpCheck:
    """Attention of decode and verify rows, its products with the absorbed weights included, and new latents.

    Candidates are the native form, where a library is given and takes these sizes, and the query tiles of the torch
    form.
    """
    cut = sizes.cut()
    native = native if sizes.suit_native else None

    def find(geometry: str) -> str | None:
        absorb, absorbed = _absorbed_form(geometry, native)
        weights = absorb(
            _kv_b_weight(cut, dtype, device), num_heads=cut.num_heads, nope_dim=cut.nope_dim, value_dim=cut.value_dim
        )

        def attend(
            q_nope: torch.Tensor, q_rope: torch.Tensor, rows_RC: torch.Tensor, spans: PagedSpans
        ) -> torch.Tensor:
            gate_THW = q_nope.new_full((q_nope.shape[0], cut.num_heads, cut.value_dim), 0.5)
            return absorbed(q_nope, q_rope, weights, rows_RC, spans, scale=cut.scale, gate_THW=gate_THW)

        return _append_violation(geometry, native, cut, dtype, device) or _attention_violation(
            attend, cut, FEW_CASES, dtype, device
        )

    names = tuple(_query_tile_name(num_rows) for num_rows in QUERY_TILES)
    if native is not None:
        names = (native.geometry, *names)
    return OpCheck(name=absorbed_name(sizes), geometries=names, find_violation=find)


def _absorbed_form(geometry: str, native: Library | None) -> tuple[AbsorbFunction, AbsorbedFunction]:
    """Weights and attention that a geometry of ``absorbed_check`` means."""
    if native is not None and geometry == native.geometry:
        return absorb_into_panels, NativeMla(native).absorbed
    return absorb_weights, partial(mla_absorbed, row_tile=query_tile_named(geometry))


def _append_violation(
    geometry: str, native: Library | None, sizes: MlaSizes, dtype: torch.dtype, device: torch.device
) -> str | None:
    """New latents, normed and stored."""
    is_native = native is not None and geometry == native.geometry
    append = NativeMla(native).append_latents if native is not None and is_native else append_latents
    gain_C = random_rows(sizes.latent_dim, dtype=dtype, device=device)

    def run(x_NC: torch.Tensor) -> torch.Tensor:
        rows_NC = torch.empty_like(x_NC)
        append(x_NC, gain_C, 1e-6, rows_NC, torch.arange(x_NC.shape[0], device=device))
        return rows_NC

    rows_3C = random_rows(NUM_ROWS, sizes.latent_dim + sizes.rope_dim, dtype=dtype, device=device, seed=4)
    return company_violation(run, rows_3C, cases=FEW_CASES)


def absorbed_name(sizes: MlaSizes) -> str:
    """Name of the check of decode attention."""
    return f"decode attention of {sizes.name}"


def expanded_check(sizes: MlaSizes, dtype: torch.dtype, device: torch.device) -> OpCheck:
    """Attention of prompt rows."""
    cut = sizes.cut()

    def find() -> str | None:
        kv_b_OC = _kv_b_weight(cut, dtype, device)

        def attend(
            q_nope: torch.Tensor, q_rope: torch.Tensor, rows_RC: torch.Tensor, spans: PagedSpans
        ) -> torch.Tensor:
            return mla_expanded(q_nope, q_rope, kv_b_OC, rows_RC, spans, scale=cut.scale)

        return _attention_violation(attend, cut, PROMPT_CASES, dtype, device)

    return fixed_check(f"prompt attention of {sizes.name}", find)


def _kv_b_weight(sizes: MlaSizes, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    num_out = sizes.num_heads * (sizes.nope_dim + sizes.value_dim)
    return random_rows(num_out, sizes.latent_dim, dtype=dtype, device=device) * 0.2
