"""Lockstep generation against the training form, and its seats."""

import pytest
import torch

from outrider.training.kimi_k3 import KimiK3ForTraining
from outrider.training.layers import TrainConfig
from outrider.training.lockstep import LockstepModel, answer_all

TINY = TrainConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=4,
    mla_layers=(2, 3),
    attn_res_block_size=2,
    kda_heads=2,
    kda_head_dim=16,
    mla_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    dense_intermediate=32,
    num_experts=4,
    experts_per_token=2,
    moe_intermediate=32,
    latent_size=32,
    num_shared_experts=1,
)


@pytest.fixture(scope="module")
def model() -> KimiK3ForTraining:
    torch.manual_seed(3)
    model = KimiK3ForTraining(TINY).eval()
    for layer in model.walk():  # mixes that are not uniform
        torch.nn.init.normal_(layer.self_attention_res.proj)
        torch.nn.init.normal_(layer.mlp_res.proj)
    return model


@torch.no_grad()
def test_step_equals_the_whole_sequence_at_once(model: KimiK3ForTraining) -> None:
    ids = torch.randint(0, 64, (3, 32))
    whole = model.lm_head(model(ids)[0])
    lockstep = LockstepModel(model, 3, 32)
    steps = torch.stack([lockstep.step(ids[:, i]) for i in range(32)], 1)
    torch.testing.assert_close(steps, whole, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_answers_are_greedy_continuations_in_any_seat(model: KimiK3ForTraining) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [(torch.randint(0, 64, (size,)).tolist(), 0.0) for size in (3, 9, 1, 5, 7)]
    answers = {
        a.index: a
        for a in answer_all(LockstepModel(model, 2, 32), prompts, max_tokens=8, stop_ids=(5,), generator=generator)
    }
    assert sorted(answers) == [0, 1, 2, 3, 4]
    for index, (prompt, _) in enumerate(prompts):
        ids = list(prompt)
        for token in answers[index].token_ids:
            padded = torch.tensor([ids + [0] * (32 - len(ids))])
            assert model.lm_head(model(padded)[0])[0, len(ids) - 1].argmax() == token
            ids.append(token)
        assert (answers[index].stop_id == 5) == (len(answers[index].token_ids) < 8)


def test_temperature_follows_the_distribution(model: KimiK3ForTraining) -> None:
    generator = torch.Generator().manual_seed(2)
    lockstep = LockstepModel(model, 50, 8)
    answers = answer_all(lockstep, [([3], 1.0)] * 2000, max_tokens=1, stop_ids=(), generator=generator)
    counts = torch.zeros(64)
    for answer in answers:
        counts[answer.token_ids[0]] += 1
    with torch.no_grad():
        padded = torch.tensor([[3] + [0] * 15])
        expected = 2000 * model.lm_head(model(padded)[0])[0, 0].softmax(-1)
    assert float(((counts - expected).square() / expected).sum()) < 120  # 63 degrees of freedom, p < 2e-5


def test_a_prompt_that_leaves_no_room_is_refused(model: KimiK3ForTraining) -> None:
    lockstep = LockstepModel(model, 1, 16)
    with pytest.raises(ValueError, match="prompt of 12 tokens and 8 outputs exceed 16"):
        list(answer_all(lockstep, [([1] * 12, 0.0)], max_tokens=8, stop_ids=(), generator=torch.Generator()))
