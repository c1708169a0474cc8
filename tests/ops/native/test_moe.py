"""Routed experts in C++ against the torch form, and a row's bits against the row alone."""

import pytest
import torch

from outrider.ops import moe
from outrider.ops.activation import Activation
from outrider.ops.native.moe import RoutedExperts
from outrider.ops.quant import decode_mxfp4, encode_mxfp4

SITU = Activation(name="situ", beta=4.0, linear_beta=25.0)
ACTIVATIONS = (SITU, Activation(name="situ", beta=None, linear_beta=None), Activation(name="silu"))
BF16_BOUND = 2.0**-7  # of the largest value: roundings of the intermediates and of the result


class Case:
    """Random weights of one layer in both forms of storage, and rows.

    The unpacked weights are the decoded packed ones where the sizes allow packing, else random bfloat16.
    """

    def __init__(self, *, experts=8, top_k=3, model_width=48, width=64, inner=96, scaling=1.0, renormalize=True):
        self.packed = None
        gate_up, down = torch.randn(experts, 2 * inner, width) * 0.3, torch.randn(experts, width, inner) * 0.3
        if width % 32 == inner % 32 == 0:
            (gate_up_packed, gate_up_scale), (down_packed, down_scale) = encode_mxfp4(gate_up), encode_mxfp4(down)
            self.packed = moe.PackedExperts(
                gate_up_packed_EJB=gate_up_packed,
                gate_up_scale_EJG=gate_up_scale,
                down_packed_ELB=down_packed,
                down_scale_ELG=down_scale,
                dtype=torch.bfloat16,
            )
            gate_up = decode_mxfp4(gate_up_packed, gate_up_scale, torch.float32)
            down = decode_mxfp4(down_packed, down_scale, torch.float32)
        self.unpacked = moe.StackedExperts(gate_up_EJL=gate_up.bfloat16(), down_ELI=down.bfloat16())
        self.router = moe.Router(
            gate_weight_ED=torch.randn(experts, model_width) * 0.2,
            correction_bias_E=torch.randn(experts) * 0.1,
            top_k=top_k,
            renormalize=renormalize,
            scaling=scaling,
        )
        self.model_width, self.width = model_width, width

    def rows(self, num_rows):
        return torch.randn(num_rows, self.model_width).bfloat16(), torch.randn(num_rows, self.width).bfloat16()

    def forms(self):
        return [form for form in (self.unpacked, self.packed) if form is not None]

    def route(self, x):
        router = self.router
        return moe.route(
            x,
            router.gate_weight_ED,
            router.correction_bias_E,
            top_k=router.top_k,
            renormalize=router.renormalize,
            scaling=router.scaling,
        )


def same_bits(left, right):
    bits = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.int64: torch.int64}[left.dtype]
    return left.dtype == right.dtype and torch.equal(left.view(bits), right.view(bits))


