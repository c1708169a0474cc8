"""The training form of DSpark drafts what the served drafter drafts."""

import json

import torch
from torch import nn

from outrider.models.dspark.config_json import parse_config
from outrider.testing.reference_dspark import ReferenceDSpark, ReferenceShape
from outrider.training.dspark import Blocks, DrafterConfig, DSparkForTraining, block_mask
from outrider.training.export import drafter_config, read_drafter, write_drafter
from outrider.training.losses import drafter_losses

CONFIG = DrafterConfig(
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=40,
    block_rows=4,
    mask_token_id=50,
    aux_layer_ids=(0, 2),
    target_vocab_size=53,
    draft_vocab_size=31,
    markov_rank=8,
)


def reference(model: DSparkForTraining, embed: nn.Embedding, draft_ids: torch.Tensor) -> ReferenceDSpark:
    """The literal drafter on the same weights."""
    shape = ReferenceShape(
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        eps=1e-5,
        block_rows=4,
        first_row=0,
        mask_token_id=50,
        rope_theta=10000.0,
    )
    weights = {name: value.double() for name, value in model.state_dict().items()}
    weights["d2t"] = draft_ids - torch.arange(len(draft_ids))
    return ReferenceDSpark(weights, shape, embed.weight.detach(), weights["lm_head.weight"])


def test_block_of_an_anchor_equals_the_literal_drafter():
    torch.manual_seed(5)
    model, embed = DSparkForTraining(CONFIG), nn.Embedding(53, 24)
    with torch.no_grad():
        model.confidence_head.proj.weight.normal_(std=0.3)
        model.markov_head.markov_w1.weight.normal_()
    draft_ids = torch.randperm(53)[:31].sort().values
    taps, ids = torch.randn(1, 12, 2, 24), torch.randint(0, 50, (1, 12))
    literal = reference(model, embed, draft_ids)
    for anchor in (1, 7):
        context = literal.new_context()
        literal.observe(context, [list(row.double()) for row in taps[0, :anchor]])
        draft = literal.draft(context, int(ids[0, anchor]))
        drafted = torch.tensor(draft.token_ids)
        previous = torch.cat((ids[0, anchor : anchor + 1], drafted[:-1]))
        inputs = torch.full((4,), 50)
        inputs[0] = ids[0, anchor]
        blocks = Blocks(
            anchors_BA=torch.tensor([[anchor]]),
            inputs_BR=inputs[None],
            labels_BR=drafted[None],
            previous_BR=previous[None],
            weights_BR=torch.ones(1, 4),
        )
        out = model(taps.flatten(2), blocks, embed)
        assert torch.equal(draft_ids[out.logits_BRV[0].argmax(-1)], drafted)
        assert (torch.sigmoid(out.confidence_BR[0]) - torch.tensor(draft.confidence)).abs().max() < 1e-4


def test_blocks_see_their_past_and_themselves_only():
    mask = block_mask(torch.tensor([[0, 3]]), 5, 2)[0, 0]
    assert mask[:2, :5].sum() == 0 and mask[2:, :5].sum() == 2 * 3
    assert torch.equal(mask[:, 5:], torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]).bool())


def test_losses_of_a_perfect_and_of_an_impossible_drafter():
    logits = torch.randn(3, 5)
    teacher = torch.softmax(logits, -1)
    perfect = drafter_losses(logits, torch.zeros(3), teacher, torch.tensor([0, 1, -1]), torch.ones(3))
    assert perfect.distance < 1e-6 and torch.allclose(perfect.overlap_N, torch.ones(3))
    # All of the target's mass lies outside the draft vocabulary: the distance is the whole 2.
    impossible = drafter_losses(logits, torch.zeros(3), torch.zeros(3, 5), torch.full((3,), -1), torch.ones(3))
    assert torch.allclose(impossible.distance, torch.tensor(2.0)) and impossible.overlap_N.max() < 1e-6


def test_exported_drafter_reads_back(tmp_path):
    model = DSparkForTraining(CONFIG)
    config = drafter_config(CONFIG, target_name="toy", num_target_layers=4, max_positions=64)
    write_drafter(model, torch.arange(31), tmp_path, config=config)
    again = DSparkForTraining(CONFIG)
    assert torch.equal(read_drafter(again, tmp_path), torch.arange(31))
    assert all(
        torch.equal(value.bfloat16(), again.state_dict()[name].bfloat16()) for name, value in model.state_dict().items()
    )
    parsed = parse_config(json.loads((tmp_path / "config.json").read_text()))
    assert parsed.aux_layer_ids == (0, 2) and parsed.num_block_rows == 4 and parsed.draft_vocab_size == 31
