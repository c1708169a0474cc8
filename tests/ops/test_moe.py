import pytest
import torch

from outrider.ops import moe
from outrider.ops.activation import Activation
from outrider.ops.linear import linear_padded
from outrider.ops.quant import decode_mxfp4, encode_mxfp4

SITU = Activation(name="situ", beta=4.0, linear_beta=25.0)
FORMS = [moe.routed_experts, moe.routed_experts_loop, moe.routed_experts_batched]


def make(num_rows, dtype, *, experts=8, top_k=3, width=64, inner=96):
    island = torch.float64 if dtype == torch.float64 else torch.float32
    x = torch.randn(num_rows, width).to(dtype)
    stack = moe.stack_experts(
        *((torch.randn(experts, *shape) * 0.2).to(dtype) for shape in ((inner, width), (inner, width), (width, inner)))
    )
    gate, bias = torch.randn(experts, width, dtype=island), torch.randn(experts, dtype=island) * 0.1
    return x, stack, gate, bias, top_k


def routing_of(x, gate, bias, top_k):
    return moe.route(x, gate, bias, top_k=top_k, renormalize=True, scaling=1.0)


def test_bias_moves_the_selection_but_not_the_weights():
    x, _, gate, _, _ = make(20, torch.float32)
    bias = torch.zeros(8)
    bias[5] = 100.0
    routing = moe.route(x, gate, bias, top_k=2, renormalize=False, scaling=1.0)
    scores = torch.sigmoid(x @ gate.T)
    assert bool((routing.expert_ids_TX == 5).any(1).all())
    assert torch.allclose(routing.weights_TX, scores.gather(1, routing.expert_ids_TX), atol=1e-6)


def test_weights_sum_to_the_scaling_and_ids_ascend():
    x, _, gate, bias, _ = make(20, torch.float64)
    routing = moe.route(x, gate, bias, top_k=4, renormalize=True, scaling=2.5)
    assert torch.allclose(routing.weights_TX.sum(1), torch.full((20,), 2.5).double())
    assert bool((routing.expert_ids_TX.diff(dim=1) > 0).all())
    best = (torch.sigmoid(x @ gate.T) + bias).topk(4).indices.sort(1).values
    assert torch.equal(routing.expert_ids_TX, best)


def test_equal_scores_take_the_lowest_ids():
    routing = moe.route(torch.ones(3, 4), torch.zeros(10, 4), torch.zeros(10), top_k=4, renormalize=True, scaling=1.0)
    assert routing.expert_ids_TX.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("function", [*FORMS, moe.routed_experts_plain])
def test_matches_one_pair_at_a_time(function, dtype, assert_close):
    for num_rows in (1, 5, 16):
        x, stack, gate, bias, top_k = make(num_rows, dtype)
        routing = routing_of(x, gate, bias, top_k)
        got = function(x, routing, stack, SITU)
        assert_close(got, moe.routed_experts_reference(x, routing, stack, SITU))


def test_a_failed_probe_leads_to_padded_tiles_with_the_bits_of_any_batch():
    x, stack, gate, bias, top_k = make(16, torch.bfloat16, experts=4)
    whole = moe.routed_experts_loop(x, routing_of(x, gate, bias, top_k), stack, SITU, product=linear_padded)
    for rows in (slice(0, 1), slice(3, 9), slice(15, 16)):
        routing = routing_of(x[rows], gate, bias, top_k)
        part = moe.routed_experts_loop(x[rows], routing, stack, SITU, product=linear_padded)
        assert torch.equal(part, whole[rows])


def test_combine_rounds_once_in_ascending_order():
    outputs = torch.tensor([[[1.0], [2.0**-9], [2.0**-9]]]).bfloat16()
    wide = moe.combine(outputs.float(), torch.ones(1, 3))
    assert torch.equal(moe.combine(outputs, torch.ones(1, 3)), wide.bfloat16())


@pytest.mark.parametrize(("width", "inner", "experts"), [(64, 96, 8), (256, 128, 16), (32, 1024, 4)])
def test_all_forms_and_all_batches_give_the_same_bits(width, inner, experts, dtype, threads):
    x, stack, gate, bias, top_k = make(40, dtype, experts=experts, width=width, inner=inner)
    whole = moe.routed_experts_loop(x, routing_of(x, gate, bias, top_k), stack, SITU)
    for rows in [slice(0, n) for n in (1, 3, 8, 16, 17)] + [slice(39, 40), slice(7, 15)]:
        routing = routing_of(x[rows], gate, bias, top_k)
        for function in FORMS:
            if function is moe.routed_experts_batched and x[rows].shape[0] > moe.BATCHED_MAX_ROWS:
                continue
            assert torch.equal(function(x[rows], routing, stack, SITU), whole[rows]), (function.__name__, rows)


def test_routing_rows_do_not_depend_on_each_other(dtype, threads):
    x, _, gate, bias, _ = make(40, dtype)
    whole = routing_of(x, gate, bias, 3)
    for rows in [slice(0, n) for n in range(1, 18)] + [slice(39, 40)]:
        part = routing_of(x[rows], gate, bias, 3)
        assert torch.equal(part.expert_ids_TX, whole.expert_ids_TX[rows])
        assert torch.equal(part.weights_TX, whole.weights_TX[rows])


def test_a_poisoned_row_stays_alone(dtype):
    x, stack, gate, bias, top_k = make(9, dtype)
    routing = routing_of(x, gate, bias, top_k)
    clean = [function(x, routing, stack, SITU) for function in FORMS]
    x[4] = float("nan")
    others = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8])
    for function, expected in zip(FORMS, clean, strict=True):
        assert torch.equal(function(x, routing, stack, SITU)[others], expected[others])


def test_packed_experts_equal_unpacked_ones(dtype):
    x, stack, gate, bias, top_k = make(7, dtype)
    gate_up, down = encode_mxfp4(stack.gate_up_EJL), encode_mxfp4(stack.down_ELI)
    packed = moe.PackedExperts(
        gate_up_packed_EJB=gate_up[0],
        gate_up_scale_EJG=gate_up[1],
        down_packed_ELB=down[0],
        down_scale_ELG=down[1],
        dtype=dtype,
    )
    unpacked = moe.StackedExperts(gate_up_EJL=decode_mxfp4(*gate_up, dtype), down_ELI=decode_mxfp4(*down, dtype))
    routing = routing_of(x, gate, bias, top_k)
    assert packed.num_experts == 8
    assert torch.equal(moe.routed_experts(x, routing, packed, SITU), moe.routed_experts(x, routing, unpacked, SITU))


def test_no_rows():
    x, stack, gate, bias, top_k = make(0, torch.float32)
    assert moe.routed_experts(x, routing_of(x, gate, bias, top_k), stack, SITU).shape == (0, 64)