SIZES = [
    {},
    {"width": 96, "inner": 64, "experts": 16, "top_k": 4, "model_width": 192},  # the shipped model
    {"width": 32, "inner": 160, "experts": 5, "top_k": 1, "model_width": 17},
    {"width": 40, "inner": 24, "experts": 3, "top_k": 3, "model_width": 33},  # neither blocks nor groups are whole
    {"width": 7, "inner": 1, "experts": 2, "top_k": 2, "model_width": 1},
    {"width": 144, "inner": 48, "experts": 40, "top_k": 6, "model_width": 100},
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 17, 70])
def test_experts_match_the_torch_form(native, sizes, num_rows, assert_close):
    case = Case(**sizes)
    x, z = case.rows(num_rows)
    routing = case.route(x)
    for experts in case.forms():
        for activation in ACTIVATIONS if num_rows == 3 else (SITU,):
            got = RoutedExperts(native, case.router, experts, activation).experts(z, routing)
            if num_rows:
                assert_close(got, moe.routed_experts_loop(z, routing, case.unpacked, activation), BF16_BOUND)
            assert got.shape == z.shape


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("scaling", "renormalize"), [(1.0, True), (2.5, True), (0.5, False)])
def test_router_matches_the_torch_form(native, sizes, scaling, renormalize):
    case = Case(**sizes, scaling=scaling, renormalize=renormalize)
    x, _ = case.rows(70)
    got = RoutedExperts(native, case.router, case.unpacked, SITU).route(x)
    expected = case.route(x)
    biased = torch.sigmoid(x.double() @ case.router.gate_weight_ED.double().T) + case.router.correction_bias_E
    ranked = biased.sort(-1, descending=True).values
    top_k = case.router.top_k
    clear = ranked[:, top_k - 1] - ranked[:, top_k] > 1e-5 if top_k < ranked.shape[1] else torch.ones(70).bool()
    assert clear.sum() > 60, "too few rows have a clear choice"
    assert torch.equal(got.expert_ids_TX[clear], expected.expert_ids_TX[clear])
    assert torch.allclose(got.weights_TX[clear], expected.weights_TX[clear], rtol=1e-5, atol=1e-6)
    assert bool((got.expert_ids_TX.diff(dim=1) > 0).all())


def test_equal_scores_take_the_lowest_ids(native):
    case = Case(experts=20, top_k=4)
    case.router.gate_weight_ED.zero_()
    case.router.correction_bias_E.zero_()
    x, _ = case.rows(5)
    routed = RoutedExperts(native, case.router, case.unpacked, SITU)
    assert routed.route(x).expert_ids_TX.tolist() == [[0, 1, 2, 3]] * 5
    case.router.correction_bias_E[[3, 9, 11, 17, 19]] = 1.0  # read where it is
    assert routed.route(x).expert_ids_TX.tolist() == [[3, 9, 11, 17]] * 5
    assert torch.equal(routed.route(x).weights_TX, torch.full((5, 4), 0.25))


def test_bias_moves_the_selection_but_not_the_weights(native):
    case = Case(renormalize=False)
    case.router.correction_bias_E.zero_()[5] = 100.0
    x, _ = case.rows(20)
    routing = RoutedExperts(native, case.router, case.unpacked, SITU).route(x)
    scores = torch.sigmoid(x.float() @ case.router.gate_weight_ED.T)
    assert bool((routing.expert_ids_TX == 5).any(1).all())
    assert torch.allclose(routing.weights_TX, scores.gather(1, routing.expert_ids_TX), atol=1e-6)


def test_a_row_of_nan_takes_experts_that_exist(native):
    case = Case()
    x, z = case.rows(3)
    x[1] = float("nan")
    routed = RoutedExperts(native, case.router, case.unpacked, SITU)
    routing = routed.route(x)
    assert routing.expert_ids_TX[1].tolist() == case.route(x).expert_ids_TX[1].tolist() == [0, 1, 2]
    assert routing.weights_TX[1].isnan().all()
    assert routed(x, z)[1].isnan().all()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_one_call_has_the_bits_of_two_and_packed_those_of_unpacked(native, sizes, threads):
    case = Case(**sizes)
    x, z = case.rows(19)
    outputs = []
    for experts in case.forms():
        routed = RoutedExperts(native, case.router, experts, SITU)
        outputs += [routed(x, z), routed.experts(z, routed.route(x))]
    assert all(same_bits(out, outputs[0]) for out in outputs[1:])


