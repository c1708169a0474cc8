"""Kimi-Linear against transformers' own implementation, from one seeded toy checkpoint.

An independent reading of KDA (softplus gate, low-rank output gate), MLA without positions and the
router. transformers computes norms, softmax, KDA and router in float32 whatever the dtype.
"""

import pytest
import torch

from outrider.testing.driver import Driver, Span
from outrider.testing.reference_k3 import reference_forward
from outrider.testing.toy import kimi_linear_toy, toy_config, toy_tensors

transformers = pytest.importorskip("transformers")


def oracle_state(tensors, config):
    """Our checkpoint names to the parameter names of transformers (joined conv and experts)."""
    gate_parts = ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log")
    state = {}
    for name, tensor in tensors.items():
        if ".experts." in name or "_conv1d" in name:
            continue
        new = name.replace("block_sparse_moe.", "mlp.")
        if new.endswith(gate_parts):
            new = new.replace("self_attn.", "self_attn.forget_gate.")
        state[new] = tensor
    for i, layer_type in enumerate(config.layer_types):
        layer = f"model.layers.{i}."
        if layer_type == "linear_attention":
            taps = [tensors[f"{layer}self_attn.{s}_conv1d.weight"] for s in "qkv"]
            state[f"{layer}self_attn.conv1d.weight"] = torch.cat(taps)
        if i >= 1:
            expert = f"{layer}block_sparse_moe.experts."
            w1, w3, w2 = (
                torch.stack([tensors[f"{expert}{e}.{w}.weight"] for e in range(config.num_local_experts)])
                for w in ("w1", "w3", "w2")
            )
            state[f"{layer}mlp.experts.gate_up_proj"] = torch.cat([w1, w3], dim=1)
            state[f"{layer}mlp.experts.down_proj"] = w2
    return state


@pytest.fixture(scope="module")
def oracle():
    raw = {k: v for k, v in toy_config(kimi_linear_toy()).items() if k != "architectures"}
    config = transformers.KimiLinearConfig(
        **raw, attn_implementation="eager", num_experts_per_tok=2, n_shared_experts=1, num_local_experts=8
    )
    model = transformers.KimiLinearForCausalLM(config)
    missing, unexpected = model.load_state_dict(oracle_state(toy_tensors(kimi_linear_toy(), 5), config), strict=False)
    assert not missing and not unexpected
    return model.eval()


def test_oracle_has_our_shape(oracle):
    assert oracle.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert oracle.config.routed_scaling_factor == 2.446


@torch.no_grad()
def test_logits_of_prompt_and_steps(toy, oracle):
    """Float32 on both sides; the differences stay below 7e-5 where logits spread over 2 units."""
    variant = toy("kimi_linear")
    ids = variant.sequences[0]
    expected = oracle(torch.tensor([ids])).logits[0]
    driver = Driver(model=variant.load(torch.float32))
    found = [driver.forward([Span(slot=0, token_ids=ids[:17], is_prompt=True)]).logits_NV]
    found.append(driver.forward([Span(slot=0, token_ids=ids[17:22], is_prompt=False)]).logits_NV)
    driver.commit([5])
    found.append(driver.forward([Span(slot=0, token_ids=ids[22:], is_prompt=False)]).logits_NV)
    difference = (torch.cat(found) - expected).abs().max()
    assert difference < 7e-5, float(difference)


@torch.no_grad()
def test_literal_reference_agrees_as_well(toy, oracle):
    variant = toy("kimi_linear")
    reference = reference_forward(toy_tensors(variant.options, 5), toy_config(variant.options), variant.sequences[0])
    expected = oracle(torch.tensor([variant.sequences[0]])).logits[0]
    assert (reference.logits_TV - expected).abs().max() < 7e-5
