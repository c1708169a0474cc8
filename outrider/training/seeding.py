"""A start that already copies: delay lines in the first layers, induction heads above them.

A few million tokens are too few for a random start to find induction (Olsson et al. 2022): measured
after 4.7 M tokens, no layer could say which token came before, and random text seen once was repeated
at 3 % accuracy. Seeded, the model copies from the first step and training only has to keep it.

The residual stream starts out in parts: one constant, the token, and earlier tokens written by
KDA heads that forget at once and whose value convolution looks back (layer 0: one, two and three
tokens; layer 1: three more on top of them). An MLA head then matches "what came before position j"
against "what came before me", over three tokens, and writes the token at j.

The two longest lags are for the drafter: rows of a block can look up where the token ``lag`` places
before theirs stood, and copy what followed. The target has no use of its own for
them, so delay lines are pinned: restored after every optimiser step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from outrider.training.kda import KdaAttention
from outrider.training.kimi_k3 import DenseMlp, KimiK3ForTraining, LatentMoe, MlaAttention

__all__ = ["LAGS", "PinnedLags", "ResidualLayout", "lag_directions", "reseed_lags", "seed_copying"]

LAGS = (1, 2, 3, 5, 6)  # tokens back, in the order of their places in the residual stream
LAG_WIDTHS = (32, 16, 20, 20, 20)
BASE_LAG = 3  # what layer 1 delays further
RESERVED_LAGS = (3, 5, 6)  # nothing else in the first two layers writes where these stand
MATCH_WIDTHS = (32, 16, 16)  # of lags 1, 2, 3 in an induction head's key
VALUE_LINEAR = 0.2  # small enough that SiLU is nearly linear
DELAY_GAIN = 2.0  # of what a delay line writes, against the output gate's half
MATCH_GAIN = 4.0
COPY_GAIN = 4.0
HEAD_SCALE = 0.06  # of the head's start, as a multiple of the embedding
FORGET = 5.0  # gate bias of a delay line: e^-4.97 is left of a state after one token


@dataclass(frozen=True, slots=True)
class ResidualLayout:
    """Where the parts stand in a residual stream of ``width``."""

    width: int

    @property
    def token(self) -> slice:
        """The token's own embedding, behind the constant in place 0."""
        return slice(1, self.width - sum(LAG_WIDTHS))

    def lag(self, lag: int) -> slice:
        """The projection of the token ``lag`` places back."""
        index = LAGS.index(lag)
        start = self.width - sum(LAG_WIDTHS[index:])
        return slice(start, start + LAG_WIDTHS[index])


def _rows(layer: KdaAttention, head: int) -> slice:
    return slice(head * layer.head_dim, (head + 1) * layer.head_dim)


def _delay_lines(model: KimiK3ForTraining) -> Iterator[tuple[KdaAttention, int, int, int]]:
    """(layer, head, lag written, tokens the head itself looks back)."""
    kda = [layer.self_attn for layer in model.walk() if isinstance(layer.self_attn, KdaAttention)]
    for lag in LAGS:
        if lag <= BASE_LAG:
            yield kda[0], lag - 1, lag, lag
        else:
            yield kda[1], lag - LAGS[BASE_LAG], lag, lag - BASE_LAG


def _seed_delay_line(
    layer: KdaAttention, head: int, look_back: int, read: torch.Tensor, write: slice, gain: float
) -> None:
    """Make ``head`` write ``gain`` times ``read`` (rows [n, D]) of the token ``look_back`` places before."""
    rows = _rows(layer, head)
    used = slice(rows.start, rows.start + read.shape[0])
    layer.k_proj.weight[rows] = layer.q_proj.weight[rows]
    taps_of = ((layer.q_conv1d_weight, -1), (layer.k_conv1d_weight, -1), (layer.v_conv1d_weight, -1 - look_back))
    for taps, position in taps_of:
        taps[rows] = 0.0
        taps[rows, :, position] = 1.0
    layer.v_proj.weight[rows] = 0.0  # the output norm would divide by whatever else the head reads
    layer.v_proj.weight[used] = VALUE_LINEAR * read
    layer.f_b_proj.weight[rows] = 0.0
    layer.dt_bias[rows] = FORGET
    layer.b_proj.weight[head] = 0.0
    layer.g_proj.weight[rows] = 0.0
    layer.o_proj.weight[:, rows] = 0.0
    layer.o_proj.weight[write, used] = gain * (read.shape[0] / layer.head_dim) ** 0.5 * torch.eye(read.shape[0])


def _seed_induction(layer: MlaAttention, layout: ResidualLayout, tokens: torch.Tensor) -> None:
    """Make head 0 attend to where the last three tokens stood before, and write what followed.

    ``tokens`` [n, D] reads the token in the coordinates of its lags.
    """
    width = layout.width

    def reads(*parts: tuple[slice, int]) -> torch.Tensor:
        eye = torch.eye(width)
        return torch.cat([eye[where][:size] for where, size in parts])

    first, second, third = MATCH_WIDTHS
    values = nn.init.orthogonal_(torch.empty(layer.value, layout.token.stop - layout.token.start))
    read_values = torch.zeros(layer.value, width)
    read_values[:, layout.token] = values
    latent = torch.cat((reads((layout.lag(1), first), (layout.lag(2), second)), read_values))
    layer.kv_a_proj_with_mqa.weight[: layer.latent] = latent[: layer.latent]
    layer.kv_a_proj_with_mqa.weight[layer.latent :] = reads((layout.lag(3), third))
    query = torch.cat((tokens[:first], reads((layout.lag(1), second), (layout.lag(2), third))))
    layer.q_a_proj.weight[: query.shape[0]] = query
    layer.q_b_proj.weight[: query.shape[0]] = MATCH_GAIN * torch.eye(query.shape[0], layer.q_b_proj.in_features)
    layer.kv_b_proj.weight[: layer.nope + layer.value] = torch.eye(layer.nope + layer.value, layer.latent)
    layer.g_proj.weight[: layer.value] = 0.0
    layer.o_proj.weight[:, : layer.value] = COPY_GAIN * read_values.T


