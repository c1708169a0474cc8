import torch

from outrider.ops.paged import KEY_TILE, paged_keys, paged_spans
from outrider.ops.spans import span_layout, spans_from_lengths, to_flat, to_padded, to_padded_with


def test_round_trip_and_padding():
    layout = spans_from_lengths((2, 5, 1), starts=(0, 3, 9))
    x = torch.arange(16.0).view(8, 2)
    assert (layout.num_sequences, layout.num_rows, layout.max_length) == (3, 8, 5)
    padded = to_padded_with(x, layout, -7.0)
    assert torch.equal(padded[0, :2], x[:2]) and torch.equal(padded[1], x[2:7]) and torch.equal(padded[2, :1], x[7:])
    assert bool((padded[0, 2:] == -7).all()) and bool((padded[2, 1:] == -7).all())
    assert torch.equal(to_flat(to_padded(x, layout), layout), x)


def test_padding_is_selected_not_multiplied():
    x = torch.full((3, 1), float("nan"))
    assert torch.equal(to_padded_with(x, spans_from_lengths((1, 2)), 0.0)[0, 1], torch.zeros(1))


def test_rectangular_layout_is_a_view_and_layout_accepts_a_span_group():
    layout = spans_from_lengths((3, 3))
    x = torch.randn(6, 2)
    assert to_padded(x, layout).data_ptr() == x.data_ptr()
    ragged = spans_from_lengths((1, 3))
    again = span_layout(ragged.padded_rows_SM, ragged.valid_SM, lengths=(1, 3), starts=(0, 0))
    assert torch.equal(again.flat_T, torch.tensor([0, 3, 4, 5]))


def test_key_rows_follow_the_page_table_and_never_point_past_the_end():
    table = torch.tensor([[7, 2, 99999], [4, 0, 0], [3, 1, 1]])
    keys = paged_keys(table, torch.tensor([20, 1, 0]), page_size=16, max_context=70)
    assert keys.key_rows_SK.shape == (3, 2 * KEY_TILE) and keys.num_tiles == 2
    assert keys.key_rows_SK[0, :20].tolist() == [*range(112, 128), *range(32, 36)]
    assert bool((keys.key_rows_SK[0, 20:] == 112).all())
    assert bool((keys.key_rows_SK[1] == 64).all())


def test_spans_pick_their_sequence_of_the_batch_table():
    layout = spans_from_lengths((2, 1))
    spans = paged_spans(
        layout,
        torch.tensor([4, 5, 9]),
        torch.tensor([2, 2, 0]),
        torch.tensor([[0], [1], [2]]),
        page_size=16,
        max_context=9,
    )
    assert spans.keys.key_rows_SK[:, 0].tolist() == [32, 0]
    assert spans.keys.num_keys_S.tolist() == [5, 9]
    assert spans.limits_SM.tolist() == [[4, 5], [9, 1]]
