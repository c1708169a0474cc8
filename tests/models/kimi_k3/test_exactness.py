"""Bits of a row are its own: neighbours, packing, page ids, slots and prompt cuts change nothing."""

import pytest
import torch

from outrider.testing.driver import Driver, Span

pytestmark = pytest.mark.gates
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def prompt(slot, ids):
    return Span(slot=slot, token_ids=tuple(ids), is_prompt=True)


def rows(slot, ids):
    return Span(slot=slot, token_ids=tuple(ids), is_prompt=False)


def other_ids(toy, count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, toy.options.vocab_size, (count,), generator=generator).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_cannot_move_a_row(toy, dtype):
    """Past the second snapshot with many rows per batch: the stride trap of section 14.6 as well."""
    variant = toy("deep")
    model = variant.load(dtype)
    model.set_aux_layers((5, 12, 13), "mixture")
    a = variant.sequences[0]
    alone = Driver(model=model)
    expected = [alone.forward([prompt(0, a[:16])]), alone.forward([prompt(0, a[16:18])])]
    expected.append(alone.forward([rows(0, a[18:22])]))
    alone.commit([3])
    expected.append(alone.forward([rows(0, a[21:22])]))

    packed = Driver(model=model, page_size=16)
    b, c = other_ids(variant, 40, 1), other_ids(variant, 40, 2)
    packed.forward([prompt(0, c[:7])])
    found = [packed.forward([rows(0, c[7:9]), prompt(3, a[:16]), prompt(1, b[:23])])]
    packed.commit([1])
    found.append(packed.forward([rows(0, c[8:11]), prompt(3, a[16:18])]))
    packed.commit([2])
    found.append(packed.forward([rows(0, c[10:17]), rows(1, b[23:24]), rows(3, a[18:22])]))
    packed.commit([7, 1, 3])
    found.append(packed.forward([prompt(2, c[:33]), rows(3, a[21:22])]))
    for want, got, first in zip(expected, found, (2, 3, 8, 33), strict=True):
        part = slice(first, first + want.logits_NV.shape[0])
        assert torch.equal(want.logits_NV, got.logits_NV[part])
        assert torch.equal(want.aux_hidden_TAD, got.aux_hidden_TAD[part])
    states = (d.caches.recurrent.state(0) for d in (alone, packed))
    assert torch.equal(next(states)[0], next(states)[3])


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_poisoned_neighbours_cannot_reach_a_row(toy, dtype, poison):
    """Neighbours whose every value is NaN or huge, in prompts, single steps and verify spans beside ours."""
    variant = toy("k3")
    model = variant.load(dtype)
    model.embedding[variant.options.vocab_size - 1] = poison
    bad = [variant.options.vocab_size - 1] * 8
    ours = [token_id for token_id in variant.sequences[0] if token_id != bad[0]][:20]
    alone, company = Driver(model=model), Driver(model=model)
    expected = [alone.forward([prompt(0, ours[:16])]).logits_NV, alone.forward([rows(0, ours[16:20])]).logits_NV]
    company.forward([prompt(1, bad[:5])])
    found = [company.forward([prompt(3, bad), prompt(0, ours[:16]), rows(1, bad[:3])]).logits_NV[8:24]]
    company.commit([2])
    found.append(company.forward([rows(3, bad[:1]), rows(1, bad[:7]), rows(0, ours[16:20])]).logits_NV[8:12])
    for want, got in zip(expected, found, strict=True):
        assert not want.isnan().any()
        assert torch.equal(want, got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_verifying_equals_stepping(toy, dtype):
    """A span of five rows gives the bits of five single steps, and commits the same state."""
    variant = toy("k3")
    model = variant.load(dtype)
    ids = variant.sequences[0]
    one, many = Driver(model=model), Driver(model=model)
    for driver in (one, many):
        driver.forward([prompt(1, ids[:9])])
    span = many.forward([rows(1, ids[9:14])])
    many.commit([5])
    for i in range(9, 14):
        single = one.forward([rows(1, ids[i : i + 1])])
        one.commit([1])
        assert torch.equal(single.logits_NV[0], span.logits_NV[i - 9])
    for layer in range(len(model.config.kda_layers)):
        states, windows = (
            [getattr(d.caches.recurrent, name)(layer)[1] for d in (one, many)] for name in ("state", "conv_window")
        )
        assert torch.equal(*states)
        assert torch.equal(*windows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompt_cut_at_chunk_multiples(toy, dtype):
    variant = toy("k3")
    model = variant.load(dtype)
    ids = variant.sequences[0]
    whole, cut = Driver(model=model), Driver(model=model)
    expected = whole.forward([prompt(0, ids)])
    assert model.chunk_multiple == 16
    parts = [cut.forward([prompt(0, ids[:16])]), cut.forward([prompt(0, ids[16:])])]
    assert torch.equal(expected.logits_NV, torch.cat([part.logits_NV for part in parts]))
    assert torch.equal(whole.caches.recurrent.state(2)[0], cut.caches.recurrent.state(2)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_experts_give_the_same_bits(toy, dtype):
    variant = toy("k3")
    ids = variant.sequences[1]
    packed, unpacked = (
        Driver(model=variant.load(dtype, experts)).forward([prompt(0, ids)]) for experts in ("packed", "unpacked")
    )
    assert torch.equal(packed.logits_NV, unpacked.logits_NV)


def test_rejected_rows_leave_no_trace(toy):
    """Uncommitted rows change neither state nor later logits, whatever they hold."""
    variant = toy("k3")
    model = variant.load(torch.float32)
    ids = variant.sequences[0]
    clean, dirty = Driver(model=model), Driver(model=model)
    for driver in (clean, dirty):
        driver.forward([prompt(0, ids[:10])])
    clean.forward([rows(0, ids[10:11])])
    dirty.forward([rows(0, (ids[10], *other_ids(variant, 5, 4)))])
    clean.commit([1])
    dirty.commit([1])
    outputs = [driver.forward([rows(0, ids[11:13])]).logits_NV for driver in (clean, dirty)]
    assert torch.equal(*outputs)


def test_a_released_slot_starts_afresh(toy):
    variant = toy("k3")
    model = variant.load(torch.float32)
    driver = Driver(model=model)
    first = driver.forward([prompt(2, variant.sequences[1])])
    driver.release(2)
    driver.forward([prompt(2, other_ids(variant, 11, 9))])
    driver.release(2)
    assert torch.equal(first.logits_NV, driver.forward([prompt(2, variant.sequences[1])]).logits_NV)


@pytest.mark.parametrize("dtype", DTYPES)
def test_joined_projections_equal_separate_ones(toy, dtype):
    """One product for q, k, v, gate ... is one product each, up to what a library changes with the columns.

    Not bit for bit: in float32 on AMD Zen 4 the number of columns chooses the kernel. A loaded model has one form.
    """
    bound = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2.0**-7}[dtype]
    model = toy("k3").load(dtype)
    x_TD = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    for layer in model.layers:
        weight, sections = layer.attention.in_proj, layer.attention.sections
        joined = torch.split(model.linear(x_TD, weight), sections, dim=-1)
        for part, rows_of_weight in zip(joined, torch.split(weight, sections), strict=True):
            alone = model.linear(x_TD, rows_of_weight.contiguous())
            assert (part - alone).abs().max() <= bound * alone.abs().max()
