"""What model families share."""

import torch
from torch import nn

from outrider.models.layers import pin_attributes


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
