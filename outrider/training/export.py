"""Write trained models in the checkpoint forms that engines and converters read.

The target: K3's wrapper config with ``text_config``, ``language_model.`` names, routed experts
as MXFP4 pairs, fp32 vectors as fp32 (k3-architecture.md section 11). The drafter: the
speculators form with a reduced vocabulary (dspark.md section 2.4).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outrider.ops.quant import decode_mxfp4, encode_mxfp4
from outrider.training.dspark import DrafterConfig, DSparkForTraining
from outrider.training.kimi_k3 import KdaAttention, KimiK3ForTraining, TrainConfig

__all__ = [
    "drafter_config",
    "read_drafter",
    "read_target",
    "target_config",
    "target_tensors",
    "write_drafter",
    "write_target",
]

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FP32_ENDINGS = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def _linear_attn_config(config: TrainConfig) -> dict[str, Any]:
    layers = range(config.num_layers)
    return {
        "num_heads": config.kda_heads,
        "head_dim": config.kda_head_dim,
        "short_conv_kernel_size": config.conv_kernel,
        "use_full_rank_gate": True,
        "gate_lower_bound": config.gate_lower_bound,
        "kda_layers": [i + 1 for i in layers if i not in config.mla_layers],
        "full_attn_layers": [i + 1 for i in config.mla_layers],
    }


def _quantization_config() -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "scale_dtype": "torch.uint8",
        "dynamic": False,
        "observer": "minmax",
    }
    ignore = (
        r"re:.*self_attn.*",
        r"re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        r"re:.*lm_head.*",
        r"re:.*routed_expert_(down|up)_proj.*",
    )
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": weights}},
        "ignore": list(ignore),
    }


def target_config(config: TrainConfig, *, max_positions: int, special_ids: Mapping[str, int]) -> dict[str, Any]:
    """``config.json`` of a trained target; ``special_ids`` holds bos, eos and pad."""
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": max_positions,
        "intermediate_size": config.dense_intermediate,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": config.num_experts,
        "num_experts_per_token": config.experts_per_token,
        "num_shared_experts": config.num_shared_experts,
        "moe_intermediate_size": config.moe_intermediate,
        "routed_expert_hidden_size": config.latent_size,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "hidden_act": "situ",
        "activation_situ_beta": config.situ_beta,
        "activation_situ_linear_beta": config.situ_linear_beta,
        "rms_norm_eps": config.rms_eps,
        "mla_lora_norm_eps": config.mla_lora_eps,
        "attn_res_block_size": config.attn_res_block_size,
        "num_attention_heads": config.mla_heads,
        "num_key_value_heads": config.mla_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": _linear_attn_config(config),
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "quantization_config": _quantization_config(),
        **special_ids,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        **special_ids,
        "text_config": text,
    }


def target_tensors(model: KimiK3ForTraining) -> dict[str, torch.Tensor]:
    """Checkpoint tensors by their name on disk, in their storage dtype."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if ".experts." in name:
            tensors |= _expert_tensors(name, value)
        else:
            tensors[_disk_name(name)] = value
    for index, layer in enumerate(model.walk()):
        if isinstance(layer.self_attn, KdaAttention):
            name = f"layers.{index}.self_attn.A_log"
            padded = torch.zeros(layer.self_attn.head_dim)  # the release pads to head_dim
            padded[: layer.self_attn.heads] = tensors[_disk_name(name)]
            tensors[_disk_name(name)] = padded
    return {"language_model." + name: _stored(name, value) for name, value in tensors.items()}


def _disk_name(name: str) -> str:
    """Training name -> name after ``language_model.``."""
    name = name.replace("conv1d_weight", "conv1d.weight")
    for residual in ("self_attention_res", "mlp_res", "output_attn_res"):
        for part in ("norm", "proj"):
            name = name.replace(f"{residual}.{part}", f"{residual}_{part}.weight")
    return name if name.startswith("lm_head") else "model." + name


