"""A drafter that starts out copying ahead, from the lags its target keeps in its taps.

A block row predicts the token after its own position. It looks, ``lag - 1`` places before itself, at a
token it can see (context, or the anchor), finds where that token stood ``lag`` places before another one,
and proposes that other token: the rows up to the longest lag copy in one step what the target will copy one
token at a time. All lags are matched at once; of each row's tokens the anchor is the one that is known exactly.

The context projection is fitted to a sample of taps, so the start fits whatever the target has become.
Training would wear all of it away before it has learnt when to trust it, hence ``PinnedCopying``.
"""

from collections.abc import Iterator

import torch

from outrider.training.dspark import DrafterLayer, DSparkForTraining
from outrider.training.kimi_k3 import KimiK3ForTraining
from outrider.training.seeding import LAGS, ResidualLayout, lag_directions

__all__ = ["PinnedCopying", "fit_linear", "seed_drafter"]

MATCH_WIDTHS = {1: 10, 2: 7, 3: 7, 5: 12, 6: 12}  # of each lag; together they fill the slow pairs of a rotary head
SLOW = 24  # rotary pairs of a 64-wide head that hardly turn, at the drafter's theta
FAST_PAIRS = 4  # rotary pairs that tell neighbouring positions apart
NORM_GAIN = 2.0  # of query and key norms: sharp enough to single out one position
FETCH_GAIN = 2.0
COPY_GAIN = 4.0
ROW_GAIN = 1.3  # of a row's own token against fetched ones, which the value path has doubled
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
        self.lags = slice(start, start + sum(MATCH_WIDTHS.values()))  # of context rows
        self.rest = slice(self.lags.stop, width)
        # Block rows keep what they fetched elsewhere, or every row would match itself. Lag 1 needs no fetching.
        self.fetched: dict[int, slice] = {}
        start = self.rest.start
        for lag, size in MATCH_WIDTHS.items():
            if lag > 1:
                self.fetched[lag] = slice(start, start + size)
                start += size


def _places() -> Iterator[slice]:
    """Where the fetched lags stand in a query, behind lag 1."""
    start = MATCH_WIDTHS[1]
    for lag, size in MATCH_WIDTHS.items():
        if lag > 1:
            yield slice(start, start + size)
            start += size


def _complete(directions: torch.Tensor, size: int) -> torch.Tensor:
    """Orthonormal rows [size, D] that begin with the orthonormal ``directions`` [n, D]."""
    drawn = torch.randn(size - len(directions), directions.shape[1])
    drawn -= drawn @ directions.T @ directions
    return torch.cat((directions, torch.linalg.qr(drawn.T)[0].T))


def _fit_context(
    drafter: DSparkForTraining, tokens: torch.Tensor, read: torch.Tensor, ids: torch.Tensor, taps: torch.Tensor
) -> None:
    """Context rows: the token, what ``read`` says of its lags, and random directions of the taps."""
    parts, longest = _Parts(drafter.config.hidden_size), max(LAGS)
    wanted = [tokens[ids[:, longest:]]]
    wanted += [tokens[ids[:, longest - lag : ids.shape[1] - lag]] @ read[:size].T for lag, size in MATCH_WIDTHS.items()]
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
    _fit_context(drafter, tokens, directions[:, parts.token], ids, taps)

    # MASK rows are not tokens: what reads tokens is blind to them, so that a match counts known tokens only.
    mask = torch.nn.functional.normalize(tokens[config.mask_token_id], dim=0)
    directions[:, parts.token] -= torch.outer(directions[:, parts.token] @ mask, mask)

    first, second = [layer.self_attn for layer in drafter.layers if isinstance(layer, DrafterLayer)][:2]
    for layer in (first, second):
        layer.q_norm.weight.fill_(NORM_GAIN)
        layer.k_norm.weight.fill_(NORM_GAIN)
        layer.v_proj.weight[:size] = directions
    first.v_proj.weight[size : 2 * size] = directions
    first.o_proj.weight[:] = 0.0

    # Layer 0: heads that look a fixed number of places back, on a direction every token has.
    constant = torch.zeros(width)
    normed = embedding * torch.rsqrt(embedding.square().mean(-1, keepdim=True))
    constant[parts.token] = fit_linear(normed[:, parts.token], torch.ones(len(tokens), 1))[0]
    first.k_proj.weight[:] = 0.0
    for start in (0, size):
        first.k_proj.weight[start : start + FAST_PAIRS] = constant
    frequencies = config.rope_theta ** (-torch.arange(half)[:FAST_PAIRS].float() / half)
    first.q_proj.weight[:] = 0.0
    for head_index, (lag, where) in enumerate(parts.fetched.items()):
        rows, count = head_index * size, where.stop - where.start
        angles = -(lag - 1) * frequencies
        first.q_proj.weight[rows : rows + FAST_PAIRS] = angles.cos().unsqueeze(1) * constant
        first.q_proj.weight[rows + half : rows + half + FAST_PAIRS] = angles.sin().unsqueeze(1) * constant
        first.o_proj.weight[where, rows : rows + count] = FETCH_GAIN * torch.eye(count)

    # Layer 1: match what was fetched against the lags, on the rotary pairs that hardly turn.
    slow = torch.cat((torch.arange(half - SLOW, half), torch.arange(size - SLOW, size)))
    query = torch.zeros(len(slow), width)
    query[: MATCH_WIDTHS[1]] = ROW_GAIN * directions[: MATCH_WIDTHS[1]]
    for place, where in zip(_places(), parts.fetched.values(), strict=True):
        query[place, where] = torch.eye(where.stop - where.start)
    second.q_proj.weight[:size] = 0.0
    second.q_proj.weight[slow] = query
    second.k_proj.weight[:size] = 0.0
    second.k_proj.weight[slow, torch.arange(parts.lags.start, parts.lags.stop)] = 1.0
    second.o_proj.weight[:, :size] = COPY_GAIN * directions.T
    drafter.lm_head.weight[:, parts.token] += HEAD_SHARE * tokens[draft_ids]


class PinnedCopying:
    """Keeps the seeded heads of a drafter as they are: fetching, matching, and what they read."""

    @torch.no_grad()
    def __init__(self, drafter: DSparkForTraining) -> None:
        parts, size = _Parts(drafter.config.hidden_size), drafter.config.head_dim
        first, second = [layer.self_attn for layer in drafter.layers if isinstance(layer, DrafterLayer)][:2]
        views = [first.q_proj.weight, first.k_proj.weight, first.v_proj.weight, first.o_proj.weight]
        views += [drafter.fc.weight[: parts.lags.stop], first.q_norm.weight, first.k_norm.weight]
        views += [projection.weight[:size] for projection in (second.q_proj, second.k_proj, second.v_proj)]
        views += [second.q_norm.weight, second.k_norm.weight, drafter.hidden_norm.weight]
        self.kept = [(view.detach(), view.detach().clone()) for view in views]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what an optimiser step did to them."""
        for view, value in self.kept:
            view.copy_(value)