@pytest.mark.parametrize("packed", [False, True], ids=("unpacked", "packed"))
@pytest.mark.parametrize(
    "sizes", [SIZES[0], SIZES[1], {"width": 256, "inner": 192, "experts": 32, "top_k": 4, "model_width": 512}], ids=str
)
def test_every_row_alone_has_its_bits(native, sizes, packed, threads):
    case = Case(**sizes)
    x, z = case.rows(64)
    routed = RoutedExperts(native, case.router, case.forms()[packed], SITU)
    whole = routed(x, z)
    routing = routed.route(x)
    for row in range(64):
        one = slice(row, row + 1)
        assert same_bits(routed(x[one], z[one]), whole[one])
        alone = routed.route(x[one])
        assert same_bits(alone.expert_ids_TX, routing.expert_ids_TX[one])
        assert same_bits(alone.weights_TX, routing.weights_TX[one])
    for num_rows in range(2, 64):
        part = slice(num_rows // 3, num_rows // 3 + num_rows) if num_rows < 48 else slice(0, num_rows)
        assert same_bits(routed(x[part], z[part]), whole[part])


@pytest.mark.parametrize("packed", [False, True], ids=("unpacked", "packed"))
def test_a_long_prompt_has_the_bits_of_its_pieces(native, packed, threads):
    case = Case(width=96, inner=64, experts=16, top_k=4, model_width=192)
    x, z = case.rows(1024)
    routed = RoutedExperts(native, case.router, case.forms()[packed], SITU)
    whole = routed(x, z)
    assert not whole.isnan().any()
    for first, last in [(0, 1), (1, 9), (9, 42), (42, 500), (500, 1023), (1023, 1024)]:
        assert same_bits(routed(x[first:last], z[first:last]), whole[first:last])


@pytest.mark.parametrize("packed", [False, True], ids=("unpacked", "packed"))
def test_all_rows_on_one_expert(native, packed, threads, assert_close):
    case = Case(top_k=1)
    _, z = case.rows(64)
    ids = torch.full((64, 1), 6)
    routed = RoutedExperts(native, case.router, case.forms()[packed], SITU)
    routing = moe.Routing(expert_ids_TX=ids, weights_TX=torch.linspace(0.1, 1, 64)[:, None])
    whole = routed.experts(z, routing)
    assert_close(whole, moe.routed_experts_loop(z, routing, case.unpacked, SITU), BF16_BOUND)
    for row in range(64):
        one = slice(row, row + 1)
        alone = moe.Routing(expert_ids_TX=ids[one], weights_TX=routing.weights_TX[one])
        assert same_bits(routed.experts(z[one], alone), whole[one])


def test_the_order_of_the_sum_is_that_of_the_ids(native):
    """Weighted outputs of 1, 2^-9 and 2^-9 in float32: one rounding at the end, none in between."""
    case = Case(experts=3, top_k=3)
    _, z = case.rows(4)
    routed = RoutedExperts(native, case.router, case.unpacked, SITU)
    single = []
    for index in range(3):
        one = torch.zeros(4, 3)
        one[:, index] = 1.0
        routing = moe.Routing(expert_ids_TX=torch.arange(3).expand(4, 3), weights_TX=one)
        single.append(routed.experts(z, routing).float())
    weights = torch.rand(4, 3)
    routing = moe.Routing(expert_ids_TX=torch.arange(3).expand(4, 3), weights_TX=weights)
    expected = moe.combine(torch.stack(single, dim=1).bfloat16(), weights)
    assert same_bits(routed.experts(z, routing), expected)


@pytest.mark.parametrize("poison", [float("nan"), 3e38])
@pytest.mark.parametrize("packed", [False, True], ids=("unpacked", "packed"))
def test_a_poisoned_row_stays_alone(native, poison, packed, threads):
    case = Case()
    x, z = case.rows(21)
    routed = RoutedExperts(native, case.router, case.forms()[packed], SITU)
    clean = routed(x, z)
    others = torch.arange(21) != 4
    x[4], z[4] = poison, poison
    assert same_bits(routed(x, z)[others], clean[others])


@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[3], SIZES[4]], ids=str)
def test_reads_its_rows_and_the_touched_experts_only(native, sizes, threads):
    """Rows are slices of a larger tensor of NaN, unused experts are NaN, and earlier calls left NaN behind."""
    case = Case(**sizes)
    x, z = case.rows(13)
    unused = 1
    case.router.correction_bias_E[unused] = -100.0
    if case.router.top_k == case.router.correction_bias_E.shape[0]:
        unused = None
    expected = [RoutedExperts(native, case.router, form, SITU)(x, z) for form in case.forms()]
    if unused is not None:
        case.unpacked.gate_up_EJL[unused] = float("nan")
        case.unpacked.down_ELI[unused] = float("nan")
        if case.packed is not None:
            case.packed.gate_up_scale_EJG[unused] = 255
            case.packed.down_scale_ELG[unused] = 255
    for form, clean in zip(case.forms(), expected, strict=True):
        routed = RoutedExperts(native, case.router, form, SITU)
        nan_x, nan_z = torch.full((40, x.shape[1] + 9), float("nan")), torch.full((40, z.shape[1] + 5), float("nan"))
        wide_x, wide_z = nan_x.bfloat16(), nan_z.bfloat16()
        routed(wide_x[:, : x.shape[1]], wide_z[:, : z.shape[1]])
        sliced_x, sliced_z = wide_x[11:24, 3 : 3 + x.shape[1]], wide_z[11:24, 1 : 1 + z.shape[1]]
        sliced_x.copy_(x)
        sliced_z.copy_(z)
        assert same_bits(routed(sliced_x, sliced_z), clean)


