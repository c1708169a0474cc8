"""Mixture of experts: router, expert products in forms with the same bits, weighted combine.

Dims: T rows, D model width, E experts, X experts per token, L width the experts work in, I inner width,
J = 2 I, R (row, expert) pairs.
"""

from collections.abc import Callable

import torch

from outrider.ops.activation import Activation, glu_fused
from outrider.ops.experts import (
    Experts,
    ExpertsFunction,
    PackedExperts,
    PrepareRouted,
    RoutedFunction,
    Router,
    Routing,
    StackedExperts,
)
from outrider.ops.invariant import island_dtype, sigmoid, tile_bmm
from outrider.ops.linear import LinearFunction, linear, linear_padded, linear_plain
from outrider.ops.select import topk_lowest

__all__ = [
    "Experts",
    "ExpertsFunction",
    "PackedExperts",
    "PrepareRouted",
    "RoutedFunction",
    "Router",
    "Routing",
    "StackedExperts",
    "combine",
    "expert_product",
    "route",
    "routed_experts",
    "routed_experts_batched",
    "routed_experts_loop",
    "routed_experts_plain",
    "routed_experts_reference",
    "routed_path",
    "stack_experts",
]

# Up to this many rows the batched form pads every expert to one row tile at most.
BATCHED_MAX_ROWS = 16
# Where all first matrices together hold no more elements, reading them costs less than a call per chosen expert.
SMALL_STACK_ELEMENTS = 1 << 18


def stack_experts(w1_EIL: torch.Tensor, w3_EIL: torch.Tensor, w2_ELI: torch.Tensor) -> StackedExperts:
    """Stack gate (w1), up (w3) and down (w2) weights."""
    return StackedExperts(gate_up_EJL=torch.cat([w1_EIL, w3_EIL], dim=1), down_ELI=w2_ELI)


def route(
    x_TD: torch.Tensor,
    gate_weight_ED: torch.Tensor,
    correction_bias_E: torch.Tensor,
    *,
    top_k: int,
    renormalize: bool,
    scaling: float,
    product: LinearFunction = linear_padded,
) -> Routing:
    """Choose experts by biased sigmoid scores, weight them by the unbiased ones.

    Source: k3-architecture section 7.1. Equal biased scores go to the lowest expert id.

    Args:
        x_TD: router input, compute dtype.
        gate_weight_ED: island dtype: rounding the logits to bfloat16 would change the selection.
        correction_bias_E: island dtype, used for the selection only.
        top_k: experts per token.
        renormalize: divide the weights by their sum (plus 1e-20).
        scaling: factor on the weights.
        product: of the rows with the gate weight.
    """
    scores_TE = sigmoid(product(x_TD.to(gate_weight_ED.dtype), gate_weight_ED))
    _, chosen_TX = topk_lowest(scores_TE + correction_bias_E, top_k)
    # Ascending ids fix the order of the sum over experts; a sort of distinct ids has no ties.
    expert_ids_TX = chosen_TX.sort(dim=-1).values
    weights_TX = scores_TE.gather(-1, expert_ids_TX)
    if renormalize:
        total_T1 = weights_TX[:, :1]
        for x in range(1, top_k):
            total_T1 = total_T1 + weights_TX[:, x : x + 1]
        weights_TX = weights_TX / (total_T1 + 1e-20)
    return Routing(expert_ids_TX=expert_ids_TX, weights_TX=weights_TX * scaling)


def routed_path(
    x_TD: torch.Tensor,
    x_TL: torch.Tensor,
    router: Router,
    experts: Experts,
    activation: Activation,
    *,
    product: LinearFunction = linear_padded,
    run_experts: ExpertsFunction | None = None,
) -> torch.Tensor:
    """Router, experts and combine, ``[T, L]`` in the dtype of x.

    Args:
        x_TD: router input.
        x_TL: what the experts see.
        router: weights and settings of ``route``.
        experts: weights of the experts.
        activation: between their two products.
        product: of the rows with the router's weight.
        run_experts: form of the experts; None takes ``routed_experts``.
    """
    routing = route(
        x_TD,
        router.gate_weight_ED,
        router.correction_bias_E,
        top_k=router.top_k,
        renormalize=router.renormalize,
        scaling=router.scaling,
        product=product,
    )
    return (run_experts or routed_experts)(x_TL, routing, experts, activation)


def combine(outputs_TXL: torch.Tensor, weights_TX: torch.Tensor) -> torch.Tensor:
    """Weighted sum over experts in ascending order, island dtype, one rounding. Source: section 7.2."""
    weighted_TXL = outputs_TXL.to(weights_TX.dtype) * weights_TX[..., None]
    total_TL = weighted_TXL[:, 0]
    for x in range(1, weights_TX.shape[1]):
        total_TL = total_TL + weighted_TXL[:, x]
    return total_TL.to(outputs_TXL.dtype)


