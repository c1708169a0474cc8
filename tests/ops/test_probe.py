"""The probe holds for what is shipped, finds what is planted, and takes the first geometry that holds."""

import pytest
import torch
import torch.nn.functional as F

from outrider.ops import (
    block_attention,
    invariant,
    kda,
    kda_step,
    moe,
    probe,
    probe_block,
    probe_kda,
    probe_mixers,
    probe_ops,
    residual,
    tiled,
)
from outrider.ops import linear as linear_ops
from outrider.ops.activation import Activation
from outrider.ops.block_attention import BlockMask
from outrider.ops.kda_step import PLAIN_KDA, KdaForm, kda_commit_seats
from outrider.ops.native.activation import NativeGlu
from outrider.ops.native.drafter import NativeDrafter
from outrider.ops.native.library import library_for
from outrider.ops.native.linear import PackedLinear
from outrider.ops.native.moe import RoutedExperts
from outrider.ops.native.norm import NativeNorm

CPU = torch.device("cpu")
SITU = Activation(name="situ", beta=4.0, linear_beta=25.0)
BLOCK = probe_block.BlockSizes(num_rows=5, num_heads=3, num_kv_heads=1, head_dim=20)
MASKS = (BlockMask(), BlockMask(causal=True, window=20), BlockMask(window=40, window_from_anchor=True))
SIZES = probe_mixers.MlaSizes(num_heads=3, nope_dim=16, rope_dim=8, value_dim=12, latent_dim=32)
KDA = probe_kda.KdaSizes(num_heads=3, width=20, num_taps=4, bound=-5.0, eps=1e-5)
ROUTED = probe_ops.RoutedSizes(num_experts=5, model_width=20, width=40, inner=24)
OPEN_KDA = probe_kda.KdaSizes(num_heads=2, width=16, num_taps=3, bound=None, eps=1e-5)


def every_check(dtype):
    """One check per operation, at widths that no vector divides."""
    return [
        probe_ops.linear_check("linear", (24, 40), dtype, CPU),
        probe_ops.experts_check(8, 40, 24, SITU, dtype, CPU),
        probe_ops.norm_check(40, 1e-6, dtype, CPU),
        probe_ops.gated_norm_check(3, 20, 1e-6, dtype, CPU),
        probe_ops.activation_check(SITU, 24, dtype, CPU),
        probe_ops.activation_check(Activation(name="silu"), 20, dtype, CPU),
        probe_ops.sigmoid_gate_check(36, dtype, CPU),
        probe_ops.conv_check(36, 4, dtype, CPU),
        probe_kda.kda_step_check((PLAIN_KDA,), KDA, dtype, CPU),
        probe_kda.kda_step_check((PLAIN_KDA,), OPEN_KDA, dtype, CPU),
        probe_kda.kda_prompt_check((PLAIN_KDA,), KDA, 16, dtype, CPU),
        probe_mixers.absorbed_check(SIZES, dtype, CPU),
        probe_mixers.expanded_check(SIZES, dtype, CPU),
        probe_ops.mix_check(5, 40, 1e-6, dtype, CPU),
        *(probe_block.block_attention_check(BLOCK, mask, dtype, CPU) for mask in MASKS),
        probe_block.context_rows_check(BLOCK, dtype, CPU),
    ]


def violation(check):
    return check.find_violation(check.geometries[0])


def expect_torch_form(check, plant):
    """The native form holds; once ``plant`` has spoilt it, the probe finds it and takes the torch form."""
    assert violation(check) is None
    plant()
    assert "differs from the row alone" in violation(check)
    outcome = probe.run_checks([check])
    assert not outcome.lost and outcome.geometries[check.name] == check.geometries[1]


def test_every_shipped_operation_holds(dtype, threads):
    outcome = probe.run_checks(
        [
            probe.OpCheck(
                name=f"{index} {check.name}", geometries=check.geometries, find_violation=check.find_violation
            )
            for index, check in enumerate(every_check(dtype))
        ]
    )
    assert not outcome.lost


