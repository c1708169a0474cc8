"""Turns a GGUF file of the Llama family into a checkpoint directory: config, weights, tokenizer, chat template.

Weights are rounded once, from the float32 value of the stored form to the dtype asked for.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.errors import CheckpointError, UnsupportedError
from outrider.models.gguf.file import GgufFile
from outrider.models.gguf.tokenizer import tokenizer_documents

__all__ = ["import_gguf"]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Tensors outside and inside the layers, and what the Hugging Face form calls them.
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def import_gguf(
    source: Path, out: Path, *, dtype: torch.dtype = torch.bfloat16, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write the checkpoint of a file into a new directory, which appears whole or not at all.

    Args:
        source: the ``.gguf`` file.
        out: directory to make; it must not exist.
        dtype: of the weights written.
        progress: called with (bytes of the file read, bytes in total).

    Raises:
        UnsupportedError: architecture, storage type or tokenizer are not imported.
        CheckpointError: the file is damaged, ``out`` exists or cannot be written.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists; choose another directory or remove it")
    file = GgufFile(source)
    config = _config(file, dtype)
    tokenizer, tokenizer_config = tokenizer_documents(file, context=config["max_position_embeddings"])
    num_done, num_bytes = 0, sum(map(file.num_bytes, file.tensor_names))
    tensors: dict[str, torch.Tensor] = {}
    for stored_name, (name, tensor) in zip(file.tensor_names, _tensors(file, config, dtype), strict=True):
        tensors[name] = tensor
        num_done += file.num_bytes(stored_name)
        if progress is not None:
            progress(num_done, num_bytes)
    documents: dict[str, dict[str, Any]] = {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config},
    }
    _write(out, documents, tensors)


def _config(file: GgufFile, dtype: torch.dtype) -> dict[str, Any]:
    """``config.json`` of the Hugging Face form."""
    family = file.text("general.architecture")
    if family not in ARCHITECTURES:
        raise UnsupportedError(
            f"{file.path.name}: architecture {family!r} is not imported; {', '.join(ARCHITECTURES)} are"
        )
    if "rope_freqs.weight" in file.tensor_names or file.has(f"{family}.rope.scaling.type"):
        raise UnsupportedError(
            f"{file.path.name} scales its rotary embedding, which is not imported; use the checkpoint in the "
            "Hugging Face form"
        )
    heads, width = file.integer(f"{family}.attention.head_count"), file.integer(f"{family}.embedding_length")
    head_dim = file.integer(f"{family}.attention.key_length", width // heads)
    rotated = file.integer(f"{family}.rope.dimension_count", head_dim)
    values = file.integer(f"{family}.attention.value_length", head_dim)
    if rotated != head_dim or values != head_dim:
        raise UnsupportedError(
            f"{file.path.name}: heads of {head_dim} with {rotated} rotated dims and values of {values} are not "
            "imported; all three must be equal"
        )
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": width,
        "intermediate_size": file.integer(f"{family}.feed_forward_length"),
        "num_hidden_layers": file.integer(f"{family}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer(f"{family}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _short(file.number(f"{family}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(file.number(f"{family}.rope.freq_base", 10_000.0)),
        "rope_scaling": None,
        "max_position_embeddings": file.integer(f"{family}.context_length"),
        "vocab_size": file.shape("token_embd.weight")[0] if "token_embd.weight" in file.tensor_names else 0,
        "tie_word_embeddings": "output.weight" not in file.tensor_names,
        "attention_bias": False,
        "mlp_bias": False,
    }
    for name in ("bos", "eos"):
        token_id = file.token_id(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None:
            config[f"{name}_token_id"] = token_id
    return config


def _short(stored: float) -> float:
    """The shortest decimal that rounds to a float32: 9.99e-06 in the file was 1e-05 in the config it came from."""
    return float(str(torch.tensor(stored, dtype=torch.float32).numpy()))


def _tensors(file: GgufFile, config: Mapping[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of the Hugging Face form; every tensor of the file is used once, every one expected is there."""
    expected = _expected_shapes(config)
    for stored_name in file.tensor_names:
        name = _name(stored_name)
        if name is None or name not in expected:
            raise CheckpointError(
                f"{file.path.name}: tensor {stored_name!r} has no place in a {config['model_type']} model of "
                f"{config['num_hidden_layers']} layers"
            )
        shape = expected.pop(name)
        if file.shape(stored_name) != shape:
            raise CheckpointError(
                f"{file.path.name}: tensor {stored_name!r} has shape {file.shape(stored_name)}, its config says {shape}"
            )
        tensor = file.tensor(stored_name, dtype)
        if config["model_type"] == "llama" and (num_heads := _interleaved_heads(name, config)):
            tensor = _halves(tensor, num_heads)
        yield name, tensor
    if expected:
        raise CheckpointError(f"{file.path.name} has no tensor for {min(expected)}; download it again")


def _name(stored_name: str) -> str | None:
    """What the Hugging Face form calls a tensor; None when it knows none."""
    if stored_name.count(".") == 1 and stored_name.endswith(".weight"):
        outer = OUTER.get(stored_name.removesuffix(".weight"))
        return None if outer is None else f"{outer}.weight"
    parts = stored_name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or not parts[1].isdecimal() or parts[3] != "weight":
        return None
    inner = INNER.get(parts[2])
    return None if inner is None else f"model.layers.{int(parts[1])}.{inner}.weight"


def _expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer = {
        "attn_norm": (width,),
        "attn_q": (queries, width),
        "attn_k": (keys, width),
        "attn_v": (keys, width),
        "attn_output": (width, queries),
        "ffn_norm": (width,),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    if config["model_type"] == "qwen3":
        layer |= {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{i}.{INNER[part]}.weight": shape
        for i in range(config["num_hidden_layers"])
        for part, shape in layer.items()
    }
    shapes["model.embed_tokens.weight"] = (config["vocab_size"], width)
    shapes["model.norm.weight"] = (width,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    return shapes


def _interleaved_heads(name: str, config: Mapping[str, Any]) -> int:
    """Heads of a tensor whose rows the format orders for rotation of neighbours; 0 for all others."""
    if name.endswith("q_proj.weight"):
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if name.endswith("k_proj.weight") else 0


def _halves(weight_OI: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from pairs (0, 1), (2, 3), ... to halves: the Hugging Face form rotates row i with i + d/2."""
    paired = weight_OI.unflatten(0, (num_heads, -1, 2))
    return paired.transpose(1, 2).reshape(weight_OI.shape)


def _write(out: Path, documents: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
            made = Path(temporary) / "checkpoint"
            made.mkdir()
            for name, document in documents.items():
                text = json.dumps(document, indent=None if name == "tokenizer.json" else 2, ensure_ascii=False)
                (made / name).write_text(text + "\n", encoding="utf-8")
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()},
                made / "model.safetensors",
                metadata={"format": "pt"},
            )
            if not out.exists():
                os.rename(made, out)
    except OSError as error:
        if not out.is_dir():  # another process was faster: what it made is the same
            raise CheckpointError(f"{out} cannot be written ({error.strerror})") from error
