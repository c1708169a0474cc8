"""Seeded toy checkpoints on disk, in the form of the release: every tensor kind, tiny numbers.

The wrapper config, the ``language_model.`` names, the shards with an index, MXFP4 expert pairs, fp32
parameters and the zero-padded ``A_log`` are all as in the real files, so the real loader reads them.
"""

import base64
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.models.kimi_k3.checkpoint import text_tensors
from outrider.models.kimi_k3.config import KimiK3Config, parse_config
from outrider.models.shards import INDEX_NAME

__all__ = [
    "ToyOptions",
    "deep_toy",
    "kimi_linear_toy",
    "release_tensors",
    "toy_config",
    "toy_tensors",
    "unquantized",
    "write_byte_tokenizer",
    "write_tensors",
    "write_toy_checkpoint",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyOptions:
    """Numbers and variants of a toy; the defaults have every K3 feature on."""

    wrapped: bool = True
    num_layers: int = 8
    mla_layers: tuple[int, ...] = (3, 6, 7)  # 0-based; the last two, as in K3
    vocab_size: int = 97
    hidden_size: int = 64
    intermediate_size: int = 96
    attn_res_block_size: int | None = 3
    kda_heads: int = 3  # fewer heads than head_dim: A_log is stored padded; inner != hidden
    kda_head_dim: int = 16
    full_rank_gate: bool = True
    gate_lower_bound: float | None = -5.0
    mla_heads: int = 4
    q_lora_rank: int | None = 24
    kv_lora_rank: int = 32
    nope_head_dim: int = 16
    rope_head_dim: int = 8
    v_head_dim: int = 12
    mla_output_gate: bool = True
    mla_lora_norm_eps: float | None = None  # None: the key is left out
    activation: str = "situ"
    num_experts: int = 8
    experts_per_token: int = 2
    moe_intermediate_size: int = 32
    latent_size: int | None = 32
    latent_norm: bool = True
    num_shared_experts: int = 2
    routed_scaling_factor: float = 1.0
    quantized: bool = True
    dtype: torch.dtype = torch.bfloat16  # storage of the unquantised weights
    num_shards: int = 3
    vision_tensors: bool = False


def deep_toy() -> ToyOptions:
    """The CPU recipe of spec-round section 3: 14 layers, so four snapshots exist and L % block != 0."""
    return ToyOptions(
        num_layers=14,
        mla_layers=(3, 7, 11, 13),
        vocab_size=257,
        attn_res_block_size=4,
        kda_heads=4,
        rope_head_dim=8,
        v_head_dim=16,
    )


def kimi_linear_toy() -> ToyOptions:
    """The Kimi-Linear variant: no attention residuals, latent, SiTU or MLA gate; softplus decay."""
    return ToyOptions(
        wrapped=False,
        num_layers=4,
        mla_layers=(3,),
        attn_res_block_size=None,
        full_rank_gate=False,
        gate_lower_bound=None,
        q_lora_rank=None,
        mla_output_gate=False,
        activation="silu",
        latent_size=None,
        latent_norm=False,
        num_shared_experts=1,
        routed_scaling_factor=2.446,
        quantized=False,
        dtype=torch.float32,
        num_shards=1,
    )


def _quantization_config() -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": weights}},
    }


def _linear_attn_config(options: ToyOptions) -> dict[str, Any]:
    config: dict[str, Any] = {
        "num_heads": options.kda_heads,
        "head_dim": options.kda_head_dim,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": options.full_rank_gate,
        "kda_layers": [i + 1 for i in range(options.num_layers) if i not in options.mla_layers],
        "full_attn_layers": [i + 1 for i in options.mla_layers],
    }
    if options.gate_lower_bound is not None:
        config["gate_lower_bound"] = options.gate_lower_bound
    return config


def _mla_fields(options: ToyOptions) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "num_attention_heads": options.mla_heads,
        "num_key_value_heads": options.mla_heads,
        "q_lora_rank": options.q_lora_rank,
        "kv_lora_rank": options.kv_lora_rank,
        "qk_nope_head_dim": options.nope_head_dim,
        "qk_rope_head_dim": options.rope_head_dim,
        "v_head_dim": options.v_head_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": options.mla_output_gate,
    }
    if options.mla_lora_norm_eps is not None:
        fields["mla_lora_norm_eps"] = options.mla_lora_norm_eps
    return fields


def _moe_fields(options: ToyOptions) -> dict[str, Any]:
    return {
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": options.num_experts,
        "num_experts_per_token": options.experts_per_token,
        "num_shared_experts": options.num_shared_experts,
        "moe_intermediate_size": options.moe_intermediate_size,
        "routed_expert_hidden_size": options.latent_size,
        "latent_moe_use_norm": options.latent_norm,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": options.routed_scaling_factor,
    }


