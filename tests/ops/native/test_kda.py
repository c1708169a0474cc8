"""The native KDA step and commit: against the torch form, row by row, and against itself."""

import dataclasses
import itertools

import pytest
import torch

from outrider.ops.kda_step import PLAIN_KDA, KdaParameters, KdaSeats, ProjectedRows
from outrider.ops.native.kda import native_kda
from outrider.ops.probe import run_checks
from outrider.ops.probe_kda import KdaSizes, kda_prompt_check, kda_step_check
from outrider.ops.spans import spans_from_lengths

BF16 = torch.bfloat16
# heads, width, taps: the shipped model, K3, and widths that no vector, tile or block divides
SHAPES = [(3, 64, 4), (8, 128, 4), (1, 16, 4), (2, 48, 3), (3, 7, 2), (5, 33, 4), (2, 80, 5), (1, 1, 4)]
LENGTHS = (1, 8, 3, 16, 2, 1, 7)


@pytest.fixture
def form(native):
    return native_kda(native)


@pytest.fixture(params=[-5.0, None], ids=["bounded", "softplus"])
def bound(request):
    return request.param


def make_parameters(shape, bound):
    heads, width, taps = shape
    return KdaParameters(
        conv_CJ=torch.randn(3 * heads * width, taps) * 0.6,
        a_log_H=torch.randn(heads) * 0.3,
        dt_bias_HK=torch.randn(heads, width) - 2,
        o_norm_W=1 + 0.2 * torch.randn(width),
        lower_bound=bound,
        eps=1e-5,
    )


def make_rows(shape, num_rows):
    """Projections as the model has them: columns of one wider product, so with strides."""
    heads, width, _ = shape
    inner = heads * width
    projected = (1.5 * torch.randn(num_rows, 5 * inner + heads + 3)).to(BF16)
    sections = [3 * inner, inner, inner, heads, 3]
    inputs, gate, forget, beta, _ = torch.split(projected, sections, dim=1)
    return ProjectedRows(inputs_TC=inputs, gate_TI=gate, forget_TI=forget, beta_TH=beta)


def take(rows, index):
    return ProjectedRows(**{field.name: getattr(rows, field.name)[index] for field in dataclasses.fields(rows)})


def poison_bytes(*shape, dtype):
    """What memory may hold by accident: bytes 0x3e, which are ordinary numbers."""
    return torch.full((*shape, dtype.itemsize), 0x3E, dtype=torch.uint8).view(dtype).squeeze(-1)


def make_seats(shape, num_layers, num_seats, num_rows, live=()):
    """Seats of all layers: NaN everywhere but in the live ones, a log full of stale numbers."""
    heads, width, taps = shape
    seats = KdaSeats(
        state_BHWK=torch.full((num_layers, num_seats, heads, width, width), torch.nan),
        window_BXC=torch.full((num_layers, num_seats, taps - 1, 3 * heads * width), torch.nan, dtype=BF16),
        u_RHW=poison_bytes(num_layers, num_rows, heads, width, dtype=torch.float32),
        k_RHK=poison_bytes(num_layers, num_rows, heads, width, dtype=torch.float32),
        decay_RHK=poison_bytes(num_layers, num_rows, heads, width, dtype=torch.float32),
        inputs_RC=poison_bytes(num_layers, num_rows, 3 * heads * width, dtype=BF16),
    )
    for slot in live:
        seats.state_BHWK[:, slot] = torch.randn(num_layers, heads, width, width)
        seats.window_BXC[:, slot] = torch.randn(num_layers, taps - 1, 3 * heads * width).to(BF16)
    return seats


def copy_of(seats):
    return KdaSeats(**{field.name: getattr(seats, field.name).clone() for field in dataclasses.fields(seats)})


def turned(seats):
    """A copy for the other form: native seats hold the state as [key, value], those of torch as [value, key]."""
    other = copy_of(seats)
    other.state_BHWK.copy_(seats.state_BHWK.mT)
    return other