def _seed_delay_lines(model: KimiK3ForTraining, lags: Sequence[int], tokens: torch.Tensor, gain: float) -> None:
    layout = ResidualLayout(model.config.hidden_size)
    for layer, head, lag, look_back in _delay_lines(model):
        if lag not in lags:
            continue
        where = layout.lag(lag)
        source = tokens if lag <= BASE_LAG else torch.eye(layout.width)[layout.lag(BASE_LAG)]
        _seed_delay_line(layer, head, look_back, source[: where.stop - where.start], where, gain)


@torch.no_grad()
def reseed_lags(model: KimiK3ForTraining, gain: float) -> None:
    """Renew the reserved lags of a model whose residual stream has outgrown them; ``gain`` should match it."""
    tokens = lag_directions(model)
    _seed_delay_lines(model, RESERVED_LAGS, tokens, gain)


@torch.no_grad()
def seed_copying(model: KimiK3ForTraining) -> None:
    """Lay out embedding, delay lines, two induction layers, and a head along the embedding."""
    layout = ResidualLayout(model.config.hidden_size)
    embedding = model.embed_tokens.weight
    embedding[:, layout.token.stop :] = 0.0
    embedding[:, 0] = 1.0
    tokens = torch.zeros(max(LAG_WIDTHS), layout.width)
    tokens[:, layout.token] = nn.init.orthogonal_(torch.empty(max(LAG_WIDTHS), layout.token.stop - layout.token.start))
    _seed_delay_lines(model, LAGS, tokens, DELAY_GAIN)
    mla = [layer.self_attn for layer in model.walk() if isinstance(layer.self_attn, MlaAttention)]
    for layer in mla[:2]:
        _seed_induction(layer, layout, tokens)
    model.lm_head.weight.copy_(HEAD_SCALE * embedding)


def lag_directions(model: KimiK3ForTraining) -> torch.Tensor:
    """The directions of the token [n, D] that every lag keeps the first rows of (orthonormal, pinned)."""
    layer, head, _, _ = next(_delay_lines(model))
    start = _rows(layer, head).start
    return layer.v_proj.weight[start : start + max(LAG_WIDTHS)].detach() / VALUE_LINEAR


def _delay_line_weights(model: KimiK3ForTraining) -> Iterator[torch.Tensor]:
    """Views of everything that makes the delay lines what they are."""
    layout = ResidualLayout(model.config.hidden_size)
    for layer, head, lag, _ in _delay_lines(model):
        rows = _rows(layer, head)
        where = layout.lag(lag)
        used = slice(rows.start, rows.start + where.stop - where.start)
        for module in (layer.q_proj, layer.k_proj, layer.f_b_proj, layer.g_proj):
            yield module.weight[rows]
        for taps in (layer.q_conv1d_weight, layer.k_conv1d_weight, layer.v_conv1d_weight):
            yield taps[rows]
        yield from (layer.v_proj.weight[rows], layer.dt_bias[rows], layer.b_proj.weight[head])
        yield from (layer.o_proj.weight[:, used], layer.A_log[head : head + 1], layer.o_norm.weight)


def _other_writers(model: KimiK3ForTraining) -> Iterator[torch.Tensor]:
    """Views of what else could write into the reserved places before the delay lines are read."""
    layout = ResidualLayout(model.config.hidden_size)
    used: dict[KdaAttention, list[int]] = {}
    for layer, head, lag, _ in _delay_lines(model):
        where = layout.lag(lag)
        start = _rows(layer, head).start
        used.setdefault(layer, []).extend(range(start, start + where.stop - where.start))
    for lag in RESERVED_LAGS:
        rows = layout.lag(lag)
        yield model.embed_tokens.weight[:, rows]
        for block in list(model.walk())[:2]:
            attention = block.self_attn
            assert isinstance(attention, KdaAttention), "delay lines need KDA in the first two layers"
            yield from _gaps(attention.o_proj.weight[rows], used[attention])
            feed_forward = block.mlp if block.is_dense else block.block_sparse_moe
            if isinstance(feed_forward, DenseMlp):
                yield feed_forward.down_proj.weight[rows]
            elif isinstance(feed_forward, LatentMoe):
                yield feed_forward.routed_expert_up_proj.weight[rows]
                yield feed_forward.shared_experts.down_proj.weight[rows]


def _gaps(weight: torch.Tensor, columns: list[int]) -> Iterator[torch.Tensor]:
    """Views of ``weight`` between the given columns."""
    start = 0
    for column in [*sorted(columns), weight.shape[1]]:
        if column > start:
            yield weight[:, start:column]
        start = column + 1


class PinnedLags:
    """Keeps the delay lines as they were seeded and their places free of anything else.

    Without it they are gone after 150 steps: the first layer's MLP learns outputs ten times their size.
    """

    @torch.no_grad()
    def __init__(self, model: KimiK3ForTraining) -> None:
        self.zeros = [view.detach() for view in _other_writers(model)]
        self.kept = [(view.detach(), view.detach().clone()) for view in _delay_line_weights(model)]
        self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what an optimiser step did to them."""
        for view in self.zeros:
            view.zero_()
        for view, value in self.kept:
            view.copy_(value)