def toy_config(options: ToyOptions) -> dict[str, Any]:
    """``config.json`` of the toy, wrapper or bare."""
    text: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_size": options.hidden_size,
        "vocab_size": options.vocab_size,
        "num_hidden_layers": options.num_layers,
        "max_position_embeddings": 4096,
        "intermediate_size": options.intermediate_size,
        "hidden_act": options.activation,
        "rms_norm_eps": 1e-5,
        "attn_res_block_size": options.attn_res_block_size,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": _linear_attn_config(options),
        **_mla_fields(options),
        **_moe_fields(options),
    }
    if options.activation == "situ":
        text |= {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    if options.quantized:
        text["quantization_config"] = _quantization_config()
    special = {"bos_token_id": 0, "eos_token_id": options.vocab_size - 1, "pad_token_id": options.vocab_size - 2}
    if not options.wrapped:
        return text | special
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": str(options.dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        **special,
        "text_config": text,
        "vision_config": {"model_type": "moonvit3d"},
    }


# Values by the end of the name: mean and standard deviation. Chosen so that gates are neither open nor
# shut, several snapshots share the mix, and logits spread over a few units.
_FLOAT_INITS: Mapping[str, tuple[float, float]] = {
    "layernorm.weight": (1.0, 0.1),
    "norm.weight": (1.0, 0.1),
    "A_log": (0.0, 0.2),
    "dt_bias": (-2.0, 1.5),
    "conv1d.weight": (0.2, 0.4),
    "e_score_correction_bias": (0.0, 0.1),
    "embed_tokens.weight": (0.0, 1.0),
}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator, noise_dtype: torch.dtype) -> torch.Tensor:
    """Float tensor of one name; matrices get fan-in scaling, the head twice that."""
    noise = torch.randn(shape, generator=generator, dtype=noise_dtype)
    for ending, (mean, deviation) in _FLOAT_INITS.items():
        if name.endswith(ending):
            return mean + deviation * noise
    gain = 2.0 if name.endswith("lm_head.weight") else 1.0
    return noise * (gain / math.sqrt(shape[-1]))


def _random_bytes(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """MXFP4 bytes: any nibble; scales around the fan-in power of two, three neighbouring codes."""
    if name.endswith("weight_packed"):
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    in_size = shape[-1] * 32
    code = 127 - round(math.log2(3.0 * math.sqrt(in_size)))
    return torch.randint(code - 1, code + 2, shape, generator=generator, dtype=torch.uint8)


_FP32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def release_tensors(
    config: KimiK3Config,
    generator: torch.Generator,
    *,
    packed: bool,
    dtype: torch.dtype,
    noise_dtype: torch.dtype = torch.float64,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Random text tensors of a model in the release form, one by one: name on disk, value in its storage dtype.

    Args:
        config: which model.
        generator: where the values come from.
        packed: routed experts as MXFP4 pairs.
        dtype: of the unquantised weights; what the release keeps in fp32 stays fp32.
        noise_dtype: the noise is drawn in; float32 is quicker and takes half the memory.
    """
    for source in text_tensors(config, packed=packed):
        if torch.uint8 in source.dtypes:
            yield source.name, _random_bytes(source.name, source.shape, generator)
            continue
        value = _random(source.name, source.shape, generator, noise_dtype)
        if source.name.endswith("A_log") and config.wrapped:
            value[config.kda.num_heads :] = 0.0
        yield source.name, value.to(torch.float32 if source.name.endswith(_FP32) else dtype)


def toy_tensors(options: ToyOptions, seed: int = 0) -> dict[str, torch.Tensor]:
    """All checkpoint tensors of the toy by their name on disk, in their storage dtype."""
    generator = torch.Generator().manual_seed(seed)
    config = parse_config(toy_config(options))
    tensors = dict(release_tensors(config, generator, packed=options.quantized, dtype=options.dtype))
    if options.vision_tensors:
        for name in ("vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.weight"):
            tensors[name] = torch.randn(4, 4, generator=generator).to(options.dtype)
    return tensors


def write_toy_checkpoint(directory: Path, options: ToyOptions | None = None, seed: int = 0) -> Path:
    """Write config, shards and index; returns ``directory``."""
    options = ToyOptions() if options is None else options
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory, toy_tensors(options, seed), options.num_shards)
    (directory / "config.json").write_text(json.dumps(toy_config(options), indent=1))
    return directory


def write_tensors(directory: Path, tensors: Mapping[str, torch.Tensor], num_shards: int) -> None:
    """Write tensors as ``num_shards`` files with an index, or as one plain file."""
    if num_shards == 1:
        save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    per_shard = -(-len(names) // num_shards)
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:06d}.safetensors"
        part = names[shard * per_shard : (shard + 1) * per_shard]
        save_file({name: tensors[name] for name in part}, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index))


def unquantized(options: ToyOptions) -> ToyOptions:
    """The same toy with plain expert weights."""
    return replace(options, quantized=False)


def write_byte_tokenizer(checkpoint: Path, *, eos_token_id: int) -> None:
    """Give a checkpoint of 512 ids or more a tokenizer of the 256 bytes and the chat form's special tokens."""
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"eos_token_id": eos_token_id}))
    ranks = [base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)]
    (checkpoint / "tiktoken.model").write_bytes(b"".join(ranks))
    names = ("[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>")
    named = {str(256 + index): {"content": name, "special": True} for index, name in enumerate(names)}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))
