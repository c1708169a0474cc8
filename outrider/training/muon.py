"""Muon for matrices (momentum, then the nearest semi-orthogonal matrix), AdamW for the rest.

Source: Jordan et al. 2024 (Newton-Schulz coefficients) and Moonshot's scaling of the update
to AdamW's root mean square, ``0.2 * sqrt(max(rows, columns))`` (arXiv 2502.16982).
"""

from collections.abc import Iterable

import torch

__all__ = ["Muon", "orthogonalise"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(update: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Approximate polar factor of each matrix of ``update`` [..., R, C] by Newton-Schulz."""
    a, b, c = COEFFICIENTS
    tall = update.shape[-2] > update.shape[-1]
    x = update.transpose(-1, -2) if tall else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                buffer = state["momentum"]
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(buffer, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                scale = 0.2 * max(parameter.shape[-2:]) ** 0.5
                parameter.add_(update, alpha=-group["lr"] * scale)
