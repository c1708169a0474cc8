import itertools

import pytest
import torch

from outrider.ops import kda
from outrider.ops.kda_chunk import kda_chunk
from outrider.ops.spans import spans_from_lengths


def make(lengths, heads, key, value, dtype, *, bound=-5.0):
    island = torch.float64 if dtype == torch.float64 else torch.float32
    rows = sum(lengths)
    q, k = torch.randn(rows, heads, key).to(dtype), torch.randn(rows, heads, key).to(dtype)
    v = torch.randn(rows, heads, value).to(dtype)
    log_decay = kda.kda_gate(
        (torch.randn(rows, heads, key) * 2).to(dtype),
        torch.randn(heads, dtype=island) * 0.3,
        torch.randn(heads, key, dtype=island) - 2,
        bound,
    )
    beta = kda.kda_beta(torch.randn(rows, heads).to(dtype))
    state = torch.randn(len(lengths), heads, value, key, dtype=island)
    return q, k, v, log_decay, beta, state


def rows_of(args, rows, seqs):
    return *(x[rows] for x in args[:5]), args[5][seqs]


def test_bounded_gate_is_a_scaled_sigmoid_and_unbounded_is_softplus(island):
    raw, a_log, bias = (
        torch.randn(5, 3, 16, dtype=island),
        torch.randn(3, dtype=island),
        torch.randn(3, 16, dtype=island),
    )
    biased = (raw + bias).double()
    rate = a_log.double().exp()[:, None]
    bounded = kda.kda_gate(raw, a_log, bias, -5.0)
    assert torch.allclose(bounded.double(), -5 * torch.sigmoid(rate * biased), rtol=1e-5)
    assert bounded.min() > -5 and bounded.max() < 0
    open_gate = kda.kda_gate(raw, a_log, bias, None)
    assert torch.allclose(open_gate.double(), -rate * torch.log1p(biased.exp()), rtol=1e-5)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_matches_the_textbook_recurrence(dtype, bound, assert_close):
    lengths = (1, 5, 3)
    args = make(lengths, 3, 16, 32, dtype, bound=bound)
    layout = spans_from_lengths(lengths)
    got, expected = kda.kda_recurrent(*args, layout), kda.kda_recurrent_reference(*args, layout)
    assert_close(got.out_THW, expected.out_THW)
    assert_close(got.state_SHWK, expected.state_SHWK)
    assert_close(got.log.u_THW, expected.log.u_THW)
    assert_close(got.log.k_THK, expected.log.k_THK)
    assert_close(got.log.decay_THK, expected.log.decay_THK)


def test_a_transposed_state_gives_another_result():
    args = make((4,), 2, 16, 16, torch.float64)
    layout = spans_from_lengths((4,))
    turned = (*args[:5], args[5].transpose(-1, -2).contiguous())
    assert not torch.allclose(kda.kda_recurrent(*args, layout).out_THW, kda.kda_recurrent(*turned, layout).out_THW)


def test_update_is_the_second_half_of_a_step(island):
    args = make((1,), 2, 16, 32, island)
    result = kda.kda_recurrent(*args, spans_from_lengths((1,)))
    log = result.log
    updated = kda.kda_update(args[5], log.decay_THK, log.u_THW, log.k_THK)
    assert torch.equal(updated, result.state_SHWK)


@pytest.mark.parametrize(("heads", "key", "value"), [(2, 16, 16), (3, 32, 64), (4, 64, 64), (3, 64, 16), (2, 48, 32)])
def test_a_sequence_has_the_same_bits_alone_and_among_others(heads, key, value, dtype, threads):
    lengths = (1, 8, 3, 16, 2, 1, 7, 4)
    args = make(lengths, heads, key, value, dtype)
    whole = kda.kda_recurrent(*args, spans_from_lengths(lengths))
    starts = [0, *itertools.accumulate(lengths)]
    for first, last in [(s, s + 1) for s in range(8)] + [(0, 2), (0, 7), (3, 7)]:
        rows = slice(starts[first], starts[last])
        part = kda.kda_recurrent(*rows_of(args, rows, slice(first, last)), spans_from_lengths(lengths[first:last]))
        assert torch.equal(part.out_THW, whole.out_THW[rows])
        assert torch.equal(part.state_SHWK, whole.state_SHWK[first:last])
        assert torch.equal(part.log.u_THW, whole.log.u_THW[rows])
        assert torch.equal(part.log.k_THK, whole.log.k_THK[rows])
        assert torch.equal(part.log.decay_THK, whole.log.decay_THK[rows])


