"""Damaged tensors of the shipped drafter are named from the weights alone, and sound or untrained ones are not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.bench.pair_doctor import damaged_tensors
from outrider.bench.pair_links import misordered_tensors
from outrider.models.dspark.config_json import read_config

DRAFTER = Path(__file__).resolve().parents[2] / "models" / "k3-small-dspark"
CONFIG = read_config(DRAFTER)
State = dict[str, torch.Tensor]


def stored() -> State:
    return load_file(DRAFTER / "model.safetensors")


def permuted(name: str, dim: int) -> Callable[[State], None]:
    def change(state: State) -> None:
        order = torch.randperm(state[name].shape[dim], generator=torch.Generator().manual_seed(3))
        state[name] = state[name].index_select(dim, order)

    return change


def test_the_shipped_drafter_has_no_damaged_tensor() -> None:
    assert not damaged_tensors(stored())
    assert not misordered_tensors(stored(), CONFIG)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("mlp.gate_proj", 0), ("mlp.up_proj", 0), ("mlp.down_proj", 1), ("self_attn.q_proj", 0),
        ("self_attn.k_proj", 0),
    ],
)  # fmt: skip
def test_a_permuted_tensor_is_named(layer: int, name: str, dim: int) -> None:
    state, full = stored(), f"layers.{layer}.{name}.weight"
    permuted(full, dim)(state)
    (problem,) = misordered_tensors(state, CONFIG)
    assert problem.code == "tensor" and problem.found.startswith(f"{full} in an order")


@pytest.mark.parametrize("name", ["markov_w1", "markov_w2"])
def test_permuted_markov_rows_are_named(name: str) -> None:
    state = stored()
    permuted(f"markov_head.{name}.weight", 0)(state)
    (problem,) = misordered_tensors(state, CONFIG)
    assert "markov_head.markov_w1.weight or markov_w2.weight" in problem.found


def test_an_untrained_drafter_is_not_accused() -> None:
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(tensor.shape, generator=generator) * 0.02 if tensor.dim() == 2 else tensor
        for name, tensor in stored().items()
    }
    assert not damaged_tensors(state)
    assert not misordered_tensors(state, CONFIG)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("layers.0.self_attn.o_proj.weight", 0.0, "is all zeros"),
        ("layers.1.self_attn.k_norm.weight", 0.0, "is all zeros"),
        ("fc.weight", float("nan"), "values that are not finite"),
    ],
)
def test_zeroed_and_broken_tensors_are_named(name: str, value: float, words: str) -> None:
    state = stored()
    state[name] = torch.full_like(state[name], value)
    (problem,) = damaged_tensors(state)
    assert problem.code == "tensor" and problem.found.startswith(name) and words in problem.found
