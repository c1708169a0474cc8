"""Acceptance 3-6 of k3-architecture section 16 on the model: what must matter, and what must not."""

import pytest
import torch

from outrider.models.kimi_k3.residual import ResidualStream
from outrider.models.layers import Build, IslandParameter
from outrider.ops.residual import attention_residual_mix
from outrider.testing.driver import Driver, Span
from outrider.testing.reference_k3 import reference_forward
from outrider.testing.toy import toy_config, toy_tensors


def logits(model, ids):
    return Driver(model=model).forward([Span(slot=0, token_ids=tuple(ids), is_prompt=True)]).logits_NV


def test_snapshots_hold_what_the_spec_says(toy):
    """B[0] is the embedding, B[j] the sum of the outputs of its block only, and so is the final prefix."""
    reference = toy("deep").reference(0)
    outputs = [a + m for a, m in zip(reference.attention_outputs, reference.ffn_outputs, strict=True)]
    assert len(reference.snapshots) == 4  # layers 0, 4, 8, 12
    assert torch.equal(reference.snapshots[0], reference.mixtures_LTD[0])
    for j in (1, 2, 3):
        expected = sum(outputs[4 * (j - 1) : 4 * j])
        assert torch.allclose(reference.snapshots[j], expected, rtol=0, atol=1e-12)
    assert torch.allclose(reference.prefixes_LTD[-1], outputs[12] + outputs[13], rtol=0, atol=1e-12)


def test_stream_walk_equals_the_reference(toy):
    """The slab, fed with the reference's sublayer outputs, holds the reference's snapshots."""
    reference = toy("deep").reference(0)
    stream = ResidualStream(torch.arange(reference.mixtures_LTD.shape[1]), reference.mixtures_LTD[0], 4)
    for i, (a, m) in enumerate(zip(reference.attention_outputs, reference.ffn_outputs, strict=True)):
        if i % 4 == 0:
            stream.open_block()
            stream.restart(a)
        else:
            stream.add(a)
        stream.add(m)
    *snapshots, prefix = stream.candidates_BTD
    assert torch.allclose(torch.stack(snapshots), torch.stack(reference.snapshots), rtol=0, atol=1e-12)
    assert torch.allclose(prefix, reference.prefixes_LTD[-1], rtol=0, atol=1e-12)


def test_constant_scores_give_the_mean():
    candidates = torch.randn(4, 3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mixed = attention_residual_mix(candidates, torch.zeros(64, dtype=torch.float64), 1e-5)
    assert torch.allclose(mixed, candidates.mean(0), rtol=0, atol=1e-15)


def test_mix_weights_follow_the_normed_candidate():
    """A candidate aligned with the scoring vector wins by its direction, not by its length."""
    weight = torch.zeros(64, dtype=torch.float64)
    weight[0] = 1.0
    small, large = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    small[0], large[1] = 0.1, 100.0
    mixed = attention_residual_mix(torch.stack([large, small])[:, None], weight, 1e-12)
    score = 8.0  # sqrt(64): a one-hot vector normed to rms 1
    share = torch.tensor(score, dtype=torch.float64).exp() / (torch.tensor(score, dtype=torch.float64).exp() + 1)
    assert torch.allclose(mixed[0, 0], share * 0.1, rtol=1e-6)


def test_entry_mix_of_layer_zero_has_no_effect(toy):
    variant = toy("k3")
    model = variant.load()
    before = logits(model, variant.sequences[1])
    model.layers[0].attention_mix.weight.weight.fill_(1e3)
    assert torch.equal(before, logits(model, variant.sequences[1]))
    model.layers[0].ffn_mix.weight.weight.mul_(-1)
    assert not torch.equal(before, logits(model, variant.sequences[1]))


def test_rope_dims_are_content(toy):
    """The shared key part changes the output, and no position id exists to change it."""
    variant = toy("kimi_linear")
    model = variant.load()
    before = logits(model, variant.sequences[1])
    mla = model.layers[3].attention
    first = mla.sections[0] + variant.options.kv_lora_rank
    mla.in_proj[first : first + variant.options.rope_head_dim].zero_()
    assert (before - logits(model, variant.sequences[1])).abs().max() > 1e-3


def test_correction_bias_moves_the_choice_not_the_weights(toy):
    """Equal bias on all experts changes nothing; a large bias on one puts it into every choice."""
    variant = toy("k3")
    model = variant.load()
    before = logits(model, variant.sequences[1])
    for layer in model.layers[1:]:
        layer.ffn.correction_bias.weight.add_(4.0)
    assert torch.allclose(before, logits(model, variant.sequences[1]), rtol=0, atol=1e-12)
    options = variant.options
    tensors = toy_tensors(options, 5)
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name][3] += 10.0
    reference = reference_forward(tensors, toy_config(options), variant.sequences[1])
    assert all(3 in ids for layer in reference.expert_ids for ids in layer)
    for layer in model.layers[1:]:
        layer.ffn.correction_bias.weight[3] += 10.0
    assert (logits(model, variant.sequences[1]) - reference.logits_TV).abs().max() < 1e-9


def test_permuting_experts_with_their_router_rows_changes_nothing(toy):
    variant = toy("k3")
    model = variant.load()
    before = logits(model, variant.sequences[1])
    order = torch.randperm(variant.options.num_experts, generator=torch.Generator().manual_seed(2))
    for layer in model.layers[1:]:
        ffn = layer.ffn
        for parameter in (ffn.gate.weight, ffn.correction_bias.weight, ffn.experts.gate_up, ffn.experts.down):
            parameter.copy_(parameter[order].clone())
    assert torch.allclose(before, logits(model, variant.sequences[1]), rtol=0, atol=1e-11)


def test_a_transposed_state_is_noticed(toy):
    """D_k == D_v: a wrong layout does not fail by shape, so it must fail by value."""
    variant = toy("k3")
    ids = variant.sequences[1]
    driver = Driver(model=variant.load())
    driver.forward([Span(slot=0, token_ids=ids[:8], is_prompt=True)])
    state = driver.caches.recurrent.state(0)
    state[0] = state[0].transpose(-1, -2).clone()
    output = driver.forward([Span(slot=0, token_ids=ids[8:], is_prompt=False)])
    assert (output.logits_NV - variant.reference(1).logits_TV[8:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["k3", "kimi_linear"])
def test_fp32_parameters_survive_a_cast_of_the_model(toy, name):
    model = toy(name).load(torch.float32)
    islands = {n: m for n, m in model.named_modules() if isinstance(m, IslandParameter)}
    before = {n: m.weight.clone() for n, m in islands.items()}
    kinds = {n.rsplit(".", maxsplit=1)[-1] for n in islands}
    assert {"a_log", "dt_bias", "conv", "o_norm", "correction_bias", "gate"} <= kinds
    model.to(torch.bfloat16)
    assert model.embedding.dtype == torch.bfloat16
    for n, m in islands.items():
        assert m.weight.dtype == torch.float32
        assert torch.equal(m.weight, before[n])
    model.to(torch.float64)
    assert all(m.weight.dtype == torch.float64 for m in islands.values())


def test_island_parameter_on_meta_moves():
    build = Build(dtype=torch.bfloat16, device=torch.device("meta"))
    parameter = build.island_weight(3)
    assert parameter.to_empty(device="cpu").weight.device.type == "cpu"
    assert parameter.weight.dtype == torch.float32