def _expert_tensors(name: str, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
    """``...experts.w1`` [E, O, I] -> packed codes and scales of every expert."""
    prefix, matrix = _disk_name(name).rsplit(".", 1)
    packed, scale = encode_mxfp4(stacked)
    tensors = {}
    for expert in range(stacked.shape[0]):
        tensors[f"{prefix}.{expert}.{matrix}.weight_packed"] = packed[expert]
        tensors[f"{prefix}.{expert}.{matrix}.weight_scale"] = scale[expert]
    return tensors


def _stored(name: str, value: torch.Tensor) -> torch.Tensor:
    if value.dtype == torch.uint8:
        return value.contiguous()
    return value.to(torch.float32 if name.endswith(FP32_ENDINGS) else torch.bfloat16).contiguous()


def write_target(model: KimiK3ForTraining, out: Path, *, max_positions: int, special_ids: Mapping[str, int]) -> None:
    """Write ``config.json``, ``generation_config.json``, one shard and its index."""
    out.mkdir(parents=True, exist_ok=True)
    config = target_config(model.config, max_positions=max_positions, special_ids=special_ids)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", dict(special_ids))
    tensors = target_tensors(model)
    shard = "model-00001-of-00001.safetensors"
    save_file(tensors, out / shard, metadata={"format": "pt"})
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(tensors), shard)}
    _write_json(out / "model.safetensors.index.json", index)


def read_target(model: KimiK3ForTraining, checkpoint: Path) -> None:
    """Fill a training form from a directory that ``write_target`` wrote, to go on from shipped weights."""
    tensors = load_file(checkpoint / "model-00001-of-00001.safetensors")
    state = {}
    for name, value in model.state_dict().items():
        disk_name = "language_model." + _disk_name(name)
        if ".experts." in name:
            state[name] = _read_experts(tensors, disk_name, value.shape[0])
        else:
            state[name] = tensors[disk_name][: value.shape[0]].float()  # A_log is padded on disk
    model.load_state_dict(state)


def _read_experts(tensors: Mapping[str, torch.Tensor], disk_name: str, num_experts: int) -> torch.Tensor:
    prefix, matrix = disk_name.rsplit(".", 1)
    names = [f"{prefix}.{expert}.{matrix}.weight" for expert in range(num_experts)]
    pairs = [(tensors[f"{name}_packed"], tensors[f"{name}_scale"]) for name in names]
    return torch.stack([decode_mxfp4(packed, scale, torch.float32) for packed, scale in pairs])


def drafter_config(
    config: DrafterConfig, *, target_name: str, num_target_layers: int, max_positions: int
) -> dict[str, Any]:
    """``config.json`` of a trained drafter (speculators form: tap ids count layer inputs)."""
    body = {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "vocab_size": config.target_vocab_size,
        "max_position_embeddings": max_positions,
        "layer_types": ["full_attention"] * config.num_layers,
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_rows}
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": body,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_rows,
        "target_hidden_size": config.hidden_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.aux_layer_ids],
        "aux_hidden_stream": "attn_res",
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": True,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "num_target_layers": num_target_layers,
        "speculators_config": {
            "algorithm": "dspark",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": target_name,
                "architectures": ["KimiK3ForConditionalGeneration"],
            },
        },
    }


def write_drafter(model: DSparkForTraining, draft_ids: torch.Tensor, out: Path, *, config: Mapping[str, Any]) -> None:
    """Write ``config.json`` and ``model.safetensors`` with the vocabulary maps.

    ``draft_ids`` int64 [V_draft], ascending target ids: draft id d stands for ``draft_ids[d]``.
    """
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "config.json", config)
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    mapped = torch.zeros(model.config.target_vocab_size, dtype=torch.bool)
    mapped[draft_ids] = True
    tensors["t2d"] = mapped
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def read_drafter(model: DSparkForTraining, checkpoint: Path) -> torch.Tensor:
    """Fill a training form from what ``write_drafter`` wrote; returns the target id of each draft id."""
    tensors = load_file(checkpoint / "model.safetensors")
    shift = tensors.pop("d2t")
    del tensors["t2d"]
    model.load_state_dict({name: value.float() for name, value in tensors.items()})
    return shift + torch.arange(len(shift))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