def by_row_count(function, shape_of):
    """The function with a last bit that depends on the number of rows, as another kernel would have."""

    def changed(*args, **kwargs):
        out = function(*args, **kwargs)
        return out * (1 + 2.0**-6) if shape_of(*args, **kwargs) > 4 else out

    return changed


PLANTED = {
    "linear": (linear_ops.F, "linear", lambda x, w: x.shape[0], 0),
    "expert batches": (moe, "tile_bmm", lambda a, b: a.shape[1], 1),
    "norm": (F, "rms_norm", lambda x, *rest: x.shape[0], 2),
    "gated norm": (probe_ops, "gated_rms_norm", lambda o, *rest: o.shape[0], 3),
    "activation": (probe_ops, "glu_fused", lambda activation, x: x.shape[0], 4),
    "gate": (probe_ops, "sigmoid_gate", lambda x, gate: x.shape[0], 6),
    "convolution": (probe_ops, "short_conv", lambda x, *rest: x.shape[0], 7),
    "KDA update": (kda, "batch_matmul", lambda a, b: a.shape[0] // 3, 8),
    "attention": (invariant, "batch_matmul", lambda a, b: a.shape[1] // 4, 11),
    "residual mix": (residual, "attention_residual_mix", lambda x, *rest: x.shape[1], 13),
    # Three key tiles alone; more matrices with more sequences or longer contexts.
    "block attention": (tiled, "batch_matmul", lambda a, b: a.shape[0], 14),
    "windowed block attention": (block_attention, "block_attention", lambda q, *rest, scale: q.shape[0], 15),
    "context rows": (block_attention, "rms_norm", lambda x, *rest: x.shape[0], 17),
}


@pytest.mark.parametrize("name", PLANTED)
def test_an_operation_that_depends_on_the_number_of_rows_is_found(name, monkeypatch):
    module, attribute, shape_of, index = PLANTED[name]
    # float32 products and small bfloat16 ones have zero rows added, so there a large bfloat16 weight is checked.
    large = probe_ops.linear_check("large", (96, 64), torch.bfloat16, torch.device("cpu"))
    check = every_check(torch.float32)[index] if index else large
    monkeypatch.setattr(module, attribute, by_row_count(getattr(module, attribute), shape_of))
    found = violation(check)
    assert found is not None and ("differs" in found)


@pytest.mark.parametrize("name", ["linear", "norm", "mix", "activation", "routed"])
def test_a_native_form_that_depends_on_the_number_of_rows_is_found(name, monkeypatch):
    """Then the torch form, which holds, is taken."""
    native = library_for(torch.bfloat16, CPU)
    if native is None:
        pytest.skip("no native operations on this machine")
    dtype = torch.bfloat16
    form, attribute, check = {
        "linear": (PackedLinear, "__call__", probe_ops.linear_check("linear", (24, 40), dtype, CPU, native)),
        "norm": (NativeNorm, "rms_norm", probe_ops.norm_check(40, 1e-6, dtype, CPU, native)),
        "mix": (NativeNorm, "mix_norm", probe_ops.mix_check(5, 40, 1e-6, dtype, CPU, native)),
        "activation": (NativeGlu, "__call__", probe_ops.activation_check(SITU, 24, dtype, CPU, native)),
        "routed": (RoutedExperts, "__call__", probe_ops.routed_check(ROUTED, SITU, native)),
    }[name]
    real = getattr(form, attribute)

    def changed(*args):
        out = real(*args)
        rows = out[1] if name == "mix" else out
        if rows.shape[0] > 4:
            rows *= 1 + 2.0**-6
        return out

    assert violation(check) is None
    monkeypatch.setattr(form, attribute, changed)
    assert "differs" in violation(check)
    outcome = probe.run_checks([check])
    assert not outcome.lost and outcome.geometries[check.name] == check.geometries[1]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_native_block_that_depends_on_its_place_is_found(mask, monkeypatch):
    """All blocks of a call but the first are off; the torch form is taken."""
    native = library_for(torch.bfloat16, CPU)
    if native is None:
        pytest.skip("no native operations on this machine")
    real = NativeDrafter.attend_block

    def off(*args):
        out = real(*args)
        out[BLOCK.num_rows :] *= 1 + 2.0**-6
        return out

    expect_torch_form(
        probe_block.block_attention_check(BLOCK, mask, torch.bfloat16, CPU, native),
        lambda: monkeypatch.setattr(NativeDrafter, "attend_block", off),
    )


def stores_by_cache_row(real, *args):
    """What the first cache row does not hold is off."""
    real(*args)
    args[-1][:, :, 1:] *= 1 + 2.0**-6


def stores_at_the_first_position(real, drafter, kv, gains, eps, table, positions, *rest):
    real(drafter, kv, gains, eps, table, positions[:1].expand_as(positions).contiguous(), *rest)


@pytest.mark.parametrize("off", [stores_by_cache_row, stores_at_the_first_position])
def test_native_context_rows_that_depend_on_company_are_found(off, monkeypatch):
    native = library_for(torch.bfloat16, CPU)
    if native is None:
        pytest.skip("no native operations on this machine")
    real = NativeDrafter.store_context_rows
    expect_torch_form(
        probe_block.context_rows_check(BLOCK, torch.bfloat16, CPU, native),
        lambda: monkeypatch.setattr(NativeDrafter, "store_context_rows", lambda *args: off(real, *args)),
    )


def test_a_chunk_whose_state_depends_on_company_is_found(monkeypatch):
    """The state of all sequences but the first is off, as if one were read from a neighbour's seat."""
    real = kda_step.kda_chunk

    def off(*args, **kwargs):
        result = real(*args, **kwargs)
        result.state_SHWK[1:] = result.state_SHWK[:1]
        return result

    monkeypatch.setattr(kda_step, "kda_chunk", off)
    assert violation(every_check(torch.float32)[10]) is not None


def commits_into_a_neighbours_seat(seats, slots_S, rows_SM, num_committed_S):
    kda_commit_seats(seats, slots_S, rows_SM, num_committed_S)
    seats.state_BHWK[:, slots_S[1:]] = seats.state_BHWK[:, slots_S[:1]]


def commits_a_row_too_many(seats, slots_S, rows_SM, num_committed_S):
    kda_commit_seats(seats, slots_S, rows_SM, (num_committed_S + 1).clamp_max(rows_SM.shape[1]))


@pytest.mark.parametrize(
    ("commit", "expected"),
    [
        (commits_into_a_neighbours_seat, "differs from the row alone"),
        (commits_a_row_too_many, "the commit of 2 rows of"),
    ],
)
def test_a_commit_that_does_not_fit_its_step_is_found(commit, expected):
    form = KdaForm(name="off", bind_step=PLAIN_KDA.bind_step, bind_prompt=PLAIN_KDA.bind_prompt, commit=commit)
    check = probe_kda.kda_step_check((form, PLAIN_KDA), KDA, torch.float32, CPU)
    assert expected in violation(check)
    outcome = probe.run_checks([check])
    assert not outcome.lost and outcome.geometries[check.name] == "torch"


@pytest.mark.parametrize("index", [14, 15, 16])
def test_a_block_that_reads_a_neighbours_context_is_found(index, monkeypatch):
    real = probe_block.paged_keys

    def first_of_all(*args, **kwargs):
        keys = real(*args, **kwargs)
        keys.key_rows_SK[1:] = keys.key_rows_SK[:1]
        return keys

    monkeypatch.setattr(probe_block, "paged_keys", first_of_all)
    assert violation(every_check(torch.float32)[index]) is not None


def test_a_block_that_sees_how_long_its_neighbours_are_is_found(monkeypatch):
    """Key tiles beyond a context must change no bit of it."""
    real = block_attention.block_attention

    def by_tiles(*args, **kwargs):
        return real(*args, **kwargs) * (1 + 2.0**-6 * (args[5].num_tiles > 2))

    monkeypatch.setattr(block_attention, "block_attention", by_tiles)
    assert violation(every_check(torch.float32)[14]) is not None


def test_many_heads_are_cut_and_the_group_is_kept():
    cut = probe_block.BlockSizes(num_rows=7, num_heads=64, num_kv_heads=16, head_dim=64).cut()
    assert (cut.num_heads, cut.num_kv_heads) == (32, 8)
    assert BLOCK.cut() == BLOCK


def test_a_leak_of_a_neighbours_nan_is_found():
    def leaks(x_ND):
        return x_ND + 0 * x_ND.sum(0, keepdim=True)

    rows = torch.randn(3, 8)
    assert "nan neighbours" in probe.company_violation(leaks, rows, cases=[(5, "random"), (5, "nan")])


@pytest.mark.parametrize("offset", [0, 8, 16])
def test_one_bit_at_one_offset_is_found(offset):
    def off_by_a_bit(x_ND):
        out = x_ND.clone()
        if x_ND.shape[0] == 17:
            out[offset] = torch.nextafter(out[offset], out[offset] + 1)
        return out

    found = probe.company_violation(off_by_a_bit, torch.randn(3, 8))
    assert found == f"row {offset} of 17 differs from the row alone (random neighbours)"


def test_bits_are_compared_not_values():
    zero = torch.zeros(2)
    assert not probe.same_bits(zero, -zero)
    assert probe.same_bits(torch.full((2,), float("nan")), torch.full((2,), float("nan")))
    assert not probe.same_bits(zero, zero.double())


def planted(bad, *geometries):
    """A check whose geometries named in ``bad`` differ."""
    return probe.OpCheck(
        name="op", geometries=geometries, find_violation=lambda name: f"{name} differs" if name in bad else None
    )


def test_the_first_geometry_that_holds_is_taken():
    for bad, expected in ((), "cheap"), (("cheap",), "middle"), (("cheap", "middle"), "dear"):
        outcome = probe.run_checks([planted(bad, "cheap", "middle", "dear")])
        assert outcome.geometries == {"op": expected}
        assert not outcome.lost


def test_where_none_holds_the_default_is_kept_and_the_loss_is_told():
    outcome = probe.run_checks([planted(("cheap", "dear"), "cheap", "dear")])
    assert outcome.geometries == {"op": "cheap"}
    assert outcome.lost == {"op": "cheap differs"}


def test_a_library_that_depends_on_the_row_count_gets_padded_tiles(monkeypatch):
    """Below 16 rows other bits: unpadded tiles fail, tiles of exactly 16 rows hold."""
    real = F.linear
    monkeypatch.setattr(linear_ops.F, "linear", lambda x, w: real(x, w) * (1.5 if x.shape[0] < 16 else 1))
    outcome = probe.run_checks([probe_ops.linear_check("linear", (24, 40), torch.bfloat16, CPU)])
    assert outcome.geometries == {"linear": "exactly 16 rows a call"}


def test_a_library_that_looks_at_positions_gets_single_rows(monkeypatch):
    """The second row of a call differs: no tile of several rows can hold."""
    real = F.linear

    def by_position(x, w):
        out = real(x, w).clone()
        out[1:] *= 1.5
        return out

    monkeypatch.setattr(linear_ops.F, "linear", by_position)
    for dtype in (torch.bfloat16, torch.float32):
        outcome = probe.run_checks([probe_ops.linear_check("linear", (24, 40), dtype, CPU)])
        assert outcome.geometries == {"linear": "exactly 1 rows a call"}


def test_expert_forms_that_disagree_leave_the_loop(monkeypatch):
    real = probe_ops.routed_experts_batched
    monkeypatch.setattr(probe_ops, "routed_experts_batched", lambda *args: real(*args) * 1.5)
    check = every_check(torch.bfloat16)[1]
    outcome = probe.run_checks([check])
    assert outcome.geometries == {check.name: "exactly 16 rows a call"}


def test_wide_weights_are_cut():
    assert probe_ops.probed_shape(163_840, 7168) == (probe_ops.PROBE_COLUMNS, 7168)
    assert probe_ops.probed_shape(96, 8) == (96, 8)