def expert_product(x_RI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Product of one expert's rows with the bits of the batched form.

    In bfloat16 a plain linear has them (and a lone batched product would copy the transposed weight).
    """
    if x_RI.dtype == torch.bfloat16:
        return linear(x_RI, weight_OI)
    return tile_bmm(x_RI[None], weight_OI.T[None])[0]


def routed_experts(x_TL: torch.Tensor, routing: Routing, experts: Experts, activation: Activation) -> torch.Tensor:
    """Expert outputs combined per row, ``[T, L]`` in the dtype of x.

    Takes the batched form when the rows reach about every expert anyway or the experts are small, else the
    loop. Both give the same bits, so the choice may depend on the batch; where the start-up probe finds that
    they do not, the model calls the loop alone, with a product that keeps its bits.
    """
    stack = _worth_batching(experts, routing)
    if stack is None:
        return routed_experts_loop(x_TL, routing, experts, activation)
    return routed_experts_batched(x_TL, routing, stack, activation)


def routed_experts_plain(
    x_TL: torch.Tensor, routing: Routing, experts: Experts, activation: Activation
) -> torch.Tensor:
    """As ``routed_experts`` without tiles: kernels, and so bits, depend on how many rows an expert has."""
    stack = _worth_batching(experts, routing)
    if stack is None:
        return routed_experts_loop(x_TL, routing, experts, activation, product=linear_plain)
    return _all_experts(x_TL, routing, stack, activation, torch.bmm)


def _worth_batching(experts: Experts, routing: Routing) -> StackedExperts | None:
    """The experts, where computing every row with all of them costs less than a call per chosen expert."""
    num_rows, num_chosen = routing.expert_ids_TX.shape
    if not isinstance(experts, StackedExperts) or num_rows > BATCHED_MAX_ROWS:
        return None
    reaches_all = num_rows * num_chosen >= experts.num_experts
    return experts if reaches_all or experts.gate_up_EJL.numel() <= SMALL_STACK_ELEMENTS else None


def routed_experts_batched(
    x_TL: torch.Tensor, routing: Routing, experts: StackedExperts, activation: Activation
) -> torch.Tensor:
    """Every expert computes every row in two batched products; no host sync, no loop over experts."""
    return _all_experts(x_TL, routing, experts, activation, tile_bmm)


def _all_experts(
    x_TL: torch.Tensor,
    routing: Routing,
    experts: StackedExperts,
    activation: Activation,
    batched_product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    num_rows = x_TL.shape[0]
    x_ETL = x_TL.expand(experts.num_experts, -1, -1)
    hidden_ETI = glu_fused(activation, batched_product(x_ETL, experts.gate_up_EJL.transpose(1, 2)))
    out_ETL = batched_product(hidden_ETI, experts.down_ELI.transpose(1, 2))
    row_T1 = torch.arange(num_rows, device=x_TL.device)[:, None]
    return combine(out_ETL[routing.expert_ids_TX, row_T1], routing.weights_TX)


def routed_experts_loop(
    x_TL: torch.Tensor,
    routing: Routing,
    experts: Experts,
    activation: Activation,
    *,
    product: LinearFunction = expert_product,
) -> torch.Tensor:
    """One product per expert that has rows. Copies the counts per expert to the host (one sync)."""
    if x_TL.shape[0] == 0:
        return torch.empty_like(x_TL)
    num_chosen = routing.expert_ids_TX.shape[1]
    order_R = routing.expert_ids_TX.flatten().argsort(stable=True)
    counts = torch.bincount(routing.expert_ids_TX.flatten(), minlength=experts.num_experts).tolist()
    sorted_RL = x_TL[order_R // num_chosen]
    used = [index for index, count in enumerate(counts) if count]
    pieces_RL = torch.split(sorted_RL, [counts[index] for index in used])
    weights = [experts.expert(index) for index in used]
    # One activation over all pairs between the products: it costs as much as a small product.
    gate_up = [product(x, gate_up_JL) for x, (gate_up_JL, _) in zip(pieces_RL, weights, strict=True)]
    hidden_RI = glu_fused(activation, torch.cat(gate_up))
    pieces_RI = torch.split(hidden_RI, [counts[index] for index in used])
    out_sorted_RL = torch.cat([product(x, down_LI) for x, (_, down_LI) in zip(pieces_RI, weights, strict=True)])
    out_RL = torch.empty_like(out_sorted_RL)
    out_RL[order_R] = out_sorted_RL
    return combine(out_RL.view(-1, num_chosen, x_TL.shape[1]), routing.weights_TX)


def routed_experts_reference(
    x_TL: torch.Tensor, routing: Routing, experts: Experts, activation: Activation
) -> torch.Tensor:
    """One row and one expert at a time, roundings as in the other forms."""
    island = island_dtype(x_TL.dtype)
    rows = []
    for row in range(x_TL.shape[0]):
        total_L = torch.zeros(x_TL.shape[1], dtype=island)
        for x, index in enumerate(routing.expert_ids_TX[row].tolist()):
            gate_up_JL, down_LI = experts.expert(index)
            hidden_I = glu_fused(activation, gate_up_JL @ x_TL[row])
            total_L = total_L + routing.weights_TX[row, x] * (down_LI @ hidden_I).to(island)
        rows.append(total_L)
    return torch.stack(rows).to(x_TL.dtype)
