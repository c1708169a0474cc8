"""The checks of ``probe`` for latent attention.

Dims: N rows of a call, T rows, S sequences, H heads, C latent and shared key width, R rows of the flat cache,
L keys, P pages, F features of a row.
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
from outrider.ops.invariant import ROW_TILE
from outrider.ops.native.library import Library
from outrider.ops.native.mla import NativeMla, absorb_into_panels
from outrider.ops.paged import KEY_TILE, PagedSpans, paged_spans
from outrider.ops.probe import FEW_CASES, FIXED, NUM_ROWS, OpCheck, company_violation, random_rows, same_bits
from outrider.ops.spans import SpanLayout, spans_from_lengths

__all__ = [
    "MlaSizes",
    "absorbed_check",
    "absorbed_name",
    "expanded_check",
    "expanded_name",
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


def expanded_name(sizes: MlaSizes) -> str:
    """Name of the check of prompt attention."""
    return f"prompt attention of {sizes.name}"


def expanded_check(sizes: MlaSizes, dtype: torch.dtype, device: torch.device, native: Library | None = None) -> OpCheck:
    """Attention of prompt rows: the native form of ``absorbed_check``, where there is one, or the expanded form."""
    cut = sizes.cut()
    native = native if sizes.suit_native else None

    def find(geometry: str) -> str | None:
        kv_b_OC = _kv_b_weight(cut, dtype, device)
        run: Attend = partial(_with_weights, partial(mla_expanded, scale=cut.scale), kv_b_OC)
        if native is not None and geometry == native.geometry:
            weights = absorb_into_panels(
                kv_b_OC, num_heads=cut.num_heads, nope_dim=cut.nope_dim, value_dim=cut.value_dim
            )
            run = partial(_with_weights, partial(NativeMla(native).absorbed, scale=cut.scale), weights)
        return _attention_violation(run, cut, PROMPT_CASES, dtype, device)

    names = (FIXED,) if native is None else (native.geometry, FIXED)
    return OpCheck(name=expanded_name(sizes), geometries=names, find_violation=find)


def _with_weights(
    attend: Callable[..., torch.Tensor],
    weights: object,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    rows_RC: torch.Tensor,
    spans: PagedSpans,
) -> torch.Tensor:
    return attend(q_nope, q_rope, weights, rows_RC, spans)


def _kv_b_weight(sizes: MlaSizes, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    num_out = sizes.num_heads * (sizes.nope_dim + sizes.value_dim)
    return random_rows(num_out, sizes.latent_dim, dtype=dtype, device=device) * 0.2