def poison_log(seats, rows):
    for log in (seats.u_RHW, seats.k_RHK, seats.decay_RHK, seats.inputs_RC):
        log[:, rows] = torch.nan


def log_rows(seats, index):
    return tuple(log[0, index] for log in (seats.u_RHW, seats.k_RHK, seats.decay_RHK, seats.inputs_RC))


def step(form, parameters, rows, seats, slots, lengths):
    """A step on layer 0."""
    layout = spans_from_lengths(tuple(lengths))
    return form.bind_step(parameters)(rows, seats.layer(0), torch.tensor(slots, dtype=torch.int64), layout)


def commit(form, seats, slots, lengths, counts):
    rows_SM = spans_from_lengths(tuple(lengths)).padded_rows_SM
    form.commit(seats, torch.tensor(slots), rows_SM, torch.tensor(counts))


def assert_same_seat(seats, others, slot):
    for name in ("state_BHWK", "window_BXC"):
        left, right = getattr(seats, name)[:, slot], getattr(others, name)[:, slot]
        assert left.isfinite().all()
        assert torch.equal(left, right), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_torch_form(form, shape, bound):
    parameters, rows = make_parameters(shape, bound), make_rows(shape, sum(LENGTHS))
    slots = (4, 0, 9, 2, 7, 1, 5)
    native = make_seats(shape, 1, 11, 50, live=slots)
    plain, before = turned(native), copy_of(native)
    got, expected = (step(f, parameters, rows, s, slots, LENGTHS) for f, s in ((form, native), (PLAIN_KDA, plain)))
    assert got.dtype == BF16 and got.isfinite().all()
    num_rows = sum(LENGTHS)
    pairs = [(got, expected), *zip(log_rows(native, slice(num_rows)), log_rows(plain, slice(num_rows)), strict=True)]
    for actual, wanted in pairs[:-1]:
        # A rounding to bfloat16 inside may fall to the other side where the last bit of silu differs: rarely, and
        # then by 2^-8 of that value, which reaches the later rows of the span.
        error = (actual.double() - wanted.double()).abs() / wanted.double().abs().max()
        assert error.max() < 2**-6, error.max()
        assert error.median() < (1e-5 if actual.dtype == torch.float32 else 2**-8)
    assert torch.equal(*pairs[-1]), "conv inputs are logged as they are"
    # Nothing else is written: neither seats nor the log behind the rows.
    for field in ("state_BHWK", "window_BXC"):
        assert torch.equal(getattr(native, field)[:, slots], getattr(before, field)[:, slots])
        assert getattr(native, field)[:, [3, 6, 8, 10]].isnan().all()
    for left, right in zip(
        log_rows(native, slice(num_rows, None)), log_rows(before, slice(num_rows, None)), strict=True
    ):
        assert torch.equal(left, right)


@pytest.mark.parametrize("shape", [(3, 64, 4), (2, 48, 3), (3, 7, 2)], ids=str)
def test_decay_and_keys_are_those_of_the_formulas(form, shape, bound):
    """Against float64, with gates from fully open to fully closed."""
    heads, width, _ = shape
    parameters, rows = make_parameters(shape, bound), make_rows(shape, 24)
    rows.forget_TI.mul_(torch.tensor([0.0, 1e-3, 1.0, 30.0]).repeat(6)[:, None])
    rows.forget_TI[0, 0], rows.forget_TI[1, 0] = torch.inf, -torch.inf
    seats = make_seats(shape, 1, 1, 24, live=(0,))
    step(form, parameters, rows, seats, (0,), (24,))
    _, key, decay, _ = (log.double() for log in log_rows(seats, slice(24)))
    biased = (rows.forget_TI.float().view(24, heads, width) + parameters.dt_bias_HK).double()
    rate = parameters.a_log_H.double().exp()[:, None]
    softplus = biased.clamp_min(0) + torch.log1p((-biased.abs()).exp())
    exponent = -rate * softplus if bound is None else bound * torch.sigmoid(rate * biased)
    error = (decay - exponent.exp()).abs()
    # A last bit of the exponent weighs as much as the exponent is large.
    assert (error <= exponent.exp() * 2.0**-22 * (2 + exponent.abs().clamp_max(200)) + 2.0**-140).all()
    assert torch.allclose(key.norm(dim=-1), torch.ones(24, heads, dtype=torch.float64), atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 64, 4), (8, 128, 4), (5, 33, 4), (3, 7, 2)], ids=str)
