"""A drafter that starts out copying ahead, from the lags its target keeps in its taps.

A block row predicts the token after its own position. It looks, ``lag - 1`` places before itself, at a
token it can see (context, or the anchor), finds where that token stood ``lag`` places before another one,
and proposes that other token: the rows up to the longest lag copy in one step what the target will copy one
token at a time. All lags are matched at once; what a row cannot see (MASK) counts as nothing.

The context projection is fitted to a sample of taps, so the start fits whatever the target has become.
It needs taps that say which token and which lags they stand for: measured on k3-small, the mixtures after
layers 1 and 2 say both (cosine 0.99 and 0.88-0.96), those after layers 1, 3 and 5 only the lags.
Training would wear the search away before it has learnt when to trust it, hence ``PinnedCopying``.
"""

from collections.abc import Iterator

import torch

from outrider.training.dspark import DrafterAttention, DrafterConfig, DrafterLayer, DSparkForTraining
from outrider.training.kimi_k3 import KimiK3ForTraining
from outrider.training.seeding import LAGS, ResidualLayout, lag_directions

__all__ = ["PinnedCopying", "fit_linear", "seed_drafter"]

MATCH_WIDTHS = {1: 12, 2: 10, 3: 10, 5: 19, 6: 20}  # of each lag in a match
FAST_PAIRS = 4  # rotary pairs that tell neighbouring positions apart
TURNING = 2e-3  # radians per token below which a rotary pair hardly turns: such pairs hold the match
NORM_GAIN = 2.0  # of query and key norms: sharp enough to single out one position
FETCH_GAIN = 2.0
COPY_GAIN = 4.0
ROW_GAIN = 1.3  # of a row's own token against fetched ones, which the value path has doubled
HEAD_SHARE = 0.3  # of the embedding in the head: a copied token is written as it was embedded
RIDGE = 1e-2


