import torch
import torch.nn.functional as F

from outrider.ops import invariant

FUNCTIONS = {
    invariant.sigmoid: torch.sigmoid,
    invariant.tanh: torch.tanh,
    invariant.exp: torch.exp,
    invariant.silu: F.silu,
    invariant.softplus: lambda x: -F.logsigmoid(-x),  # F.softplus switches to the identity above 20
}


def test_pad_last_and_rows_keep_values_and_add_zeros():
    x = torch.randn(3, 5)
    assert torch.equal(invariant.pad_last(x)[:, :5], x)
    assert invariant.pad_last(x).shape == (3, 64)
    assert invariant.pad_last(x)[:, 5:].abs().sum() == 0
    assert invariant.pad_rows(x).shape == (16, 5)
    assert invariant.pad_rows(x)[3:].abs().sum() == 0
    full = torch.randn(16, 64)
    assert invariant.pad_last(full) is full
    assert invariant.pad_rows(full) is full


def test_functions_match_torch(island, assert_close):
    x = torch.randn(700, 7, dtype=island) * 8
    for ours, theirs in FUNCTIONS.items():
        assert_close(ours(x), theirs(x.double()).to(island))


def test_functions_keep_shape_and_do_not_overflow(island):
    for shape in ((), (0, 5), (1,), (3, 0), (2, 3, 65)):
        assert invariant.sigmoid(torch.zeros(shape, dtype=island)).shape == shape
    far = torch.tensor([-1e4, 0.0, 1e4], dtype=island)
    assert torch.equal(invariant.softplus(far)[[0, 2]], far.clamp_min(0)[[0, 2]])


def test_an_element_has_the_same_bits_alone_in_any_row_and_in_any_stride(island, threads):
    for width in (1, 8, 15, 33, 48, 64, 320):
        x = torch.randn(300, width, dtype=island) * 3
        for function in FUNCTIONS:
            whole = function(x)
            assert torch.equal(function(x.T.contiguous().T), whole)
            assert torch.equal(torch.cat([x, x], 1)[:, :width], x)
            assert torch.equal(function(torch.cat([x, x], 1)[:, :width]), whole)
            for rows in (slice(0, 1), slice(3, 4), slice(7, 23), slice(299, 300)):
                assert torch.equal(function(x[rows]), whole[rows])


def test_large_inputs_are_cut_below_the_size_torch_splits_over_threads(island, threads):
    x = torch.randn(513, 192, dtype=island)
    whole = invariant.sigmoid(x)
    for row in (0, 170, 171, 256, 257, 512):  # around the cuts and the middle
        assert torch.equal(invariant.sigmoid(x[row]), whole[row])


def test_cuts_keep_rows_whole_where_three_threads_would_not():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        x = torch.randn(1501, 40)
        whole = invariant.sigmoid(x)
        alone = torch.cat([invariant.sigmoid(row[None]) for row in x])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(whole, alone)


def test_products_match_plain_ones(dtype, assert_close):
    a, b = torch.randn(3, 5, 48).to(dtype), torch.randn(3, 48, 32).to(dtype)
    assert_close(invariant.tile_bmm(a, b), invariant.tile_bmm_reference(a, b))


def test_products_do_not_depend_on_rows_or_batch(dtype, threads):
    for inner, columns in ((16, 64), (160, 64), (600, 64), (1024, 48)):
        a = torch.randn(9, 48, inner).to(dtype)
        for b in (torch.randn(9, inner, columns).to(dtype), torch.randn(9, columns, inner).to(dtype).transpose(1, 2)):
            whole = invariant.tile_bmm(a, b)
            for batch in (1, 2, 5):
                for rows in (1, 3, 8, 16, 17, 32):
                    got = invariant.tile_bmm(a[:batch, :rows], b[:batch])
                    assert torch.equal(got, whole[:batch, :rows]), (inner, columns, batch, rows)


def test_fewer_matrices_than_threads_are_not_split_along_the_inner_dim(island):
    a, b = torch.randn(5, 16, 1024, dtype=island), torch.randn(5, 48, 1024, dtype=island).transpose(1, 2)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        whole = invariant.tile_bmm(a, b)
        parts = [invariant.tile_bmm(a[:batch], b[:batch]) for batch in (1, 2, 3)]
    finally:
        torch.set_num_threads(before)
    for part in parts:
        assert torch.equal(part, whole[: part.shape[0]])


def test_an_unpadded_product_would_not_pass(threads):
    """The reason for the padding, kept as a check that the tests above can fail."""
    a, b = torch.randn(1, 16, 160), torch.randn(1, 64, 160).transpose(1, 2)
    assert any(not torch.equal(torch.bmm(a[:, :rows], b), torch.bmm(a, b)[:, :rows]) for rows in (1, 2, 4))