def test_every_code_and_scale_decodes_as_the_torch_form(native):
    """All bytes under scales from 2^-30 to 2^3, one input at a time: the products are the weights themselves."""
    width = inner = 32
    codes = torch.arange(256).to(torch.uint8).repeat(1, 4).view(1, 2 * inner, width // 2)
    scales = (torch.arange(2 * inner) % 34 + 97).to(torch.uint8).view(1, 2 * inner, 1)
    identity, identity_scale = encode_mxfp4(torch.eye(32)[None])
    packed = moe.PackedExperts(
        gate_up_packed_EJB=codes,
        gate_up_scale_EJG=scales,
        down_packed_ELB=identity,
        down_scale_ELG=identity_scale,
        dtype=torch.bfloat16,
    )
    router = moe.Router(
        gate_weight_ED=torch.zeros(1, 1), correction_bias_E=torch.zeros(1), top_k=1, renormalize=True, scaling=1.0
    )
    activation = Activation(name="silu")
    routing = moe.Routing(expert_ids_TX=torch.zeros(32, 1, dtype=torch.int64), weights_TX=torch.ones(32, 1))
    got = RoutedExperts(native, router, packed, activation).experts(torch.eye(32).bfloat16(), routing)
    weights_JL = decode_mxfp4(codes[0], scales[0], torch.float64)
    gate, up = weights_JL.T.chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up  # rows of the identity pick one input each
    assert expected.abs().max() > 30 and 0 < expected[expected != 0].abs().min() < 1e-15
    assert torch.allclose(got.double(), expected, rtol=2.0**-8, atol=0)


def test_an_expert_that_does_not_exist_is_refused(native):
    case = Case()
    _, z = case.rows(2)
    for bad in (-1, 8, 1 << 40):
        ids = torch.tensor([[0, 1, 2], [0, bad, 3]])
        with pytest.raises(ValueError, match=r"outside 0\.\.7"):
            RoutedExperts(native, case.router, case.packed, SITU).experts(
                z, moe.Routing(expert_ids_TX=ids, weights_TX=torch.ones(2, 3))
            )


def test_memory_is_that_of_the_storage(native):
    case = Case(experts=16)
    packed = RoutedExperts(native, case.router, case.packed, SITU)
    unpacked = RoutedExperts(native, case.router, case.unpacked, SITU)
    gate = 16 * 48 * 4
    elements = case.unpacked.gate_up_EJL.numel() + case.unpacked.down_ELI.numel()
    assert packed.num_bytes == gate + elements * 17 // 32
    assert unpacked.num_bytes == gate + elements * 2