def test_steps_of_one_row_have_the_bits_of_one_long_span(dtype, threads):
    args = make((8,), 3, 32, 32, dtype)
    whole = kda.kda_recurrent(*args, spans_from_lengths((8,)))
    state = args[5]
    for row in range(8):
        step = kda.kda_recurrent(*(x[row : row + 1] for x in args[:5]), state, spans_from_lengths((1,)))
        assert torch.equal(step.out_THW, whole.out_THW[row : row + 1])
        state = step.state_SHWK
    assert torch.equal(state, whole.state_SHWK)


def test_poisoned_neighbours_and_padding_do_not_leak(dtype):
    lengths = (1, 6, 2)
    args = make(lengths, 2, 16, 16, dtype)
    clean = kda.kda_recurrent(*args, spans_from_lengths(lengths))
    poisoned = tuple(x.clone() for x in args)
    for x in (*poisoned[:3], *poisoned[5:]):
        x[0] = float("nan")  # sequence 0; its row also fills the padding of the others
    got = kda.kda_recurrent(*poisoned, spans_from_lengths(lengths))
    assert torch.equal(got.out_THW[1:], clean.out_THW[1:])
    assert torch.equal(got.state_SHWK[1:], clean.state_SHWK[1:])
    assert torch.equal(poisoned[5][1:], args[5][1:]), "the caller's state must stay as it is"


@pytest.mark.parametrize(("heads", "key", "value"), [(2, 16, 16), (3, 32, 64), (4, 64, 64), (2, 48, 17)])
def test_commit_equals_having_stepped_only_the_committed_rows(heads, key, value, island, threads):
    layers, counts, width = 3, (0, 1, 3, 5, 5), 5
    lengths = (1, 2, 4, 5, 5)
    states, logs, expected = [], [], []
    for _ in range(layers):
        args = make(lengths, heads, key, value, island)
        layout = spans_from_lengths(lengths)
        log = kda.kda_recurrent(*args, layout).log
        logs.append([x[layout.padded_rows_SM] for x in (log.u_THW, log.k_THK, log.decay_THK)])
        states.append(args[5])
        starts = [0, *itertools.accumulate(lengths)]
        for s, count in enumerate(counts):
            if count == 0:
                expected.append(args[5][s])
                continue
            rows = slice(starts[s], starts[s] + count)
            only = kda.kda_recurrent(*rows_of(args, rows, slice(s, s + 1)), spans_from_lengths((count,)))
            expected.append(only.state_SHWK[0])
    u, k, decay = (torch.stack(column) for column in zip(*logs, strict=True))
    for s, count in enumerate(counts):
        for x, poison in ((u, float("nan")), (k, float("inf")), (decay, float("-inf"))):
            x[:, s, count:] = poison
    state = torch.stack(states)
    assert u.shape[2] == width
    got = kda.kda_commit(state, u, k, decay, torch.tensor(counts))
    assert torch.equal(got, torch.stack(expected).view(state.shape))
    assert torch.equal(state, torch.stack(states)), "kda_commit must not touch its input"
    kda.kda_commit_(state, u, k, decay, torch.tensor(counts))
    assert torch.equal(state, got)


def test_commit_in_small_blocks_gives_the_same_bits(island, monkeypatch):
    args = make((4, 4, 4), 2, 16, 16, island)
    log = kda.kda_recurrent(*args, spans_from_lengths((4, 4, 4))).log
    packed = [x.view(3, 4, *x.shape[1:]) for x in (log.u_THW, log.k_THK, log.decay_THK)]
    whole = kda.kda_commit(args[5], *packed, torch.tensor([4, 2, 0]))
    monkeypatch.setattr(kda, "COMMIT_ELEMENTS", 1)
    assert torch.equal(kda.kda_commit(args[5], *packed, torch.tensor([4, 2, 0])), whole)


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_chunks_match_the_recurrence(chunk_size, bound, dtype, assert_close):
    lengths, starts = (1, 70, 16, 33), (5, 0, 64, 13)
    args = make(lengths, 2, 16, 32, dtype, bound=bound)
    layout = spans_from_lengths(lengths, starts=starts)
    got = kda_chunk(*args, layout, chunk_size=chunk_size)
    expected = kda.kda_recurrent(*args, layout)
    assert_close(got.out_THW, expected.out_THW)
    assert_close(got.state_SHWK, expected.state_SHWK)
    assert got.log is None


