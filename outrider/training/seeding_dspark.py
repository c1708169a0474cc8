"""A drafter that starts out copying ahead, from the lags its target keeps in its taps.

A block row predicts the token after its own position. It looks, ``lag - 1`` places before itself, at a
token it can see (context, or the anchor), finds where that token stood ``lag`` places before another one,
and proposes that other token: the rows up to ``lag - 1`` copy in one step what the target will copy one
token at a time. Two lags at once make the match a two-token one.

The context projection is fitted to a sample of taps, so the start fits whatever the target has become.
"""

import torch

from outrider.training.dspark import DrafterLayer, DSparkForTraining
from outrider.training.kimi_k3 import KimiK3ForTraining
from outrider.training.seeding import LAGS, ResidualLayout, lag_directions

__all__ = ["fit_linear", "seed_drafter"]

MATCH_LAGS = LAGS[-2:]
MATCH_WIDTH = 20  # of each lag; both fill the slow half of a 64-wide rotary head
FAST_PAIRS = 4  # rotary pairs that tell neighbouring positions apart
NORM_GAIN = 2.0  # of query and key norms: sharp enough to single out one position
FETCH_GAIN = 2.0
COPY_GAIN = 4.0
HEAD_SHARE = 0.1  # of the embedding in the head: a copied token is written as it was embedded
RIDGE = 1e-2


def fit_linear(inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Ridge regression ``outputs`` [N, O] on ``inputs`` [N, I]: weight [O, I], ready for a linear.

    Inputs are brought to one size first: in a residual stream some are a hundred times larger than others.
    """
    spread = inputs.square().mean(0).sqrt().clamp_min(1e-6)
    scaled = inputs / spread
    gram = scaled.T @ scaled / len(scaled) + RIDGE * torch.eye(scaled.shape[1])
    return torch.linalg.solve(gram, scaled.T @ outputs / len(scaled)).T / spread


class _Parts:
    """Where things stand in the drafter's stream; rows and context share the token's place."""

    def __init__(self, width: int) -> None:
        self.token = slice(0, ResidualLayout(width).token.stop)  # the constant included
        start = self.token.stop
        self.lags = [slice(start + i * MATCH_WIDTH, start + (i + 1) * MATCH_WIDTH) for i in range(len(MATCH_LAGS))]
        self.rest = slice(self.lags[-1].stop, width)
        # Rows keep what they fetched elsewhere, or every row would match itself.
        start = self.rest.start
        self.fetched = [slice(start + i * MATCH_WIDTH, start + (i + 1) * MATCH_WIDTH) for i in range(len(MATCH_LAGS))]


def _complete(directions: torch.Tensor, size: int) -> torch.Tensor:
    """Orthonormal rows [size, D] that begin with the orthonormal ``directions`` [n, D]."""
    drawn = torch.randn(size - len(directions), directions.shape[1])
    drawn -= drawn @ directions.T @ directions
    return torch.cat((directions, torch.linalg.qr(drawn.T)[0].T))


def _fit_context(
    drafter: DSparkForTraining, tokens: torch.Tensor, read: torch.Tensor, ids: torch.Tensor, taps: torch.Tensor
) -> None:
    """Context rows: the token, what ``read`` says of its lags, and random directions of the taps."""
    parts, longest = _Parts(drafter.config.hidden_size), max(MATCH_LAGS)
    wanted = [tokens[ids[:, longest:]]]
    wanted += [tokens[ids[:, longest - lag : -lag]] @ read.T for lag in MATCH_LAGS]
    inputs = taps[:, longest:].flatten(0, 1)
    outputs = torch.cat([part.flatten(0, 1) for part in wanted], -1)
    scale = outputs.square().mean(0).sqrt().clamp_min(1e-3)
    weight = drafter.fc.weight
    weight[: outputs.shape[1]] = fit_linear(inputs, outputs / scale.mean())
    spread = inputs.square().mean(0).sqrt().clamp_min(1e-3)
    rest = torch.randn(parts.rest.stop - parts.rest.start, inputs.shape[1]) * inputs.shape[1] ** -0.5
    weight[parts.rest] = rest / spread


@torch.no_grad()
def seed_drafter(
    drafter: DSparkForTraining,
    target: KimiK3ForTraining,
    draft_ids: torch.Tensor,
    ids: torch.Tensor,
    taps: torch.Tensor,
) -> None:
    """Seed a drafter of two layers or more for the target it will serve.

    ``draft_ids`` [V] are the target ids of the draft vocabulary, ``ids`` [B, T] is a sample of text,
    ``taps`` [B, T, m * D] are the target's on it.
    """
    embedding = target.embed_tokens.weight
    config = drafter.config
    width, size, half = config.hidden_size, config.head_dim, config.head_dim // 2
    parts = _Parts(width)
    tokens = embedding[:, parts.token]
    directions = torch.zeros(size, width)
    directions[:, parts.token] = _complete(lag_directions(target)[:, parts.token], size)
    _fit_context(drafter, tokens, directions[:MATCH_WIDTH, parts.token], ids, taps)

    first, second = [layer.self_attn for layer in drafter.layers if isinstance(layer, DrafterLayer)][:2]
    for layer in (first, second):
        layer.q_norm.weight.fill_(NORM_GAIN)
        layer.k_norm.weight.fill_(NORM_GAIN)
        layer.v_proj.weight[:size] = directions
        layer.o_proj.weight[:, : 2 * size] = 0.0

    # Layer 0: heads that look a fixed number of places back, on a direction every token has.
    constant = torch.zeros(width)
    normed = embedding * torch.rsqrt(embedding.square().mean(-1, keepdim=True))
    constant[parts.token] = fit_linear(normed[:, parts.token], torch.ones(len(tokens), 1))[0]
    first.k_proj.weight[:size] = 0.0
    first.k_proj.weight[:FAST_PAIRS] = constant
    frequencies = config.rope_theta ** (-torch.arange(half)[:FAST_PAIRS].float() / half)
    for head_index, lag in enumerate(MATCH_LAGS):
        rows = head_index * size
        first.q_proj.weight[rows : rows + size] = 0.0
        angles = -(lag - 1) * frequencies
        first.q_proj.weight[rows : rows + FAST_PAIRS] = angles.cos().unsqueeze(1) * constant
        first.q_proj.weight[rows + half : rows + half + FAST_PAIRS] = angles.sin().unsqueeze(1) * constant
        first.o_proj.weight[parts.fetched[head_index], rows : rows + MATCH_WIDTH] = FETCH_GAIN * torch.eye(MATCH_WIDTH)

    # Layer 1: match what was fetched against the lags, on the rotary pairs that hardly turn.
    for projection, places in ((second.q_proj, parts.fetched), (second.k_proj, parts.lags)):
        projection.weight[:size] = 0.0
        for part, end in zip(places, (half, size), strict=True):
            projection.weight[end - MATCH_WIDTH : end, part] = torch.eye(MATCH_WIDTH)
    second.o_proj.weight[:, :size] = COPY_GAIN * directions.T
    drafter.lm_head.weight[:, parts.token] += HEAD_SHARE * tokens[draft_ids]
