"""The checks of ``probe`` for KDA: the step group with its commit, and prompts.

Dims: N sequences of a call, T rows, S sequences, H heads, K key and value width, I = H * K, C = 3 * I conv channels,
X carried conv inputs, F features of a sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from outrider.ops.invariant import island_dtype
from outrider.ops.kda_step import KdaForm, KdaParameters, KdaSeats, LayerRows, ProjectedRows
from outrider.ops.probe import FEW_CASES, NUM_ROWS, OpCheck, company_violation, random_rows, same_bits
from outrider.ops.spans import spans_from_lengths

__all__ = ["KdaSizes", "kda_prompt_check", "kda_prompt_name", "kda_step_check", "kda_step_name"]

# Heads probed at most; their number is a batch dim, and the batch varies with the rows anyway.
PROBE_HEADS = 8
SPAN = 8  # rows of the verify span that is compared with single steps
# The prompt form costs a whole chunk per sequence, and few prompts meet in a step.
PROMPT_CASES = FEW_CASES[:4]

Cases = Sequence[tuple[int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaSizes:
    """One KDA layer; key and value width are equal."""

    num_heads: int
    width: int
    num_taps: int
    bound: float | None  # lower bound of the log decay
    eps: float  # of the output norm

    @property
    def name(self) -> str:
        """As a report says it."""
        return f"{self.num_heads} heads of {self.width}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A layer of such sizes with made-up parameters."""

    sizes: KdaSizes
    dtype: torch.dtype
    device: torch.device

    @property
    def num_heads(self) -> int:
        return min(self.sizes.num_heads, PROBE_HEADS)

    @property
    def inner(self) -> int:
        return self.num_heads * self.sizes.width

    @property
    def sections(self) -> list[int]:
        """Columns of the projections of a row: conv inputs, output gate, forget gate, beta."""
        return [3 * self.inner, self.inner, self.inner, self.num_heads]

    @property
    def window_shape(self) -> tuple[int, int]:
        return self.sizes.num_taps - 1, 3 * self.inner

    def random(self, *shape: int, seed: int) -> torch.Tensor:
        return random_rows(*shape, dtype=self.dtype, device=self.device, seed=seed)

    def parameters(self) -> KdaParameters:
        island, heads, width = island_dtype(self.dtype), self.num_heads, self.sizes.width
        spread = torch.linspace(-0.5, 0.5, self.inner, dtype=island, device=self.device)
        return KdaParameters(
            conv_CJ=random_rows(3 * self.inner, self.sizes.num_taps, dtype=island, device=self.device),
            a_log_H=spread[:heads],
            dt_bias_HK=spread.view(heads, width),
            o_norm_W=1 + spread[:width],
            lower_bound=self.sizes.bound,
            eps=self.sizes.eps,
        )

    def seats(self, num_seats: int, num_rows: int) -> KdaSeats:
        """Seats of one layer, with the leading dim of layers; log and seats hold NaN until they are written."""
        heads, width = self.num_heads, self.sizes.width
        wide = partial(torch.full, fill_value=torch.nan, dtype=island_dtype(self.dtype), device=self.device)
        narrow = partial(torch.full, fill_value=torch.nan, dtype=self.dtype, device=self.device)
        return KdaSeats(
            state_BHWK=wide((1, num_seats, heads, width, width)),
            window_BXC=narrow((1, num_seats, *self.window_shape)),
            u_RHW=wide((1, num_rows, heads, width)),
            k_RHK=wide((1, num_rows, heads, width)),
            decay_RHK=wide((1, num_rows, heads, width)),
            inputs_RC=narrow((1, num_rows, 3 * self.inner)),
        )

    def run(
        self, run: LayerRows, projected_TX: torch.Tensor, seats: KdaSeats, slots: Sequence[int], lengths: Sequence[int]
    ) -> torch.Tensor:
        """Run rows on the only layer of ``seats``."""
        inputs_TC, gate_TI, forget_TI, beta_TH = torch.split(projected_TX, self.sections, dim=1)
        rows = ProjectedRows(inputs_TC=inputs_TC, gate_TI=gate_TI, forget_TI=forget_TI, beta_TH=beta_TH)
        slots_S = torch.tensor(slots, dtype=torch.int64, device=self.device)
        return run(rows, seats.layer(0), slots_S, spans_from_lengths(tuple(lengths), device=self.device))

    def commit(
        self, form: KdaForm, seats: KdaSeats, slots: Sequence[int], lengths: Sequence[int], counts: Sequence[int]
    ) -> None:
        """Fold the first ``counts`` rows."""
        slots_S, counts_S = torch.tensor([list(slots), list(counts)], device=self.device).unbind()
        rows_SM = spans_from_lengths(tuple(lengths), device=self.device).padded_rows_SM
        form.commit(seats, slots_S, rows_SM, counts_S)


