"""A seeded target copies before any training, keeps its delay lines, and its seeded drafter copies ahead."""

from dataclasses import replace

import pytest
import torch

from outrider.training.dspark import Blocks, DrafterConfig, DSparkForTraining
from outrider.training.kimi_k3 import KimiK3ForTraining
from outrider.training.layers import TrainConfig
from outrider.training.seeding import LAGS, PinnedLags, ResidualLayout, lag_directions, reseed_lags, seed_copying
from outrider.training.seeding_dspark import PinnedCopying, seed_drafter

VOCAB, SEGMENT = 512, 56
CONFIG = TrainConfig(
    vocab_size=VOCAB,
    hidden_size=192,
    num_layers=7,
    mla_layers=(3, 5, 6),
    attn_res_block_size=3,
    kda_heads=3,
    kda_head_dim=64,
    mla_heads=4,
    q_lora_rank=96,
    kv_lora_rank=96,
    qk_nope_head_dim=48,
    qk_rope_head_dim=16,
    v_head_dim=48,
    dense_intermediate=64,
    num_experts=4,
    experts_per_token=2,
    moe_intermediate=32,
    latent_size=32,
    num_shared_experts=1,
)
DRAFTER = DrafterConfig(
    hidden_size=192,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=96,
    intermediate_size=64,
    block_rows=7,
    mask_token_id=VOCAB - 1,
    aux_layer_ids=(1, 2, 5),
    target_vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    markov_rank=16,
    rope_theta=1e12,
)


@pytest.fixture(scope="module")
def seeded() -> KimiK3ForTraining:
    torch.manual_seed(0)
    model = KimiK3ForTraining(CONFIG).eval().requires_grad_(False)
    seed_copying(model)
    return model


def repeated_rows(num_rows: int = 8) -> torch.Tensor:
    """Random segments, twice each."""
    segment = torch.randint(0, VOCAB - 1, (num_rows, SEGMENT), generator=torch.Generator().manual_seed(5))
    return torch.cat((segment, segment), 1)


def copy_accuracy(model: KimiK3ForTraining) -> float:
    ids = repeated_rows()
    predicted = model.lm_head(model(ids)[0]).argmax(-1)
    second = slice(SEGMENT + 3, 2 * SEGMENT - 1)
    return float((predicted[:, second] == ids[:, SEGMENT + 4 :]).float().mean())


def test_seeded_model_copies_and_an_unseeded_one_does_not(seeded):
    torch.manual_seed(0)
    assert copy_accuracy(seeded) > 0.3
    assert copy_accuracy(KimiK3ForTraining(CONFIG).eval().requires_grad_(False)) < 0.05


def test_every_lag_can_be_read_at_the_second_tap(seeded):
    ids = torch.randint(0, VOCAB, (16, 128), generator=torch.Generator().manual_seed(1))
    tap = seeded(ids, taps=(1,))[1][0]
    layout, directions = ResidualLayout(192), lag_directions(seeded)
    for lag in LAGS:
        where = layout.lag(lag)
        token = (seeded.embed_tokens.weight @ directions[: where.stop - where.start].T)[ids[:, :-lag]]
        similarity = torch.cosine_similarity(tap[:, lag:, where], token, dim=-1).mean()
        assert similarity > 0.6, (lag, float(similarity))


