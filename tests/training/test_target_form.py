"""The training form of K3 is the model that the checkpoint describes."""

import pytest
import torch

from outrider.ops.quant import decode_mxfp4, encode_mxfp4
from outrider.testing.reference_k3 import reference_forward
from outrider.training.export import read_target, target_config, target_tensors, write_target
from outrider.training.grouped import grouped_linear
from outrider.training.kda import chunked_delta_rule
from outrider.training.kimi_k3 import KimiK3ForTraining, TrainConfig
from outrider.training.muon import orthogonalise
from outrider.training.quantisation import fake_mxfp4

TINY = TrainConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=5,
    mla_layers=(2, 4),
    attn_res_block_size=2,
    kda_heads=2,
    kda_head_dim=16,
    mla_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    dense_intermediate=48,
    num_experts=6,
    experts_per_token=2,
    moe_intermediate=32,
    latent_size=32,
    num_shared_experts=1,
)


@pytest.fixture
def model() -> KimiK3ForTraining:
    """A tiny target at weights a checkpoint can hold, with scores and biases off their zeros."""
    torch.manual_seed(3)
    model = KimiK3ForTraining(TINY)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith(("res.proj", "res.norm", "e_score_correction_bias")):
                value.add_(torch.randn_like(value) * 0.1)
            if ".experts." not in name and not name.endswith(("A_log", "dt_bias", "conv1d_weight", "o_norm.weight")):
                value.copy_(value.bfloat16().float())
    return model.eval()


def test_logits_and_taps_equal_the_literal_model(model):
    ids = torch.randint(0, 61, (2, 32))
    with torch.no_grad():
        hidden, taps = model(ids, taps=(0, 3, 4))
        logits = model.lm_head(hidden)
    config = target_config(TINY, max_positions=64, special_ids={"bos_token_id": 0})
    for row in range(2):
        expected = reference_forward(target_tensors(model), config, ids[row].tolist())
        assert (logits[row] - expected.logits_TV).abs().max() < 2e-4
        captured = torch.stack([tap[row] for tap in taps], 1)
        assert (captured - expected.taps((0, 3, 4), "mixture")).abs().max() < 2e-4


def test_delta_rule_equals_the_recurrence_with_gradients():
    torch.manual_seed(0)
    shape = (2, 48, 3, 8)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    log_decay = (-torch.rand(shape, dtype=torch.float64) * 4).requires_grad_()
    beta = torch.rand(shape[:3], dtype=torch.float64).requires_grad_()
    leaves = [*inputs, log_decay, beta]
    torch.set_default_dtype(torch.float64)
    try:
        out = chunked_delta_rule(*inputs, log_decay, beta, 16)
        grads = torch.autograd.grad(out.square().sum(), leaves)
    finally:
        torch.set_default_dtype(torch.float32)
    state, rows = torch.zeros(2, 3, 8, 8, dtype=torch.float64), []
    q, k, v = inputs
    for t in range(48):
        state = state * log_decay[:, t].exp().unsqueeze(-1)
        error = v[:, t] - torch.einsum("bhkw,bhk->bhw", state, k[:, t])
        state = state + torch.einsum("bhk,bhw->bhkw", k[:, t], beta[:, t].unsqueeze(-1) * error)
        rows.append(torch.einsum("bhkw,bhk->bhw", state, q[:, t]))
    expected = torch.stack(rows, 1)
    assert (out - expected).abs().max() < 1e-9 * expected.abs().max()
    for got, want in zip(grads, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        assert (got - want).abs().max() < 1e-8 * want.abs().max().clamp_min(1)


def test_grouped_linear_equals_separate_products_with_gradients():
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    sizes = (2, 0, 5)
    out = grouped_linear(x, weight, sizes)
    parts = [rows @ w.T for rows, w in zip(x.split(sizes), weight, strict=True)]
    assert torch.allclose(out, torch.cat(parts))
    got = torch.autograd.grad(out.square().sum(), (x, weight))
    want = torch.autograd.grad(torch.cat(parts).square().sum(), (x, weight))
    assert all(torch.allclose(a, b) for a, b in zip(got, want, strict=True))


def test_quantisation_in_training_is_the_checkpoint_format():
    weight = torch.randn(4, 8, 96) * torch.logspace(-3, 1, 4).view(4, 1, 1)
    weight.requires_grad_()
    rounded = fake_mxfp4(weight)
    assert torch.equal(decode_mxfp4(*encode_mxfp4(weight.detach()), torch.float32), rounded.detach())
    rounded.sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_muon_update_is_nearly_orthogonal():
    update = orthogonalise(torch.randn(24, 16))
    singular = torch.linalg.svdvals(update)
    assert singular.min() > 0.5 and singular.max() < 1.5


def test_training_can_go_on_from_exported_weights(model, tmp_path):
    write_target(model, tmp_path, max_positions=64, special_ids={"bos_token_id": 0})
    again = KimiK3ForTraining(TINY).eval()
    read_target(again, tmp_path)
    exported = target_tensors(model)
    assert exported.keys() == target_tensors(again).keys()
    assert all(torch.equal(exported[name], value) for name, value in target_tensors(again).items())
    ids = torch.randint(0, 61, (1, 16))
    assert torch.equal(model(ids)[0], again(ids)[0])
