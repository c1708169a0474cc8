import torch

from outrider.ops import conv
from outrider.ops.spans import spans_from_lengths, to_padded_with


def make(lengths, width, dtype):
    island = torch.float64 if dtype == torch.float64 else torch.float32
    inputs, window = torch.randn(sum(lengths), width).to(dtype), torch.randn(len(lengths), 3, width).to(dtype)
    return inputs, window, torch.randn(width, 4, dtype=island)


def test_matches_the_token_loop(dtype, assert_close):
    lengths = (1, 6, 3, 2)
    args = (*make(lengths, 24, dtype), spans_from_lengths(lengths))
    assert_close(conv.short_conv(*args), conv.short_conv_reference(*args))


def test_last_tap_is_the_current_token():
    weight = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    inputs = torch.tensor([[2.0], [3.0]])
    got = conv.short_conv(inputs, torch.full((1, 3, 1), 50.0), weight, spans_from_lengths((2,)))
    assert torch.allclose(got, inputs * torch.sigmoid(inputs))


def test_windows_after_any_number_of_rows_continue_the_sequence(dtype):
    inputs, window, weight = make((7,), 24, dtype)
    whole = conv.short_conv(inputs, window, weight, spans_from_lengths((7,)))
    for cut in range(8):
        carried = conv.shift_window(window, inputs[None], torch.tensor([cut]))
        if cut:
            first = conv.short_conv(inputs[:cut], window, weight, spans_from_lengths((cut,)))
            assert torch.equal(first, whole[:cut])
            done = conv.window_after_spans(window, inputs[:cut], spans_from_lengths((cut,)))
            assert torch.equal(done, carried)
        if cut < 7:
            rest = conv.short_conv(inputs[cut:], carried, weight, spans_from_lengths((7 - cut,)))
            assert torch.equal(rest, whole[cut:])


def test_window_shift_over_layers_and_sequences_ignores_uncommitted_rows():
    window, inputs = torch.randn(2, 3, 3, 8), torch.randn(2, 3, 5, 8)
    counts = torch.tensor([0, 2, 5])
    expected = torch.stack(
        [torch.stack([torch.cat([window[i, s], inputs[i, s, : counts[s]]])[-3:] for s in range(3)]) for i in range(2)]
    )
    for s in range(3):
        inputs[:, s, counts[s] :] = float("nan")
    assert torch.equal(conv.shift_window(window, inputs, counts), expected)


def test_a_sequence_has_the_same_bits_alone_and_among_others(dtype, threads):
    lengths = (1, 8, 3, 16, 2)
    for width in (24, 64, 192):
        inputs, window, weight = make(lengths, width, dtype)
        inputs[0] = float("nan")  # row 0 fills the padding of the others
        layout = spans_from_lengths(lengths)
        whole = conv.short_conv(inputs, window, weight, layout)
        first = 0
        for s, length in enumerate(lengths):
            rows = slice(first, first + length)
            alone = conv.short_conv(inputs[rows], window[s : s + 1], weight, spans_from_lengths((length,)))
            assert torch.equal(alone, whole[rows]) or s == 0
            first += length
        assert bool(whole[1:].isfinite().all())
        assert to_padded_with(inputs, layout, 0.0).shape == (5, 16, width)
