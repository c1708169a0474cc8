"""What model families share."""

import torch
from torch import nn

from outrider.models.layers import allocate, pin_attributes, shapes_only


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2), requires_grad=False)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.inner = Inner()
        self.missing = None


def test_pinned_attributes_are_what_the_module_would_have_found() -> None:
    model = Outer()
    bias, inner, weight, state = model.bias, model.inner, model.inner.weight, list(model.state_dict())
    pin_attributes(model)
    assert vars(model)["bias"] is bias and vars(model)["inner"] is inner and vars(inner)["weight"] is weight
    assert list(model.state_dict()) == state and len(list(model.parameters())) == 2


def test_a_new_parameter_or_module_replaces_a_pinned_one() -> None:
    model = Outer()
    pin_attributes(model)
    model.bias, model.inner = nn.Parameter(torch.full((2,), 3.0), requires_grad=False), Inner()
    model.inner.weight.fill_(5)
    assert model.bias.tolist() == [3, 3] and model.inner.weight.tolist() == [5, 5]


def test_modules_without_values_are_not_drawn_and_take_memory_when_told() -> None:
    state = torch.get_rng_state()
    with shapes_only():
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 4), nn.RMSNorm(4))
        model.register_buffer("map", torch.zeros(2, dtype=torch.int64))
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    model[1].weight.requires_grad_(False)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    allocate(model, torch.device("cpu"))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()} == shapes
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
    assert not model[1].weight.requires_grad and model[1].bias.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
