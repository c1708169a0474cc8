"""What all tests of the training forms share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def eager():
    """Compile nothing: seconds matter more than fusion here."""
    with torch.compiler.set_stance("force_eager"):
        yield
