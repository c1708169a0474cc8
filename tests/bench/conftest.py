"""A toy pair on disk and its target, shared by the tests of `bench step`."""

import json
from pathlib import Path

import pytest
import torch

from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.numerics import NumericsChoice
from outrider.models.registry import load_target
from outrider.testing.toy import ToyOptions, write_toy_checkpoint
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

OPTIONS = ToyOptions(num_layers=4, mla_layers=(2, 3), attn_res_block_size=3)


@pytest.fixture(scope="session")
def toy_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target with a context of 256 tokens, drafter of 4 drafts, both bfloat16."""
    folder = tmp_path_factory.mktemp("bench")
    target = write_toy_checkpoint(folder / "target", OPTIONS)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["max_position_embeddings"] = 256
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    drafter = ToyDrafterOptions(hidden_size=OPTIONS.hidden_size, num_target_layers=4, aux_layer_ids=(0, 1, 2))
    write_toy_drafter(folder / "drafter", drafter, dtype=torch.bfloat16)
    return target, folder / "drafter"


@pytest.fixture
def toy_target(toy_pair: tuple[Path, Path]) -> KimiK3Model:
    """A target of its own for every test."""
    target = load_target(toy_pair[0], dtype=torch.bfloat16, numerics=NumericsChoice(probe="skip"))
    assert isinstance(target, KimiK3Model)
    return target


@pytest.fixture
def wide_target(toy_pair: tuple[Path, Path]) -> KimiK3Model:
    """The same in float32, which always runs the torch forms."""
    target = load_target(toy_pair[0], dtype=torch.float32, numerics=NumericsChoice(probe="skip"))
    assert isinstance(target, KimiK3Model)
    return target