def test_pinned_lags_survive_an_optimiser_that_moves_everything(seeded):
    model = KimiK3ForTraining(CONFIG)
    model.load_state_dict(seeded.state_dict())
    pinned = PinnedLags(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    pinned.restore()
    lag = ResidualLayout(192).lag(6)
    first, second = list(model.walk())[:2]
    assert torch.equal(first.self_attn.v_conv1d_weight, before["layers.0.self_attn.v_conv1d_weight"])
    assert torch.equal(second.self_attn.o_proj.weight[lag], before["layers.1.self_attn.o_proj.weight"][lag])
    assert not first.mlp.down_proj.weight[lag].any()
    assert not torch.equal(second.self_attn.v_proj.weight[128:], before["layers.1.self_attn.v_proj.weight"][128:])


def test_reseeding_brings_lost_lags_back(seeded):
    model = KimiK3ForTraining(CONFIG).requires_grad_(False)
    model.load_state_dict(seeded.state_dict())
    layer = list(model.walk())[1].self_attn
    torch.nn.init.normal_(layer.o_proj.weight)
    torch.nn.init.normal_(layer.v_conv1d_weight)
    reseed_lags(model, 2.0)
    PinnedLags(model)
    lag = ResidualLayout(192).lag(6)
    wanted = list(seeded.walk())[1].self_attn.o_proj.weight[lag, 64:84]
    torch.testing.assert_close(layer.o_proj.weight[lag, 64:84], wanted)
    assert not layer.o_proj.weight[lag, 84:].any()


@pytest.fixture(scope="module")
def seeded_drafter(seeded) -> DSparkForTraining:
    sample = torch.randint(0, VOCAB - 1, (8, 128), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(1)
    drafter = DSparkForTraining(DRAFTER).requires_grad_(False)
    drafter.lm_head.weight.copy_(seeded.lm_head.weight)
    taps = torch.cat(seeded(sample, taps=DRAFTER.aux_layer_ids)[1], -1)
    seed_drafter(drafter, seeded, torch.arange(VOCAB), sample, taps)
    return drafter


def test_seeded_drafter_copies_five_tokens_ahead(seeded, seeded_drafter):
    assert block_accuracy(seeded_drafter, seeded).min() > 0.7
    unseeded = DSparkForTraining(DRAFTER).requires_grad_(False)
    assert block_accuracy(unseeded, seeded).max() < 0.1


def test_pinned_copying_survives_an_optimiser_that_moves_everything(seeded, seeded_drafter):
    drafter = DSparkForTraining(DRAFTER).requires_grad_(False)
    drafter.load_state_dict(seeded_drafter.state_dict())
    pinned = PinnedCopying(drafter)
    untouched = {name: value.clone() for name, value in drafter.state_dict().items()}
    searching = [drafter.fc, drafter.layers[0].self_attn, drafter.layers[1].self_attn]
    for parameter in (p for module in searching for p in module.parameters()):
        parameter.add_(0.3 * torch.randn_like(parameter))
    second, size = drafter.layers[1].self_attn, DRAFTER.head_dim
    second.o_proj.weight.copy_(untouched["layers.1.self_attn.o_proj.weight"])  # how loud copying is may be learnt
    assert block_accuracy(drafter, seeded).max() < 0.5
    pinned.restore()
    assert not torch.equal(second.q_proj.weight[size:], untouched["layers.1.self_attn.q_proj.weight"][size:])
    drafter.layers[0].self_attn.o_proj.weight[:, 4 * size :] = 0.0  # what the other heads now say
    assert block_accuracy(drafter, seeded).min() > 0.7


def test_a_head_too_narrow_for_the_match_is_refused(seeded):
    drafter = DSparkForTraining(replace(DRAFTER, head_dim=64))
    taps = torch.zeros(1, 16, 3 * 192)
    with pytest.raises(ValueError, match="raise head_dim or rope_theta"):
        seed_drafter(drafter, seeded, torch.arange(VOCAB), torch.zeros(1, 16, dtype=torch.int64), taps)


def block_accuracy(drafter: DSparkForTraining, target: KimiK3ForTraining) -> torch.Tensor:
    """Share of right drafts of the first five rows on repeated segments."""
    ids = repeated_rows()
    anchors = torch.arange(SEGMENT + 8, 2 * SEGMENT - 8, 4).expand(len(ids), -1)
    positions = (anchors.unsqueeze(-1) + torch.arange(1, 8)).flatten(1)
    labels = ids.gather(1, positions)
    inputs = torch.full_like(labels, DRAFTER.mask_token_id).unflatten(1, (-1, 7))
    inputs[..., 0] = ids.gather(1, anchors)
    blocks = Blocks(
        anchors_BA=anchors,
        inputs_BR=inputs.flatten(1),
        labels_BR=labels,
        previous_BR=ids.gather(1, positions - 1),
        weights_BR=torch.ones(labels.shape),
    )
    out = drafter(torch.cat(target(ids, taps=DRAFTER.aux_layer_ids)[1], -1), blocks, target.embed_tokens)
    right = (out.logits_BRV.argmax(-1) == labels).float().unflatten(1, (-1, 7))
    return right.mean((0, 1))[:5]
