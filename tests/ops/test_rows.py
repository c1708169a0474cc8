"""Native gathers, copies and sums of rows against the torch forms: equal bits, over strides, planes and widths."""

import pytest
import torch

from outrider.ops.native.library import library
from outrider.ops.native.rows import native_rows
from outrider.ops.rows import PLAIN_ROWS


@pytest.fixture(scope="module")
def rows():
    native = library()
    if native is None:
        pytest.skip("no native operations here")
    return native_rows(native)


def values(*shape, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 100).bfloat16()


def both(rows, call, shape, *, columns=slice(None)):
    outs = [values(*shape, seed=9) for _ in range(2)]
    for form, out in zip((rows, PLAIN_ROWS), outs, strict=True):
        call(form, out[..., columns])
    assert torch.equal(*outs)  # what lies beside the target too


@pytest.mark.parametrize("width", [1, 15, 16, 17, 96, 513])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_rows_equal_the_torch_forms(rows, width, num_rows):
    source, planes = values(11, width + 3, seed=1)[:, 2:-1], values(3, 11, width, seed=2)
    index = torch.randint(0, 11, (num_rows,), generator=torch.Generator().manual_seed(width))
    left, right = values(num_rows, width + 5, seed=3)[:, 5:], values(num_rows, width, seed=4)
    both(rows, lambda form, out: form.gather(source, index, out), (num_rows, width + 4), columns=slice(1, -3))
    both(rows, lambda form, out: form.gather(planes, index, out), (3, num_rows, width))
    both(rows, lambda form, out: form.copy(left, out), (num_rows, width + 1), columns=slice(1, None))
    both(rows, lambda form, out: form.add(left, right, out), (num_rows, width))
    both(rows, lambda form, out: form.add(out, right, out), (num_rows, width))


def test_an_index_out_of_range_gives_nan_and_touches_nothing_else(rows):
    out = values(4, 5)
    rows.gather(values(3, 5, seed=1), torch.tensor([0, 3, -1, 2]), out)
    assert out.isnan().any(1).tolist() == [False, True, True, False]
    assert torch.equal(out[[0, 3]], values(3, 5, seed=1)[[0, 2]])


def test_what_the_c_side_would_read_wrongly_is_refused(rows):
    with pytest.raises(AssertionError):
        rows.copy(values(4, 6).T, values(6, 4))
    with pytest.raises(AssertionError):
        rows.add(values(4, 6), values(4, 5), values(4, 6))
    with pytest.raises(AssertionError):
        rows.copy(values(4, 6).float(), values(4, 6).float())
    with pytest.raises(AssertionError):
        rows.gather(values(4, 6), torch.tensor([1], dtype=torch.int32), values(1, 6))
