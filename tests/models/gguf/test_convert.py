"""GGUF files written by the ``gguf`` package itself, imported and compared with what went in."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from outrider.errors import CheckpointError, UnsupportedError
from outrider.models.gguf.convert import import_gguf
from outrider.tokenizer import load_tokenizer
from outrider.tokenizer.hf import byte_level_alphabet

WIDTH, INNER, HEADS, KEY_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
MERGES = ["Ġ t", "h e", "Ġt he"]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_level_alphabet(), "Ġt", "he", "Ġthe"]
KINDS = [3] * 3 + [1] * (len(TOKENS) - 3)

ARRAYS = {
    "token_embd": (len(TOKENS), WIDTH),
    "output_norm": (WIDTH,),
    **{
        f"blk.{i}.{name}": shape
        for i in range(LAYERS)
        for name, shape in {
            "attn_norm": (WIDTH,),
            "attn_q": (HEADS * HEAD_DIM, WIDTH),
            "attn_k": (KEY_HEADS * HEAD_DIM, WIDTH),
            "attn_v": (KEY_HEADS * HEAD_DIM, WIDTH),
            "attn_output": (WIDTH, HEADS * HEAD_DIM),
            "ffn_norm": (WIDTH,),
            "ffn_gate": (INNER, WIDTH),
            "ffn_up": (INNER, WIDTH),
            "ffn_down": (WIDTH, INNER),
        }.items()
    },
}


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {f"{name}.weight": draw.standard_normal(shape).astype(np.float32) for name, shape in ARRAYS.items()}


def write(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    kind: str = "F32",
    family: str = "llama",
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """A file with matrices stored as ``kind``; ``fields`` replaces or, with None, leaves out a field."""
    writer = gguf.GGUFWriter(path, family)
    values: dict[str, Any] = {
        f"{family}.block_count": LAYERS,
        f"{family}.context_length": 128,
        f"{family}.embedding_length": WIDTH,
        f"{family}.feed_forward_length": INNER,
        f"{family}.attention.head_count": HEADS,
        f"{family}.attention.head_count_kv": KEY_HEADS,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{family}.rope.freq_base": 100_000.0,
        f"{family}.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
        **(fields or {}),
    }
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for name, value in values.items():
        if value is not None:
            adders[type(value)](name, value)
    for name, array in tensors.items():
        stored = gguf.GGMLQuantizationType[kind] if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_block(kind: str, block: bytes) -> np.ndarray:
    """32 values of a block, from the format's description alone."""
    if kind == "Q8_0":
        return np.frombuffer(block[:2], np.float16).astype(np.float32) * np.frombuffer(block[2:], np.int8)
    scales, packed = (4, block[4:]) if kind == "Q4_1" else (2, block[2:])
    numbers = np.frombuffer(block[:scales], np.float16).astype(np.float32)
    bits = np.frombuffer(packed, np.uint8)
    codes = np.concatenate([bits & 15, bits >> 4]).astype(np.float32)
    return codes * numbers[0] + numbers[1] if kind == "Q4_1" else (codes - 8) * numbers[0]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_every_storage_type_gives_the_value_of_its_format(tmp_path: Path, kind: str) -> None:
    tensors = arrays()
    import_gguf(write(tmp_path / "m.gguf", tensors, kind=kind), tmp_path / "out", dtype=torch.float32)
    found = load_file(tmp_path / "out" / "model.safetensors")
    weight = tensors["blk.1.ffn_down.weight"]
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if kind in plain:
        expected = torch.from_numpy(weight).to(plain[kind]).float()
    else:
        stored = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
        size = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[kind]
        blocks = np.split(stored.reshape(-1), stored.size // size)
        expected = torch.from_numpy(np.concatenate([read_block(kind, b.tobytes()) for b in blocks])).view(weight.shape)
    assert torch.equal(found["model.layers.1.mlp.down_proj.weight"], expected)
    assert torch.equal(found["model.norm.weight"], torch.from_numpy(tensors["output_norm.weight"]))
    rounded = tmp_path / "rounded"
    import_gguf(tmp_path / "m.gguf", rounded)
    assert torch.equal(
        load_file(rounded / "model.safetensors")["model.layers.1.mlp.down_proj.weight"], expected.bfloat16()
    )


def test_queries_and_keys_keep_their_scores_under_the_other_rotation(tmp_path: Path) -> None:
    """The file rotates neighbours, the Hugging Face form halves; the scores of any two positions must agree."""
    tensors = arrays()
    import_gguf(write(tmp_path / "m.gguf", tensors), tmp_path / "out", dtype=torch.float32)
    found = load_file(tmp_path / "out" / "model.safetensors")
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    angles = 7.0 * 100_000.0 ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)

    def rotate(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        a, b = rows[..., first], rows[..., second]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

    pairs, half = torch.arange(0, HEAD_DIM, 2), torch.arange(HEAD_DIM // 2)
    scores = []
    for q, k, first, second in (
        (tensors["blk.0.attn_q.weight"], tensors["blk.0.attn_k.weight"], pairs, pairs + 1),
        (
            found["model.layers.0.self_attn.q_proj.weight"],
            found["model.layers.0.self_attn.k_proj.weight"],
            half,
            half + HEAD_DIM // 2,
        ),
    ):
        query = (torch.as_tensor(q).double() @ x[0]).view(HEADS, HEAD_DIM)
        key = (torch.as_tensor(k).double() @ x[1]).view(KEY_HEADS, HEAD_DIM).repeat_interleave(HEADS // KEY_HEADS, 0)
        still = torch.cat([query[:, first], query[:, second]], -1)
        scores.append((still * rotate(key, first, second)).sum(-1))
    assert torch.allclose(scores[0], scores[1], rtol=0, atol=1e-9)


def test_config_and_tokenizer(tmp_path: Path) -> None:
    import_gguf(write(tmp_path / "m.gguf", arrays()), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        "model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "head_dim": HEAD_DIM,
        "num_key_value_heads": KEY_HEADS, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0, "tie_word_embeddings": True,
        "vocab_size": len(TOKENS), "max_position_embeddings": 128, "eos_token_id": 2, "dtype": "bfloat16",
    }  # fmt: skip
    assert config.items() >= expected.items()
    tokenizer = load_tokenizer(tmp_path / "out")
    the = TOKENS.index("Ġthe")
    assert tokenizer.encode("a the") == [TOKENS.index("a"), the]
    assert tokenizer.encode("12") == [TOKENS.index("1"), TOKENS.index("2")]
    assert tokenizer.stop_token_ids == {2}
    newline = TOKENS.index("Ċ")
    rendered = tokenizer.render_chat([{"role": "user", "content": " the"}])
    user = [TOKENS.index(c) for c in "user"]
    assert rendered == [1, *user, newline, the, 2, newline]


def test_an_own_head_is_kept_apart(tmp_path: Path) -> None:
    tensors = arrays() | {"output.weight": np.ones((len(TOKENS), WIDTH), np.float32)}
    import_gguf(write(tmp_path / "m.gguf", tensors), tmp_path / "out")
    assert "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": {"blk.0.attn_q.weight": None}}, "no tensor for model.layers.0.self_attn.q_proj"),
        ({"tensors": {"blk.9.attn_q.weight": np.zeros((64, 64), np.float32)}}, "blk.9.attn_q.weight.*no place"),
        ({"tensors": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, "blk.0.attn_q.bias.*no place"),
        ({"tensors": {"blk.0.ffn_up.weight": np.zeros((32, 64), np.float32)}}, r"ffn_up.*\(32, 64\).*\(96, 64\)"),
        ({"fields": {"llama.block_count": None}}, "no field llama.block_count"),
        ({"fields": {"llama.embedding_length": "wide"}}, "embedding_length='wide'"),
        ({"fields": {"llama.rope.dimension_count": 8}}, "16 with 8 rotated"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "scales its rotary"),
        ({"fields": {"tokenizer.ggml.pre": "deepseek-llm"}}, "pre-tokenizer 'deepseek-llm'"),
        ({"fields": {"tokenizer.ggml.model": "llama"}}, "tokenizer model 'llama'"),
        ({"fields": {"tokenizer.ggml.token_type": [1, 2]}}, "with 2 kinds"),
        ({"fields": {"tokenizer.ggml.eos_token_id": 9999}}, "eos token id 9999"),
        ({"family": "gemma"}, "architecture 'gemma'"),
        ({"kind": "Q5_0"}, "stored as Q5_0"),
    ],
)
def test_what_cannot_be_imported_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    tensors = {name: array for name, array in (arrays() | change.pop("tensors", {})).items() if array is not None}
    path = write(tmp_path / "m.gguf", tensors, **change)
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        import_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_files_are_named_errors(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf", arrays()).read_bytes()
    draw = np.random.default_rng(1)
    refused = 0
    for turn in range(120):
        damaged = bytearray(whole)
        if turn % 2:
            damaged = damaged[: int(draw.integers(0, len(whole)))]
        else:
            for place in draw.integers(0, 6000, size=8):
                damaged[int(place)] = int(draw.integers(0, 256))
        path, out = tmp_path / "damaged.gguf", tmp_path / f"out{turn}"
        path.write_bytes(bytes(damaged))
        try:
            import_gguf(path, out)
        except (CheckpointError, UnsupportedError) as error:
            refused += 1
            assert "damaged.gguf" in str(error)
            assert not out.exists()
    assert refused >= 60  # every cut one, at least


def test_an_existing_directory_is_never_overwritten(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", arrays())
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists; choose another"):
        import_gguf(path, tmp_path / "out")
