"""Settings of every test: one thread (tests check exact bits, and neighbours share the cores), no deadlines."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from outrider.ops.native.library import library

torch.set_num_threads(1)
settings.register_profile(
    "outrider", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("outrider")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedules",
        type=int,
        default=1000,
        help="random histories of the engine to run on the 3-layer toy; a twentieth of them on the 14-layer one",
    )


@pytest.fixture(scope="session")
def num_schedules(request: pytest.FixtureRequest) -> int:
    """Histories to run."""
    return int(request.config.getoption("schedules"))


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Outcomes of start-up probes go to a directory of this run, not to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def torch_forms(monkeypatch):
    """The torch forms of all operations, as where there is no compiler."""
    monkeypatch.setenv("OUTRIDER_NATIVE", "0")
    library.cache_clear()
    yield
    library.cache_clear()
