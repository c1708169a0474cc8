"""The instruction sets that this machine can run; tests of native operations run for each."""

import pytest
import torch

from outrider.ops.native.build import NativeBuildError, find_compiler
from outrider.ops.native.library import load_variant, runnable_variants


@pytest.fixture(scope="session", params=runnable_variants() or ("none",))
def native(request):
    """A loaded library of one instruction set."""
    if request.param == "none":
        pytest.skip("no instruction set that native operations are built for")
    try:
        find_compiler()
    except NativeBuildError as error:
        pytest.skip(str(error))
    return load_variant(request.param)


@pytest.fixture(params=(1, 2), ids=("thread1", "thread2"))
def threads(request):
    """The test at one thread and at two; the number before comes back."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
