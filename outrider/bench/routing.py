"""Which experts a step really used, counted from the inputs of its routers.

Dims: T rows, X experts per token, E experts, D model width.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.kimi_k3.moe import MoeFfn

__all__ = ["counted_experts"]


@contextmanager
def counted_experts(target: KimiK3Model) -> Iterator[list[int]]:
    """A list that gets, for every sparse layer that runs in the ``with`` body, its number of distinct experts.

    Experts are chosen again from the layer's input, by biased sigmoid scores (k3-architecture section 7.1), whatever
    form of the router the model runs; at an exact tie of scores the choice may be another one. That takes time:
    nothing that is timed may run in the body.
    """
    counts: list[int] = []

    def count(ffn: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(ffn, MoeFfn), "hooked below"
        (x_TD,) = inputs
        gate_ED = ffn.gate.weight
        scores_TE = torch.sigmoid(x_TD.to(gate_ED.dtype) @ gate_ED.T) + ffn.correction_bias.weight
        chosen_TX = scores_TE.topk(ffn.config.experts_per_token).indices
        counts.append(len(set(chosen_TX.flatten().tolist())))

    handles = [module.register_forward_pre_hook(count) for module in target.modules() if isinstance(module, MoeFfn)]
    try:
        with target.steps.paused():
            yield counts
    finally:
        for handle in handles:
            handle.remove()
