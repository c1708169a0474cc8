"""A DSpark drafter in DeepSpec's form on a Qwen3-shaped target: checkpoint files in, equal tokens out.

The target is random with weak layers, so that its next token mostly follows from the last one; the drafter's Markov
head holds that table, on a random body. So drafts stand often enough for acceptance to matter, and fall often enough.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.llm import LLM
from outrider.request import SamplingParams
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

transformers = pytest.importorskip("transformers")

VOCAB, WIDTH, MAX_LEN, LAYERS = 131, 48, 96, 4
RANK = VOCAB + 1  # one column per token, and even
PROMPTS = [list(range(3, 3 + length)) for length in (1, 9, 33)]
SAMPLING = (SamplingParams(max_tokens=40, ignore_eos=True), SamplingParams(max_tokens=24, temperature=0.8, seed=5))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by transformers."""
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=80, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=MAX_LEN, rms_norm_eps=1e-6, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn_like(parameter) * (0.06 if "layers" in name else 1.0))
    path = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Flat keys, with the copies of embedding and head that official checkpoints carry."""
    tensors = load_file(target / "model.safetensors")
    copies = {"embed_tokens.weight": tensors["model.embed_tokens.weight"], "lm_head.weight": tensors["lm_head.weight"]}
    path = tmp_path_factory.mktemp("dspark")
    options = ToyDrafterOptions(
        hidden_size=WIDTH, num_heads=4, num_kv_heads=2, head_dim=24, vocab_size=VOCAB, block_rows=7,
        mask_token_id=VOCAB - 1, num_target_layers=LAYERS, aux_layer_ids=(0, 1, 3), markov_rank=RANK, rope_theta=1e6,
        rms_norm_eps=1e-6,
    )  # fmt: skip
    write_toy_drafter(path, options, copies=copies, dtype=torch.float32)
    weights = load_file(path / "model.safetensors")
    with LLM(target, dtype="float32", max_num_seqs=8, max_model_len=MAX_LEN) as llm:
        one = [llm.generate([[token]], SamplingParams(max_tokens=1, ignore_eos=True))[0] for token in range(VOCAB)]
    w1, w2 = torch.zeros(VOCAB, RANK), torch.zeros(VOCAB, RANK)
    for token, answer in enumerate(one):
        w1[token, token] = 1.0
        w2[answer.token_ids[0], token] = 40.0
    weights |= {"markov_head.markov_w1.weight": w1, "markov_head.markov_w2.weight": w2}
    save_file(weights, path / "model.safetensors")
    return path


def answers(target: Path, drafter: Path | None, dtype: str, seqs: int, num_drafts: int = 7) -> list[tuple[Any, ...]]:
    # A number, not "auto", which may find that none pays here.
    llm = LLM(
        target,
        drafter,
        speculation=num_drafts if drafter else "off",
        dtype=dtype,
        max_num_seqs=seqs,
        max_model_len=MAX_LEN,
    )
    outputs = [output for sampling in SAMPLING for output in llm.generate(PROMPTS, sampling)]
    metrics = llm.engine.metrics
    if drafter is None:
        assert metrics.num_drafted == 0
    else:
        assert 0 < metrics.num_accepted < metrics.num_drafted
        assert metrics.accepted_length > 1.5
    return [(output.token_ids, output.finish_reason) for output in outputs]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_drafts_change_no_token(target: Path, drafter: Path, dtype: str) -> None:
    plain = answers(target, None, dtype, 1)
    assert len({token for token_ids, _ in plain for token in token_ids}) > 10
    assert answers(target, drafter, dtype, 1) == plain
    assert answers(target, drafter, dtype, 3) == plain
    assert answers(target, drafter, dtype, 2, num_drafts=3) == plain


def test_a_drafter_of_another_target_is_named(target: Path, drafter: Path, tmp_path: Path) -> None:
    weights = load_file(drafter / "model.safetensors")
    weights["embed_tokens.weight"][0, 0] += 1
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((drafter / "config.json").read_text())
    with pytest.raises(ValueError, match=r"'embed_tokens.weight' differs from the target's table"):
        LLM(target, tmp_path, dtype="float32", max_model_len=MAX_LEN)
