"""What model families share: how parameters are made and which of them keep their precision."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from outrider.errors import allocating
from outrider.models.kernels import EXACT_KERNELS, Kernels
from outrider.ops.invariant import island_dtype
from outrider.ops.linear import LinearFunction

__all__ = ["Build", "IslandParameter", "allocate", "pin_attributes", "shapes_only"]


class _NothingDrawn(TorchFunctionMode):
    """Functions of ``torch.nn.init`` do nothing where modes see them, which is where they draw."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if isinstance(func, FunctionType) and func.__module__ == nn.init.__name__:
            return None
        return func(*args, **(kwargs or {}))


@contextmanager
def shapes_only() -> Iterator[None]:
    """Modules made inside have shapes and no values: they are on the meta device.

    Nothing is drawn for them either: that would be lost, and drawing a normal distribution on the meta device
    imports torch's compiler and sympy, which takes about a second.
    """
    with torch.device("meta"), _NothingDrawn():
        yield


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give parameters and buffers that were made under ``shapes_only`` memory without values.

    As ``to_empty``, which asks the meta device for strides and so imports sympy.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(values, requires_grad=parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """How to make parameters; handed down through all constructors of a model."""

    dtype: torch.dtype  # compute dtype
    device: torch.device
    kernels: Kernels = EXACT_KERNELS

    @property
    def linear(self) -> LinearFunction:
        """Product of rows with a weight."""
        return self.kernels.linear

    @property
    def island(self) -> torch.dtype:
        """Dtype of numerically delicate parts."""
        return island_dtype(self.dtype)

    def weight(self, *shape: int) -> nn.Parameter:
        """Uninitialised inference parameter in the compute dtype."""
        return nn.Parameter(self._empty(shape, self.dtype), requires_grad=False)

    def packed(self, *shape: int) -> nn.Parameter:
        """Uninitialised byte parameter (MXFP4 codes or scales)."""
        return nn.Parameter(self._empty(shape, torch.uint8), requires_grad=False)

    def island_weight(self, *shape: int) -> "IslandParameter":
        """Uninitialised parameter in the island dtype that survives casts of the whole model."""
        return IslandParameter(self._empty(shape, self.island))

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with allocating(f"a parameter of shape {shape} and dtype {dtype}"):
            return torch.empty(shape, dtype=dtype, device=self.device)


class IslandParameter(nn.Module):
    """One parameter that a blanket ``model.to(torch.bfloat16)`` must not round.

    Device moves and casts between float32 and float64 pass through; a cast to a narrower dtype keeps
    the values and only follows the device.
    """

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values, requires_grad=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        kept = self.weight.detach()
        super()._apply(fn, recurse)
        if self.weight.dtype.itemsize < torch.float32.itemsize:
            self.weight = nn.Parameter(kept.to(device=self.weight.device), requires_grad=False)
        return self


def pin_attributes(model: nn.Module) -> None:
    """Let every parameter and submodule be found as a plain attribute; call it when the weights are final.

    Otherwise each read of one goes through ``nn.Module.__getattr__``, a Python function, and a forward makes more
    than a hundred. Assigning a new parameter or module drops the pin of the old one; assigning None does not.
    """
    for module in model.modules():
        vars(module).update(module.named_parameters(recurse=False))
        vars(module).update(module.named_children())
