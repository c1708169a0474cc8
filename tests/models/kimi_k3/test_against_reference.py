"""The flat-batch model against the literal reference in float64: every variant, every way to cut."""

import pytest
import torch

from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.step import StepIndex
from outrider.testing.driver import Driver, Span

pytestmark = pytest.mark.gates
VARIANTS = (
    "k3",
    "deep",
    "kimi_linear",
    "softplus, low-rank gate, unbounded situ",
    "wide gate bound",
    "plain residual, no latent, no shared expert",
    "plain q, no MLA gate, other eps",
    "more heads than head_dim, unquantised, top 3 of 5",
)
TOLERANCE = 1e-9


def prompt(slot: int, ids: tuple[int, ...]) -> Span:
    return Span(slot=slot, token_ids=ids, is_prompt=True)


def rows(slot: int, ids: tuple[int, ...]) -> Span:
    return Span(slot=slot, token_ids=ids, is_prompt=False)


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected).abs().max())


@pytest.mark.parametrize("name", VARIANTS)
def test_two_sequences_cut_everywhere(toy, name):
    """Prompts cut at odd places, verify spans with partial acceptance and decode rows, side by side."""
    variant = toy(name)
    model = variant.load()
    last = variant.options.num_layers - 1
    taps = (last, -1, 1)
    model.set_aux_layers(taps, "mixture")
    (a, b), (ref_a, ref_b) = variant.sequences, (variant.reference(0), variant.reference(1))
    driver = Driver(model=model, num_slots=3)
    wrong = (a[0] + 1) % variant.options.vocab_size

    def check(output, offset, reference, start, count):
        part = slice(offset, offset + count)
        assert worst(output.logits_NV[part], reference.logits_TV[start : start + count]) < TOLERANCE
        expected = reference.taps(taps, "mixture")[start : start + count]
        assert worst(output.aux_hidden_TAD[part], expected) < TOLERANCE

    check(driver.forward([prompt(2, a[:1])]), 0, ref_a, 0, 1)
    check(driver.forward([prompt(2, a[1:12])]), 0, ref_a, 1, 11)
    output = driver.forward([prompt(0, b[:5]), prompt(2, a[12:18])])  # crosses a chunk boundary
    check(output, 0, ref_b, 0, 5)
    check(output, 5, ref_a, 12, 6)
    output = driver.forward([rows(2, (*a[18:20], wrong, wrong)), prompt(0, b[5:7])])
    check(output, 0, ref_a, 18, 2)
    check(output, 4, ref_b, 5, 2)
    driver.commit([2])
    output = driver.forward([rows(0, b[7:8]), rows(2, a[20:22])])
    check(output, 0, ref_b, 7, 1)
    check(output, 1, ref_a, 20, 2)
    driver.commit([1, 2])
    output = driver.forward([rows(2, a[22:23]), rows(0, b[8:9])])
    check(output, 0, ref_a, 22, 1)
    check(output, 1, ref_b, 8, 1)
    driver.commit([1, 1])
    for slot, reference in ((2, ref_a), (0, ref_b)):
        for i, layer in enumerate(model.config.kda_layers):
            state_HVK = driver.caches.recurrent.state(i)[slot]
            assert worst(state_HVK.transpose(1, 2), reference.kda_states[layer]) < TOLERANCE


@pytest.mark.parametrize("stream", ["mixture", "prefix"])
def test_taps_of_every_layer(toy, stream):
    """Both tap conventions, all layers in one go, the embedding and the last layer included."""
    variant = toy("k3")
    model = variant.load()
    layers = tuple(range(-1, variant.options.num_layers))
    model.set_aux_layers(layers, stream)
    output = Driver(model=model).forward([prompt(0, variant.sequences[1])])
    assert worst(output.aux_hidden_TAD, variant.reference(1).taps(layers, stream)) < TOLERANCE
    other = {"mixture": "prefix", "prefix": "mixture"}[stream]
    assert worst(output.aux_hidden_TAD, variant.reference(1).taps(layers, other)) > 0.1


def test_one_token_sequence_and_no_logits(toy):
    variant = toy("k3")
    driver = Driver(model=variant.load())
    ids = variant.sequences[0]
    output = driver.forward([prompt(1, ids[:1])], all_logits=False)
    assert output.logits_NV.shape == (0, variant.options.vocab_size)
    assert output.aux_hidden_TAD is None
    output = driver.forward([rows(1, ids[1:2])])
    assert worst(output.logits_NV, variant.reference(0).logits_TV[1:2]) < TOLERANCE


def test_empty_batch(toy):
    """An idle rank enters the step with no rows."""
    model = toy("k3").load()
    model.set_aux_layers((0, 1), "mixture")
    output = Driver(model=model).forward([])
    assert output.logits_NV.shape == (0, 97)
    assert output.aux_hidden_TAD.shape == (0, 2, 64)


def test_float32_stays_close(toy):
    """Bound: about ten times the error seen (1e-5 at logits of spread 2), far below any bug."""
    variant = toy("kimi_linear")
    output = Driver(model=variant.load(torch.float32)).forward([prompt(0, variant.sequences[1])])
    assert output.logits_NV.dtype == torch.float32
    assert worst(output.logits_NV, variant.reference(1).logits_TV) < 1e-4


def test_bfloat16_per_layer_from_the_same_inputs(toy):
    """Section 14.23: end to end, random toys amplify rounding; per sublayer it is 0.5 %, at most 1.2 %."""
    variant = toy("deep")
    wide, narrow = variant.load(torch.float64), variant.load(torch.bfloat16)
    wide_driver, narrow_driver = Driver(model=wide), Driver(model=narrow)
    index = StepIndex.of(wide_driver.batch([prompt(0, variant.sequences[0])]))
    mixtures_LTD = variant.reference(0).mixtures_LTD
    for i in range(variant.options.num_layers):
        x_TD = mixtures_LTD[i]
        x_TD = (x_TD / (x_TD.square().mean(-1, keepdim=True) + 1e-5).sqrt()).bfloat16()
        exact, rounded = wide.layers[i], narrow.layers[i]
        pairs = (
            (
                exact.attention(x_TD.double(), index, wide_driver.caches),
                rounded.attention(x_TD, index, narrow_driver.caches),
            ),
            (exact.ffn(x_TD.double()), rounded.ffn(x_TD)),
        )
        for expected, found in pairs:
            assert found.dtype == torch.bfloat16
            error_T = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert error_T.median() < 0.01, (i, error_T)
            assert error_T.max() < 0.03, (i, error_T)


def test_embed_and_head_are_the_checkpoint_matrices(toy):
    variant = toy("k3")
    model: KimiK3Model = variant.load()
    ids = torch.tensor(variant.sequences[1])
    reference = variant.reference(1)
    assert worst(model.embed(ids), reference.mixtures_LTD[0]) == 0.0
    mixed = reference.mixtures_LTD[-1]
    normed = mixed / (mixed.square().mean(-1, keepdim=True) + 1e-5).sqrt() * model.norm
    assert worst(model.head(normed), reference.logits_TV) < TOLERANCE
