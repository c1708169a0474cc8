"""Shared by the tests of the pure functions: a seed, the dtypes, and one or two torch threads."""

import pytest
import torch

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=(torch.float64, torch.float32), ids=str)
def island(request):
    return request.param


@pytest.fixture(params=(1, 2), ids=("thread1", "thread2"))
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def assert_close():
    """Largest error relative to the largest expected value, against a bound per dtype.

    float64 and float32 leave room for other summation orders; bfloat16 for one rounding of the result
    (2^-9 each way) and, where intermediates round too, for a few of them.
    """

    bounds = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2.0**-7}

    def check(actual, expected, bound=None):
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        limit = bounds[actual.dtype] if bound is None else bound
        scale = expected.double().abs().max().clamp_min(1e-30)
        error = ((actual.double() - expected.double()).abs().max() / scale).item()
        assert error <= limit, f"relative error {error:.3e} exceeds {limit:.3e}"

    return check
