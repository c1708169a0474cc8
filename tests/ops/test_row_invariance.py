"""Every operation of a row, in every dtype, over row counts and places, beside random, NaN and huge rows.

Operations that the start-up probe checks are here at more row counts; `test_probe` runs them at the probe's own.
"""

import pytest
import torch

from outrider.ops import activation, conv, invariant, moe, norm, rope, select
from outrider.ops.block_attention import BlockMask, block_attention
from outrider.ops.linear import linear, linear_padded
from outrider.ops.paged import paged_keys
from outrider.ops.probe import FILLS, company_violation
from outrider.ops.residual import attention_residual_mix
from outrider.ops.spans import spans_from_lengths

CASES = [(num_rows, FILLS[num_rows % 3]) for num_rows in range(2, 41)] + [
    (num_rows, fill) for num_rows in (2, 3, 5, 8, 16, 17, 32, 33, 64, 65) for fill in FILLS
]
WIDTH, EXPERTS, TOP = 40, 6, 2
SITU = activation.Activation(name="situ", beta=4.0, linear_beta=25.0)


def parameter(*shape, dtype, seed=7):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.3).to(dtype)


def experts_of(function):
    def make(dtype):
        island = invariant.island_dtype(dtype)
        gate, bias = parameter(EXPERTS, WIDTH, dtype=island), parameter(EXPERTS, dtype=island, seed=8)
        stack = moe.StackedExperts(
            gate_up_EJL=parameter(EXPERTS, 48, WIDTH, dtype=dtype), down_ELI=parameter(EXPERTS, WIDTH, 24, dtype=dtype)
        )

        def run(x):
            routing = moe.route(x, gate, bias, top_k=TOP, renormalize=True, scaling=2.5)
            return function(x, routing, stack, SITU)

        return run

    return make


def router(dtype):
    island = invariant.island_dtype(dtype)
    gate, bias = parameter(EXPERTS, WIDTH, dtype=island), parameter(EXPERTS, dtype=island, seed=8)

    def run(x):
        routing = moe.route(x, gate, bias, top_k=TOP, renormalize=True, scaling=2.5)
        return torch.cat([routing.weights_TX, routing.expert_ids_TX.to(island)], dim=1)

    return run


def combine(dtype):
    island = invariant.island_dtype(dtype)
    return lambda x: moe.combine(x.view(-1, 4, 10), x[:, :4].to(island))


def bmm_rows(dtype):
    weight = parameter(3, 20, 24, dtype=dtype)
    return lambda x: invariant.tile_bmm(x.view(-1, 2, 20)[:, :1].transpose(0, 1).expand(3, -1, -1), weight).transpose(
        0, 1
    )


def bmm_matrices(dtype):
    return lambda x: invariant.tile_bmm(x.view(-1, 2, 20), x.view(-1, 20, 2))


def rotation(dtype):
    table = rope.rotary_table(64, 20, 10000.0, dtype=invariant.island_dtype(dtype))
    return lambda x: rope.apply_half(x.view(-1, 2, 20), table, torch.full((x.shape[0],), 37))


def residual_mix(dtype):
    weight = parameter(WIDTH // 4, dtype=invariant.island_dtype(dtype))
    return lambda x: attention_residual_mix(x.view(-1, 4, WIDTH // 4).transpose(0, 1).contiguous(), weight, 1e-6)


def short_conv(dtype):
    weight = parameter(WIDTH // 4, 4, dtype=invariant.island_dtype(dtype))

    def run(x):
        rows = x.view(-1, 4, WIDTH // 4)
        return conv.short_conv(rows[:, 3], rows[:, :3], weight, spans_from_lengths((1,) * x.shape[0]))

    return run


def drafter_attention(dtype):
    """Two block rows of two heads per sequence; its context of 70 keys is made of its own row."""

    def run(x):
        count = x.shape[0]
        q, k, v = x[:, :16].view(count, 2, 2, 4), x[:, 16:24].view(count, 2, 1, 4), x[:, 24:32].view(count, 2, 1, 4)
        scales = torch.linspace(-1, 1, 70).to(dtype)[:, None, None]
        context = (x[:, None, None, 32:36] * scales).flatten(0, 1)
        table = torch.arange(70 * count).view(count, 70)
        keys = paged_keys(table, torch.full((count,), 70), page_size=1, max_context=70 + 64 * min(count - 1, 2))
        return block_attention(q, context, context, k, v, keys, BlockMask(), scale=0.5).flatten(1)

    return run


def elementwise(function):
    return lambda dtype: lambda x: function(x.to(invariant.island_dtype(dtype)))


OPERATIONS = {
    "linear": lambda dtype: lambda x: linear(x, parameter(24, WIDTH, dtype=dtype)),
    "linear_padded": lambda dtype: lambda x: linear_padded(x, parameter(24, WIDTH, dtype=dtype)),
    "linear of a slice": lambda dtype: lambda x: linear(x[:, 8:], parameter(24, WIDTH - 8, dtype=dtype)),
    "head and argmax": lambda dtype: lambda x: select.argmax_lowest(linear(x, parameter(97, WIDTH, dtype=dtype))),
    "tile_bmm, rows": bmm_rows,
    "tile_bmm, matrices": bmm_matrices,
    "router": router,
    "experts": experts_of(moe.routed_experts),
    "experts, loop": experts_of(moe.routed_experts_loop),
    "combine": combine,
    "rms_norm": lambda dtype: lambda x: norm.rms_norm(x, parameter(WIDTH, dtype=dtype), 1e-6),
    "l2_norm": lambda dtype: lambda x: norm.l2_norm_scaled(x.view(-1, 4, WIDTH // 4)),
    "gated_rms_norm": lambda dtype: (
        lambda x: norm.gated_rms_norm(
            x.view(-1, 2, 2, 10)[:, 0],
            parameter(10, dtype=invariant.island_dtype(dtype)),
            x.view(-1, 2, 2, 10)[:, 1],
            1e-6,
        )
    ),
    "situ": lambda dtype: lambda x: activation.glu_fused(SITU, x),
    "silu": lambda dtype: lambda x: activation.glu_fused(activation.Activation(name="silu"), x),
    "sigmoid gate": lambda dtype: lambda x: activation.sigmoid_gate(x[:, :17], x[:, 17:34]),
    "exp": elementwise(lambda x: invariant.exp(-x.abs())),
    "tanh": elementwise(invariant.tanh),
    "softplus": elementwise(lambda x: invariant.softplus(x[:, :7])),
    "rotary": rotation,
    "residual mix": residual_mix,
    "convolution": short_conv,
    "drafter attention": drafter_attention,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_has_its_own_bits(name, dtype):
    rows = parameter(3, WIDTH, dtype=dtype, seed=20) * 3
    assert company_violation(OPERATIONS[name](dtype), rows, cases=CASES) is None