@pytest.mark.parametrize(("heads", "key", "value"), [(2, 16, 16), (3, 32, 64), (4, 64, 64)])
def test_a_prompt_in_chunks_has_the_same_bits_alone_and_among_others(heads, key, value, dtype, threads):
    lengths, starts = (40, 1, 16, 23), (0, 7, 32, 3)
    args = make(lengths, heads, key, value, dtype)
    whole = kda_chunk(*args, spans_from_lengths(lengths, starts=starts), chunk_size=16)
    offsets = [0, *itertools.accumulate(lengths)]
    for s in range(4):
        rows = slice(offsets[s], offsets[s + 1])
        layout = spans_from_lengths(lengths[s : s + 1], starts=starts[s : s + 1])
        alone = kda_chunk(*rows_of(args, rows, slice(s, s + 1)), layout, chunk_size=16)
        assert torch.equal(alone.out_THW, whole.out_THW[rows])
        assert torch.equal(alone.state_SHWK, whole.state_SHWK[s : s + 1])


@pytest.mark.parametrize("lengths", [(5, 18), (5, 5), (16, 7)])
def test_a_prompt_within_one_chunk_has_the_same_bits_alone_and_among_others(lengths, dtype):
    """Alone, every operand is a view with strides of its own; the triangular solver is sensitive to that."""
    for heads in (2, 4):
        args = make(lengths, heads, 16, 16, dtype)
        whole = kda_chunk(*args, spans_from_lengths(lengths), chunk_size=16)
        part = rows_of(args, slice(0, lengths[0]), slice(0, 1))
        alone = kda_chunk(*part, spans_from_lengths(lengths[:1]), chunk_size=16)
        assert torch.equal(alone.out_THW, whole.out_THW[: lengths[0]])
        assert torch.equal(alone.state_SHWK, whole.state_SHWK[:1])


def test_cuts_at_multiples_of_the_chunk_do_not_change_bits(dtype):
    args = make((75,), 2, 32, 32, dtype)
    whole = kda_chunk(*args, spans_from_lengths((75,)), chunk_size=16)
    for cuts in ((16, 75), (32, 64, 75), (48, 75)):
        state, first, outputs = args[5], 0, []
        for last in cuts:
            layout = spans_from_lengths((last - first,), starts=(first,))
            part = kda_chunk(*(x[first:last] for x in args[:5]), state, layout, chunk_size=16)
            outputs.append(part.out_THW)
            state, first = part.state_SHWK, last
        assert torch.equal(torch.cat(outputs), whole.out_THW)
        assert torch.equal(state, whole.state_SHWK)


def test_a_prompt_that_starts_inside_a_chunk_keeps_the_absolute_grid(dtype):
    args = make((60,), 2, 16, 16, dtype)
    whole = kda_chunk(*args, spans_from_lengths((60,), starts=(5,)), chunk_size=16)
    head = kda_chunk(*(x[:11] for x in args[:5]), args[5], spans_from_lengths((11,), starts=(5,)), chunk_size=16)
    layout = spans_from_lengths((49,), starts=(16,))
    tail = kda_chunk(*(x[11:] for x in args[:5]), head.state_SHWK, layout, chunk_size=16)
    assert torch.equal(torch.cat([head.out_THW, tail.out_THW]), whole.out_THW)
    assert torch.equal(tail.state_SHWK, whole.state_SHWK)


def test_chunks_survive_unbounded_gates_and_repeated_keys():
    """exp(-G) alone would overflow float32 here, and powers of L would lose every digit."""
    q, k, v, log_decay, beta, state = make((64,), 2, 16, 16, torch.float32, bound=None)
    layout = spans_from_lengths((64,))
    strong = log_decay - 30
    got, expected = (f(q, k, v, strong, beta, state, layout) for f in (chunk64, kda.kda_recurrent))
    assert torch.allclose(got.out_THW, expected.out_THW, atol=1e-5)
    same_key = k[:1].expand_as(k).contiguous()
    weak, full_step = torch.full_like(log_decay, -1e-4), torch.full_like(beta, 0.99)
    got, expected = (f(q, same_key, v, weak, full_step, state, layout) for f in (chunk64, kda.kda_recurrent))
    assert torch.allclose(got.out_THW, expected.out_THW, atol=1e-4)
    assert torch.allclose(got.state_SHWK, expected.state_SHWK, atol=1e-4)


def chunk64(*args):
    return kda_chunk(*args, chunk_size=64)


def test_chunk_padding_takes_nothing_from_poisoned_neighbours():
    lengths = (1, 20)
    args = make(lengths, 2, 16, 16, torch.float64)
    clean = kda_chunk(*args, spans_from_lengths(lengths), chunk_size=16)
    poisoned = tuple(x.clone() for x in args)
    for x in (*poisoned[:3], *poisoned[5:]):
        x[0] = float("nan")
    got = kda_chunk(*poisoned, spans_from_lengths(lengths), chunk_size=16)
    assert torch.equal(got.out_THW[1:], clean.out_THW[1:])
    assert torch.equal(got.state_SHWK[1:], clean.state_SHWK[1:])