def fit_linear(inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Ridge regression ``outputs`` [N, O] on ``inputs`` [N, I]: weight [O, I], ready for a linear.

    Inputs are brought to one size first: in a residual stream some are a hundred times larger than others.
    """
    spread = inputs.square().mean(0).sqrt().clamp_min(1e-6)
    scaled = inputs / spread
    gram = scaled.T @ scaled / len(scaled) + RIDGE * torch.eye(scaled.shape[1])
    return torch.linalg.solve(gram, scaled.T @ outputs / len(scaled)).T / spread


class _Layout:
    """Where things stand in the drafter's stream, and in a match.

    Context rows hold the token, its lags, a mark that block rows lack (or a row would match rows), and
    features of the taps. Block rows hold their token and what they fetched.
    """

    def __init__(self, config: DrafterConfig) -> None:
        self.size, self.half = config.head_dim, config.head_dim // 2
        self.token = slice(0, ResidualLayout(config.hidden_size).token.stop)  # the constant included
        start = self.token.stop
        self.lags = slice(start, start + sum(MATCH_WIDTHS.values()))
        self.mark = self.lags.stop
        self.rest = slice(self.mark + 1, config.hidden_size)
        self.fetched: dict[int, slice] = {}  # lag 1 is the row's own token
        for lag, width in MATCH_WIDTHS.items():
            if lag > 1:
                self.fetched[lag] = slice(start, start + width)
                start += width
        self.frequencies = config.rope_theta ** (-torch.arange(self.half).float() / self.half)
        still = self.half - int((self.frequencies < TURNING).sum())
        slow = torch.cat((torch.arange(still, self.half), torch.arange(self.half + still, self.size)))
        if len(slow) <= self.lags.stop - self.lags.start or self.rest.start >= config.hidden_size:
            raise ValueError(
                f"a match needs {self.lags.stop - self.lags.start + 1} slow rotary dims and as many places beside the "
                f"token, have {len(slow)} and {config.hidden_size - self.token.stop}: raise head_dim or rope_theta"
            )
        self.match, self.match_mark = slow[: self.lags.stop - self.lags.start], int(slow[-1])

    def matched(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Each lag and the dims of a match that hold it."""
        parts = self.match.split(list(MATCH_WIDTHS.values()))
        return zip(MATCH_WIDTHS, parts, strict=True)


def _directions(target: KimiK3ForTraining, layout: _Layout) -> torch.Tensor:
    """Orthonormal rows [n, D] that read a token; they begin with what the target's lags keep of it."""
    kept = lag_directions(target)[:, layout.token]
    count = min(layout.size, layout.token.stop - 1)
    drawn = torch.randn(count - len(kept), kept.shape[1])
    drawn -= drawn @ kept.T @ kept
    directions = torch.zeros(count, target.config.hidden_size)
    directions[:, layout.token] = torch.cat((kept, torch.linalg.qr(drawn.T)[0].T))
    return directions


def _fit_context(
    drafter: DSparkForTraining,
    layout: _Layout,
    tokens: torch.Tensor,
    read: torch.Tensor,
    ids: torch.Tensor,
    taps: torch.Tensor,
) -> None:
    """Context rows: the token, what ``read`` says of its lags, the mark, and random directions of the taps."""
    longest = max(LAGS)
    wanted = [tokens[ids[:, longest:]]]
    wanted += [tokens[ids[:, longest - lag : ids.shape[1] - lag]] @ read[:size].T for lag, size in MATCH_WIDTHS.items()]
    outputs = torch.cat([part.flatten(0, 1) for part in wanted], -1)
    outputs = torch.cat((outputs, torch.ones(len(outputs), 1) * tokens.square().mean().sqrt()), -1)
    inputs = taps[:, longest:].flatten(0, 1)
    scale = outputs.square().mean(0).sqrt().clamp_min(1e-3)
    weight = drafter.fc.weight
    weight[: outputs.shape[1]] = fit_linear(inputs, outputs / scale.mean())
    spread = inputs.square().mean(0).sqrt().clamp_min(1e-3)
    weight[layout.rest] = torch.randn(len(weight[layout.rest]), inputs.shape[1]) * inputs.shape[1] ** -0.5 / spread


def _seed_fetching(attention: DrafterAttention, layout: _Layout, embedding: torch.Tensor) -> None:
    """Heads that look a fixed number of places back, on a direction every token has."""
    size, half = layout.size, layout.half
    constant = torch.zeros(embedding.shape[1])
    normed = embedding * torch.rsqrt(embedding.square().mean(-1, keepdim=True))
    constant[layout.token] = fit_linear(normed[:, layout.token], torch.ones(len(embedding), 1))[0]
    attention.k_proj.weight[:size] = 0.0
    attention.k_proj.weight[:FAST_PAIRS] = constant
    attention.q_proj.weight[: len(layout.fetched) * size] = 0.0
    for head, (lag, where) in enumerate(layout.fetched.items()):
        rows, width = head * size, where.stop - where.start
        angles = -(lag - 1) * layout.frequencies[:FAST_PAIRS]
        attention.q_proj.weight[rows : rows + FAST_PAIRS] = angles.cos().unsqueeze(1) * constant
        attention.q_proj.weight[rows + half : rows + half + FAST_PAIRS] = angles.sin().unsqueeze(1) * constant
        attention.o_proj.weight[where, rows : rows + width] = FETCH_GAIN * torch.eye(width)


def _seed_matching(attention: DrafterAttention, layout: _Layout, directions: torch.Tensor) -> None:
    """Head 0 matches what was fetched against the lags and writes the token it finds."""
    query, key = (projection.weight[: layout.size] for projection in (attention.q_proj, attention.k_proj))
    query.zero_()
    key.zero_()
    for lag, dims in layout.matched():
        if lag == 1:
            query[dims] = ROW_GAIN * directions[: len(dims)]
        else:
            query[dims, torch.arange(layout.fetched[lag].start, layout.fetched[lag].stop)] = 1.0
    key[layout.match, torch.arange(layout.lags.start, layout.lags.stop)] = 1.0
    query[layout.match_mark, 0] = key[layout.match_mark, layout.mark] = 1.0
    attention.o_proj.weight[:, : len(directions)] = COPY_GAIN * directions.T


def _attentions(drafter: DSparkForTraining) -> tuple[DrafterAttention, DrafterAttention]:
    """Of the first two layers."""
    first, second = [layer.self_attn for layer in drafter.layers if isinstance(layer, DrafterLayer)][:2]
    return first, second


@torch.no_grad()
def seed_drafter(
    drafter: DSparkForTraining,
    target: KimiK3ForTraining,
    draft_ids: torch.Tensor,
    ids: torch.Tensor,
    taps: torch.Tensor,
) -> None:
    """Seed a drafter of two layers or more for the target it will serve; whatever else it has starts silent.

    ``draft_ids`` [V] are the target ids of the draft vocabulary, ``ids`` [B, T] is a sample of text,
    ``taps`` [B, T, m * D] are the target's on it. Raises ``ValueError`` if a head is too narrow for a match.
    """
    layout, embedding = _Layout(drafter.config), target.embed_tokens.weight
    if drafter.config.num_heads // drafter.config.num_kv_heads < len(layout.fetched):
        raise ValueError(f"fetching needs {len(layout.fetched)} query heads on the first key head")
    tokens = embedding[:, layout.token]
    directions = _directions(target, layout)
    _fit_context(drafter, layout, tokens, directions[:, layout.token], ids, taps)

    # MASK rows are not tokens: what reads tokens is blind to them, so that a match counts known tokens only.
    mask = torch.nn.functional.normalize(tokens[drafter.config.mask_token_id], dim=0)
    directions[:, layout.token] -= torch.outer(directions[:, layout.token] @ mask, mask)
    for layer in drafter.layers:
        assert isinstance(layer, DrafterLayer)
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for attention in _attentions(drafter):
        attention.q_norm.weight.fill_(NORM_GAIN)
        attention.k_norm.weight.fill_(NORM_GAIN)
        attention.v_proj.weight[: layout.size] = 0.0
        attention.v_proj.weight[: len(directions)] = directions
    first, second = _attentions(drafter)
    _seed_fetching(first, layout, embedding)
    _seed_matching(second, layout, directions)
    drafter.lm_head.weight[:, layout.token] += HEAD_SHARE * tokens[draft_ids]


class PinnedCopying:
    """Keeps the seeded search of a drafter as it is: fetching, matching, and what they read."""

    @torch.no_grad()
    def __init__(self, drafter: DSparkForTraining) -> None:
        layout = _Layout(drafter.config)
        size, fetching = layout.size, layout.size * len(layout.fetched)
        first, second = _attentions(drafter)
        views = [drafter.fc.weight[: layout.rest.start], drafter.hidden_norm.weight]
        views += [first.q_proj.weight[:fetching], first.o_proj.weight[:, :fetching], second.q_proj.weight[:size]]
        for attention in (first, second):
            views += [projection.weight[:size] for projection in (attention.k_proj, attention.v_proj)]
            views += [attention.q_norm.weight, attention.k_norm.weight]
        self.kept = [(view.detach(), view.detach().clone()) for view in views]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what an optimiser step did to them."""
        for view, value in self.kept:
            view.copy_(value)
