"""Llama- and Qwen3-shaped random checkpoints against transformers, and against themselves in other company."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import CheckpointError, ConfigError, UnsupportedError
from outrider.models.llama.config import parse_config
from outrider.models.llama.model import LlamaModel
from outrider.models.registry import load_target
from outrider.testing.driver import Driver, Span
from outrider.testing.scripted import ScriptedDrafter, oracle, random_drafts
from outrider.testing.workbench import Company, Workbench, ask, unequal

transformers = pytest.importorskip("transformers")

VOCAB, MAX_LEN = 131, 96
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 24}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}
PLAIN = {"rope_type": "default", "rope_theta": 1000.0}


def llama(**changes: Any) -> Any:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "rope_parameters": PLAIN}
    return transformers.LlamaConfig(**{**SIZES, **heads, **changes})


def qwen3(**changes: Any) -> Any:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "rope_parameters": PLAIN}
    return transformers.Qwen3Config(**{**SIZES, **heads, **changes})


SHAPES: dict[str, Callable[[], Any]] = {
    "llama 3": lambda: llama(num_key_value_heads=1, rope_parameters=LLAMA3),
    "smollm2": lambda: llama(num_attention_heads=3, num_key_value_heads=3, tie_word_embeddings=True),
    "qwen3": qwen3,
    "qwen3 tied, yarn": lambda: qwen3(tie_word_embeddings=True, rope_parameters=YARN),
    "linear": lambda: llama(rope_parameters=LINEAR),
}


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint that transformers wrote, and its model in float64."""
    torch.manual_seed(7)
    config = SHAPES[request.param]()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms away from one and matrices large enough for positions to matter.
            scale = 1.0 if "norm" in name else 0.15
            parameter.copy_(torch.randn_like(parameter) * scale + (1.0 if "norm" in name else 0.0))
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(path)
    return path, model


def prompts(seed: int = 0) -> list[tuple[int, ...]]:
    dice = random.Random(seed)
    return [tuple(dice.randrange(3, VOCAB) for _ in range(length)) for length in (1, 7, 33, 64)]


@torch.no_grad()
def test_logits_in_float64_whatever_the_cut(pair: tuple[Path, Any]) -> None:
    """Prompts whole, in odd pieces, and stepped; transformers keeps norms and softmax in float32, hence 1e-5."""
    path, reference = pair
    model = load_target(path, dtype=torch.float64)
    for slot, ids in enumerate(prompts()):
        expected = reference(torch.tensor([ids])).logits[0]
        driver = Driver(model=model, max_tokens=MAX_LEN)
        whole = driver.forward([Span(slot=slot, token_ids=ids, is_prompt=True)]).logits_NV
        spread = float(expected.std())
        assert float((whole - expected).abs().max()) < 1e-5 * max(spread, 1.0)
        cut = len(ids) * 2 // 3
        parts = [Driver(model=model, max_tokens=MAX_LEN)] * 3
        pieces = [
            part.forward([Span(slot=0, token_ids=piece, is_prompt=True)]).logits_NV
            for part, piece in zip(parts, (ids[:cut], ids[cut : cut + 1], ids[cut + 1 :]), strict=True)
            if piece
        ]
        assert torch.equal(torch.cat(pieces), whole)


@torch.no_grad()
def test_greedy_tokens_equal_those_of_transformers(pair: tuple[Path, Any]) -> None:
    path, reference = pair
    bench = Workbench(load_target(path, dtype=torch.float64), max_model_len=MAX_LEN)
    asked = [ask(f"r{index}", ids, 20) for index, ids in enumerate(prompts(1))]
    trace = bench.run(asked, company=Company(seqs=3))
    for request in asked:
        ids = torch.tensor([request.prompt_token_ids])
        limit = min(20, MAX_LEN - ids.shape[1])
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False, eos_token_id=None
        )
        assert trace.token_ids[request.request_id] == tuple(out[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_bits_depend_on_nothing_but_the_sequence(pair: tuple[Path, Any], dtype: torch.dtype) -> None:
    """Alone and plain, against company, drafts and split rounds: equal tokens, logits and cached rows."""
    bench = Workbench(load_target(pair[0], dtype=dtype), max_model_len=MAX_LEN)
    asked = [ask(f"r{index}", ids, 12) for index, ids in enumerate(prompts(2))]
    names = [request.request_id for request in asked]
    alone = bench.run(asked)
    right = oracle([(*r.prompt_token_ids, *alone.token_ids[r.request_id]) for r in asked])
    for seed, company in enumerate((Company(seqs=4), Company(seqs=3, step_rows=16, prefill_tokens=11))):
        drafter = ScriptedDrafter(7, random_drafts(right, VOCAB, 0.7, seed=seed))
        assert not unequal(bench.run(asked, drafter, company), alone, names)


def test_taps_are_the_streams_between_layers(pair: tuple[Path, Any]) -> None:
    path, reference = pair
    model = load_target(path, dtype=torch.float64)
    assert isinstance(model, LlamaModel)
    (ids,) = prompts(3)[2:3]
    with torch.no_grad():
        streams = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
    model.set_aux_layers((1, -1, 0), "prefix")
    taps = Driver(model=model, max_tokens=MAX_LEN).forward([Span(slot=0, token_ids=ids, is_prompt=True)])
    assert taps.aux_hidden_TAD is not None
    for found, layer in zip(taps.aux_hidden_TAD.unbind(1), (1, -1, 0), strict=True):
        assert torch.allclose(found, streams[layer + 1][0], rtol=0, atol=1e-4)
    with pytest.raises(ConfigError, match="aux layer id 3 is outside"):
        model.set_aux_layers((3,), "prefix")
    with pytest.raises(ConfigError, match="given twice"):
        model.set_aux_layers((1, 1), "prefix")


RAW = {
    "model_type": "llama", "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 96,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_size": None}, ConfigError, "hidden_size is missing"),
        ({"num_key_value_heads": 4}, ConfigError, "no multiple of num_key_value_heads=4"),
        ({"hidden_size": 50}, ConfigError, "state head_dim"),
        ({"head_dim": 7}, ConfigError, "head_dim=7 is odd"),
        ({"num_hidden_layers": 10**6}, ConfigError, "exceeds 1000"),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act='gelu'"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias=true"),
        ({"use_sliding_window": True}, UnsupportedError, "use_sliding_window=true"),
        ({"layer_types": ["sliding_attention"] * 3}, UnsupportedError, "layer_types"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, UnsupportedError, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, ConfigError, "rope_scaling.factor is missing"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, ConfigError, "must exceed"),
        ({"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}, UnsupportedError, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedError, "quantization_config"),
        ({"rms_norm_eps": 0}, ConfigError, "rms_norm_eps=0"),
    ],
)
def test_refused_configs(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    parse_config(dict(RAW))
    with pytest.raises(error, match=message):
        parse_config({**RAW, **changes})


def test_a_tied_checkpoint_may_repeat_its_head_but_not_contradict_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    torch.manual_seed(1)
    transformers.LlamaForCausalLM(llama(tie_word_embeddings=True)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, file)
    assert isinstance(load_target(tmp_path, dtype=torch.float32), LlamaModel)
    head[3, 3] += 1
    save_file({**tensors, "lm_head.weight": head}, file)
    with pytest.raises(CheckpointError, match=r"lm_head.weight' differs from .* tie_word_embeddings"):
        load_target(tmp_path, dtype=torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    load_target(tmp_path, dtype=torch.float32)
    with pytest.raises(ConfigError, match="experts='packed'"):
        load_target(tmp_path, dtype=torch.float32, experts="packed")