def _company(
    layer: _Layer,
    function: Callable[[torch.Tensor, KdaSeats, Sequence[int]], torch.Tensor],
    num_rows: int,
    cases: Cases,
) -> str | None:
    """Sequences of ``num_rows`` rows each: output and the seat afterwards, alone and in company.

    Args:
        layer: whose rows.
        function: advances the given seats by the rows ``[N * num_rows, X]`` of sequences in these slots; returns what
            is compared besides the seats, any shape, rows in order.
        num_rows: rows of a sequence.
        cases: of ``company_violation``.
    """
    num_columns, (carried, channels), heads = sum(layer.sections), layer.window_shape, layer.num_heads

    def run(x_NF: torch.Tensor) -> torch.Tensor:
        num = x_NF.shape[0]
        projected_NX, window_NF = x_NF.split([num_rows * num_columns, carried * channels], dim=1)
        seats = layer.seats(num, num * num_rows)
        # A sequence's state is made of its first row, so that neighbours have other states, NaN included. Seats are
        # in reverse, so that one that is read by its place is a neighbour's.
        pair_N2HK = projected_NX[:, : 2 * layer.inner].to(seats.u_RHW.dtype).view(num, 2, heads, layer.sizes.width)
        seats.state_BHWK[0] = (pair_N2HK[:, 0, ..., None] * pair_N2HK[:, 1, :, None]).flip(0)
        seats.window_BXC[0] = window_NF.view(num, carried, channels).flip(0)
        out = function(projected_NX.reshape(-1, num_columns), seats, range(num - 1, -1, -1))
        parts = (out, seats.state_BHWK[0].flip(0), seats.window_BXC[0].flip(0))
        return torch.cat([part.reshape(num, -1).to(seats.u_RHW.dtype) for part in parts], dim=1)

    rows = layer.random(NUM_ROWS, num_rows * num_columns + carried * channels, seed=1)
    return company_violation(run, rows, cases=cases)


def _step_company(layer: _Layer, form: KdaForm) -> str | None:
    """One row per sequence: output and log, then the commit."""
    step = form.bind_step(layer.parameters())

    def run(projected_TX: torch.Tensor, seats: KdaSeats, slots: Sequence[int]) -> torch.Tensor:
        ones = (1,) * len(slots)
        out_TI = layer.run(step, projected_TX, seats, slots, ones)
        layer.commit(form, seats, slots, ones, ones)
        log = (seats.u_RHW[0], seats.k_RHK[0], seats.decay_RHK[0])
        return torch.cat([out_TI.to(seats.u_RHW.dtype), *(part.flatten(1) for part in log)], dim=1)

    return _company(layer, run, 1, FEW_CASES)


def _prompt_company(layer: _Layer, form: KdaForm, chunk_size: int, num_rows: int, cases: Cases) -> str | None:
    """Prompts of ``num_rows`` rows."""
    prompt = form.bind_prompt(layer.parameters(), chunk_size)

    def run(projected_TX: torch.Tensor, seats: KdaSeats, slots: Sequence[int]) -> torch.Tensor:
        return layer.run(prompt, projected_TX, seats, slots, (num_rows,) * len(slots))

    return _company(layer, run, num_rows, cases)


def _step_spans(layer: _Layer, form: KdaForm) -> str | None:
    """Two ragged spans and the commit of a part of each, against stepping through them row by row."""
    lengths, counts, slots = (NUM_ROWS, SPAN), (NUM_ROWS - 1, SPAN - 2), (2, 0)
    step = form.bind_step(layer.parameters())
    projected_TX = layer.random(sum(lengths), sum(layer.sections), seed=2)
    together, stepped = (layer.seats(NUM_ROWS, sum(lengths)) for _ in range(2))
    shape = together.state_BHWK.shape
    for seats in (together, stepped):
        seats.state_BHWK.copy_(random_rows(*shape, dtype=seats.state_BHWK.dtype, device=layer.device, seed=3))
        seats.window_BXC.copy_(layer.random(*seats.window_BXC.shape, seed=4))
    out_TI = layer.run(step, projected_TX, together, slots, lengths)
    layer.commit(form, together, slots, lengths, counts)
    row = 0
    for slot, length, count in zip(slots, lengths, counts, strict=True):
        for m in range(length):
            alone_1I = layer.run(step, projected_TX[row : row + 1], stepped, (slot,), (1,))
            if not same_bits(alone_1I[0], out_TI[row]):
                return f"row {m} of a span of {length} differs from the row stepped"
            layer.commit(form, stepped, (slot,), (1,), (1,))
            row += 1
            if m + 1 == count:
                pairs = ((x.state_BHWK[0, slot], x.window_BXC[0, slot]) for x in (together, stepped))
                if not all(same_bits(left, right) for left, right in zip(*pairs, strict=True)):
                    return f"the seat after the commit of {count} rows of {length} differs from the seat stepped"
    return None


def kda_step_name(sizes: KdaSizes) -> str:
    """Name of the step's check."""
    return f"KDA step of {sizes.name}"


def kda_step_check(forms: Sequence[KdaForm], sizes: KdaSizes, dtype: torch.dtype, device: torch.device) -> OpCheck:
    """Step and commit in each form: one row per sequence in company, then spans and their commit against steps."""
    layer, form_named = _Layer(sizes=sizes, dtype=dtype, device=device), {form.name: form for form in forms}
    return OpCheck(
        name=kda_step_name(sizes),
        geometries=tuple(form_named),
        find_violation=lambda name: _step_company(layer, form_named[name]) or _step_spans(layer, form_named[name]),
    )


def kda_prompt_name(sizes: KdaSizes) -> str:
    """Name of the prompt's check."""
    return f"KDA prompt of {sizes.name}"


def kda_prompt_check(
    forms: Sequence[KdaForm], sizes: KdaSizes, chunk_size: int, dtype: torch.dtype, device: torch.device
) -> OpCheck:
    """Prompt rows in each form: a whole chunk, and one that is not, per sequence."""
    layer, form_named = _Layer(sizes=sizes, dtype=dtype, device=device), {form.name: form for form in forms}

    def find(name: str) -> str | None:
        company = partial(_prompt_company, layer, form_named[name], chunk_size)
        return company(chunk_size, PROMPT_CASES) or company(chunk_size // 2 + 1, PROMPT_CASES[:2])

    return OpCheck(name=kda_prompt_name(sizes), geometries=tuple(form_named), find_violation=find)
