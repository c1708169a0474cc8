"""The instruction sets that this machine can run; tests of native operations run for each."""

import pytest

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