def test_a_sequence_has_the_same_bits_alone_and_in_company(form, shape, bound, threads):
    parameters, rows = make_parameters(shape, bound), make_rows(shape, sum(LENGTHS))
    slots, starts = (4, 0, 9, 2, 7, 1, 5), [0, *itertools.accumulate(LENGTHS)]
    whole = make_seats(shape, 1, 11, 50, live=slots)
    before = copy_of(whole)
    out = step(form, parameters, rows, whole, slots, LENGTHS)
    for first, last in [*((s, s + 1) for s in range(7)), (0, 2), (3, 7), (1, 6)]:
        span = slice(starts[first], starts[last])
        part, num_rows = copy_of(before), starts[last] - starts[first]
        alone = step(form, parameters, take(rows, span), part, slots[first:last], LENGTHS[first:last])
        assert torch.equal(alone, out[span])
        for left, right in zip(log_rows(part, slice(num_rows)), log_rows(whole, span), strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(form, shape):
    parameters, rows = make_parameters(shape, -5.0), make_rows(shape, 56)
    seats = make_seats(shape, 1, 8, 56, live=range(8))
    outcomes, threads = [], torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            ours = copy_of(seats)
            out = step(form, parameters, rows, ours, tuple(range(8)), (7,) * 8)
            commit(form, ours, tuple(range(8)), (7,) * 8, (0, 1, 2, 3, 4, 5, 6, 7))
            outcomes.append((out, ours.state_BHWK, ours.window_BXC, *log_rows(ours, slice(None))))
    finally:
        torch.set_num_threads(threads)
    for other in outcomes[1:]:
        assert all(torch.equal(left, right) for left, right in zip(outcomes[0], other, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_commit_of_any_count_is_the_state_stepped(form, shape, bound, threads):
    """Every accept count of a span, with NaN in the rejected rows, against stepping one row at a time."""
    length, slot = 8, 2
    parameters, rows = make_parameters(shape, bound), make_rows(shape, length)
    before = make_seats(shape, 1, 4, length, live=(slot,))
    verified = copy_of(before)
    out = step(form, parameters, rows, verified, (slot,), (length,))
    stepped = copy_of(before)
    for count in range(length + 1):
        committed = copy_of(verified)
        poison_log(committed, slice(count, None))
        commit(form, committed, (slot,), (length,), (count,))
        assert_same_seat(committed, stepped, slot)
        assert committed.state_BHWK[:, [0, 1, 3]].isnan().all()
        assert committed.window_BXC[:, [0, 1, 3]].isnan().all()
        if count < length:
            alone = step(form, parameters, take(rows, slice(count, count + 1)), stepped, (slot,), (1,))
            assert torch.equal(alone[0], out[count])
            commit(form, stepped, (slot,), (1,), (1,))


def test_all_layers_and_sequences_commit_their_own_counts(form, threads):
    shape, num_layers, lengths, counts, slots = (2, 48, 4), 3, (5, 1, 8, 3), (2, 1, 0, 3), (6, 1, 3, 0)
    seats = make_seats(shape, num_layers, 8, 20, live=slots)
    for log in (seats.u_RHW, seats.k_RHK, seats.inputs_RC):
        log.copy_(torch.randn(log.shape))
    seats.decay_RHK.uniform_()
    expected = copy_of(seats)
    starts = [0, *itertools.accumulate(lengths)]
    for start, length, count, slot in zip(starts, lengths, counts, slots, strict=False):
        poison_log(seats, slice(start + count, start + length))
        for row in range(start, start + count):
            for log in (expected.u_RHW, expected.k_RHK, expected.decay_RHK, expected.inputs_RC):
                log[:, 0] = log[:, row]
            commit(form, expected, (slot,), (1,), (1,))
    poison_log(seats, slice(sum(lengths), None))
    commit(form, seats, slots, lengths, counts)
    for slot in slots:
        assert_same_seat(seats, expected, slot)
    assert seats.state_BHWK[:, [2, 4, 5, 7]].isnan().all()


def test_a_commit_is_that_of_the_torch_form(form):
    """Both round the decayed state and then add the outer product fused."""
    shape, lengths, counts, slots = (3, 64, 4), (5, 8), (4, 8), (1, 0)
    native = make_seats(shape, 2, 2, 13, live=slots)
    for log in (native.u_RHW, native.k_RHK, native.inputs_RC):
        log.copy_(torch.randn(log.shape))
    native.decay_RHK.uniform_()
    plain = turned(native)
    commit(form, native, slots, lengths, counts)
    commit(PLAIN_KDA, plain, slots, lengths, counts)
    assert torch.equal(native.window_BXC, plain.window_BXC)
    torch.testing.assert_close(native.state_BHWK, turned(plain).state_BHWK, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 64, 4), (3, 7, 2)], ids=str)
def test_poison_stays_in_its_row_span_and_seat(form, shape):
    """NaN in a neighbour, its seat, and the later rows of a span reaches no other row."""
    lengths, slots = (2, 6, 3), (3, 1, 0)
    parameters, rows = make_parameters(shape, -5.0), make_rows(shape, sum(lengths))
    seats = make_seats(shape, 1, 4, 11, live=slots)
    clean = step(form, parameters, rows, copy_of(seats), slots, lengths)
    poisoned = copy_of(seats)
    poisoned.state_BHWK[:, 3] = torch.nan
    poisoned.window_BXC[:, 3] = torch.nan
    bad = take(rows, torch.arange(11))
    for part in (bad.inputs_TC, bad.gate_TI, bad.forget_TI, bad.beta_TH):
        part[:2] = torch.nan
        part[2 + 4 : 2 + 6] = torch.nan
    got = step(form, parameters, bad, poisoned, slots, lengths)
    keep = [2, 3, 4, 5, 8, 9, 10]
    assert torch.equal(got[keep], clean[keep])
    assert got[[0, 1, 6, 7]].isnan().all()


def test_nothing_to_do_is_done(form):
    shape = (3, 64, 4)
    parameters, seats = make_parameters(shape, -5.0), make_seats(shape, 2, 2, 4, live=(0, 1))
    before = copy_of(seats)
    assert step(form, parameters, make_rows(shape, 0), seats, (), ()).shape == (0, 192)
    commit(form, seats, (0, 1), (1, 2), (0, 0))
    assert torch.equal(seats.state_BHWK, before.state_BHWK)
    assert torch.equal(seats.window_BXC, before.window_BXC)


def test_a_bound_step_may_serve_other_seats(form):
    """Addresses of the seats are kept between calls; other seats must be noticed."""
    shape = (2, 16, 4)
    parameters, rows = make_parameters(shape, -5.0), make_rows(shape, 2)
    bound_step, layout, slots_S = form.bind_step(parameters), spans_from_lengths((2,)), torch.tensor([0])
    both = [make_seats(shape, 1, 1, 2, live=(0,)) for _ in range(2)]
    outs = [bound_step(rows, seats.layer(0), slots_S, layout) for seats in both]
    assert not torch.equal(*outs)
    for seats, out in zip(both, outs, strict=True):
        assert torch.equal(step(form, parameters, rows, copy_of(seats), (0,), (2,)), out)


def test_what_would_be_read_wrongly_is_refused(form):
    shape = (2, 16, 4)
    parameters, rows = make_parameters(shape, -5.0), make_rows(shape, 2)
    seats = make_seats(shape, 1, 1, 2, live=(0,))
    wide = ProjectedRows(**{field.name: getattr(rows, field.name).float() for field in dataclasses.fields(rows)})
    with pytest.raises(AssertionError, match="contiguous bfloat16"):
        step(form, parameters, wide, seats, (0,), (2,))
    with pytest.raises(AssertionError, match="3 rows exceed a log of 2"):
        step(form, parameters, make_rows(shape, 3), seats, (0,), (3,))
    with pytest.raises(AssertionError, match="contiguous"):
        step(form, parameters, rows, dataclasses.replace(seats, u_RHW=seats.u_RHW.double()), (0,), (2,))


def prompt(form, parameters, rows, seats, slots, lengths, starts=None):
    """Prompt rows on layer 0."""
    layout = spans_from_lengths(tuple(lengths), starts=starts)
    return form.bind_prompt(parameters, 16)(rows, seats.layer(0), torch.tensor(slots, dtype=torch.int64), layout)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_prompt_has_the_bits_of_stepping_and_committing(form, shape, bound, threads):
    """Over several pieces and a ragged one, in company, wherever it is cut."""
    lengths, slots = (37, 16, 1, 50), (4, 0, 2, 1)
    parameters, rows = make_parameters(shape, bound), make_rows(shape, sum(lengths))
    whole = make_seats(shape, 1, 5, 60, live=slots)
    before = copy_of(whole)
    out = prompt(form, parameters, rows, whole, slots, lengths)
    assert out.isfinite().all()
    for left, right in zip(log_rows(whole, slice(None)), log_rows(before, slice(None)), strict=True):
        assert torch.equal(left, right), "a prompt writes no log"
    assert whole.state_BHWK[:, 3].isnan().all() and whole.window_BXC[:, 3].isnan().all()
    starts = [0, *itertools.accumulate(lengths)]
    for start, length, slot in zip(starts, lengths, slots, strict=False):
        stepped, cut = copy_of(before), copy_of(before)
        span = take(rows, slice(start, start + length))
        alone = step(form, parameters, span, stepped, (slot,), (length,))
        commit(form, stepped, (slot,), (length,), (length,))
        assert torch.equal(alone, out[start : start + length])
        assert_same_seat(whole, stepped, slot)
        for first in range(0, length, 7):
            part = take(span, slice(first, first + 7))
            num_rows = part.inputs_TC.shape[0]
            prompt(form, parameters, part, cut, (slot,), (num_rows,), (first,))
        assert_same_seat(cut, stepped, slot)


@pytest.mark.parametrize("shape", [(3, 64, 4), (8, 128, 4), (2, 48, 3), (3, 7, 2)], ids=str)
def test_a_prompt_matches_the_chunks_of_the_torch_form(form, shape, bound):
    lengths, slots = (37, 16, 1), (2, 0, 1)
    parameters, rows = make_parameters(shape, bound), make_rows(shape, sum(lengths))
    native = make_seats(shape, 1, 3, 1, live=slots)
    plain = turned(native)
    got, expected = (prompt(f, parameters, rows, s, slots, lengths) for f, s in ((form, native), (PLAIN_KDA, plain)))
    for actual, wanted in ((got, expected), (native.state_BHWK, turned(plain).state_BHWK)):
        error = (actual.double() - wanted.double()).abs() / wanted.double().abs().max()
        assert error.max() < 2**-6 and error.median() < (1e-5 if actual.dtype == torch.float32 else 2**-8)
    assert torch.equal(native.window_BXC, plain.window_BXC)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_the_probe_holds(form, bound, threads):
    sizes = KdaSizes(num_heads=3, width=20, num_taps=4, bound=bound, eps=1e-5)
    device = torch.device("cpu")
    checks = [kda_step_check((form,), sizes, BF16, device), kda_prompt_check((form,), sizes, 16, BF16, device)]
    outcome = run_checks(checks)
    assert not outcome.lost
    assert dict(outcome.geometries) == {f"KDA {kind} of 3 heads of 20": form.name for kind in ("step", "prompt")}
