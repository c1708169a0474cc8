"""Tiny seeded drafter checkpoints with real key names, in the three supported families.

Weights are random but scaled so that rows, taps and positions all matter: a wrong row, tap order or
rotary scaling changes the drafts of a toy as surely as those of a real drafter.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

__all__ = ["ToyDrafterOptions", "toy_drafter_config", "toy_drafter_weights", "write_toy_drafter"]

Family = Literal["deepspec", "specforge", "speculators"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyDrafterOptions:
    """Shape of a toy drafter; the defaults draft 4 tokens from 4 anchor-first rows."""

    family: Family = "deepspec"
    num_layers: int = 2
    hidden_size: int = 32
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    intermediate_size: int = 48
    vocab_size: int = 97
    draft_vocab_size: int | None = None  # speculators only; None is the whole vocabulary
    block_rows: int = 4
    mask_token_id: int = 96
    num_target_layers: int = 6
    aux_layer_ids: tuple[int, ...] = (0, 2, 4)  # output-of, converted to the family's convention
    markov_rank: int = 16
    markov_kind: str = "vanilla"
    confidence: Literal["none", "hidden", "markov"] = "markov"
    confidence_bias: bool = True
    rope_theta: float = 10000.0
    yarn_factor: float | None = None
    yarn_original: int = 16
    rms_norm_eps: float = 1e-5
    tap_norm: bool = False
    layer_types: tuple[str, ...] | None = None
    sliding_window: int | None = None
    extra_config: dict[str, Any] = field(default_factory=dict)  # merged last, top level


def toy_drafter_config(options: ToyDrafterOptions) -> dict[str, Any]:
    """config.json of the family, real key names."""
    drafter: dict[str, Any] = {
        "mask_token_id": options.mask_token_id,
        "markov_rank": options.markov_rank,
        "enable_confidence_head": options.confidence != "none",
        "confidence_head_with_markov": options.confidence == "markov",
    }
    if options.markov_rank:
        drafter["markov_head_type"] = options.markov_kind
    if not options.confidence_bias:
        drafter["confidence_head_bias"] = False
    if options.tap_norm:
        drafter["fc_norm"] = True
    match options.family:
        case "deepspec":
            config = {
                **_body(options),
                **drafter,
                "architectures": ["Qwen3DSparkModel"],
                "num_target_layers": options.num_target_layers,
                "block_size": options.block_rows,
                "tie_word_embeddings": False,
                "target_layer_ids": list(options.aux_layer_ids),
                "num_anchors": 512,
            }
        case "specforge":
            nested = {"projector_type": "dspark", "attention_mode": "gqa", **drafter, "confidence_head_alpha": 1.0}
            nested["target_layer_ids"] = list(options.aux_layer_ids)
            config = {
                **_body(options),
                "architectures": ["DSparkDraftModel"],
                "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
                "num_target_layers": options.num_target_layers,
                "block_size": options.block_rows,
                "dflash_config": nested,
            }
        case "speculators":
            config = {
                **drafter,
                "architectures": ["DSparkDraftModel"],
                "speculators_model_type": "dspark",
                "transformer_layer_config": _body(options),
                "draft_vocab_size": options.draft_vocab_size or options.vocab_size,
                "block_size": options.block_rows,
                "target_hidden_size": options.hidden_size,
                "aux_hidden_state_layer_ids": [t + 1 for t in options.aux_layer_ids],
                "sample_from_anchor": True,
                "speculators_config": {"algorithm": "dspark", "default_proposal_method": "greedy"},
            }
    return {**config, **options.extra_config}


def toy_drafter_weights(options: ToyDrafterOptions, *, seed: int) -> dict[str, torch.Tensor]:
    """Seeded float64 weights under DeepSpec flat names, embedding and full head not included."""
    generator = torch.Generator().manual_seed(seed)
    draft_vocab_size = options.draft_vocab_size or options.vocab_size
    weights: dict[str, torch.Tensor] = {}
    for name, shape in _shapes(options, draft_vocab_size).items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight") or name.startswith("fc_norm"):
            weights[name] = 1 + 0.2 * values
        elif name.endswith("bias"):
            weights[name] = 0.3 * values
        else:
            weights[name] = values / math.sqrt(shape[-1])
    if options.draft_vocab_size is not None:
        kept = torch.randperm(options.vocab_size, generator=generator)[:draft_vocab_size].sort().values
        weights["d2t"] = kept - torch.arange(draft_vocab_size)
    return weights


def write_toy_drafter(
    directory: Path,
    options: ToyDrafterOptions,
    *,
    seed: int = 0,
    copies: dict[str, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, torch.Tensor]:
    """Write ``config.json`` and ``model.safetensors``; return the weights under flat names.

    Args:
        directory: created if needed.
        options: shape and family; the family decides tensor name prefixes.
        seed: of the weights.
        copies: tables of the target to store beside them, e.g. ``{"embed_tokens.weight": ...}``.
        dtype: stored dtype of floating tensors.
    """
    weights = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in toy_drafter_weights(options, seed=seed).items()
    }
    stored = {**weights, **{name: tensor.contiguous() for name, tensor in (copies or {}).items()}}
    if "d2t" in stored:
        marked = torch.zeros(options.vocab_size, dtype=torch.bool)
        marked[torch.arange(stored["d2t"].numel()) + stored["d2t"]] = True
        stored["t2d"] = marked
    prefix = "model." if options.family == "specforge" else ""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({prefix + name: tensor.clone() for name, tensor in stored.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(toy_drafter_config(options), indent=2), encoding="utf-8")
    return weights


def _body(options: ToyDrafterOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": options.hidden_size,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_kv_heads,
        "head_dim": options.head_dim,
        "intermediate_size": options.intermediate_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": options.rms_norm_eps,
        "vocab_size": options.vocab_size,
        "max_position_embeddings": 4096,
        "layer_types": list(options.layer_types or ["full_attention"] * options.num_layers),
        "sliding_window": options.sliding_window,
    }
    if options.yarn_factor is None:
        return {**body, "rope_theta": options.rope_theta}
    yarn = {"factor": options.yarn_factor, "original_max_position_embeddings": options.yarn_original}
    return {**body, "rope_parameters": {"rope_type": "yarn", "rope_theta": options.rope_theta, **yarn}}


def _shapes(options: ToyDrafterOptions, draft_vocab_size: int) -> dict[str, tuple[int, ...]]:
    width, rank, head_dim = options.hidden_size, options.markov_rank, options.head_dim
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, len(options.aux_layer_ids) * width)}
    shapes |= {"hidden_norm.weight": (width,), "norm.weight": (width,)}
    if options.tap_norm:
        shapes |= {f"fc_norm.{index}.weight": (width,) for index in range(len(options.aux_layer_ids))}
    for layer in range(options.num_layers):
        prefix = f"layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (width,),
            prefix + "self_attn.q_proj.weight": (options.num_heads * head_dim, width),
            prefix + "self_attn.k_proj.weight": (options.num_kv_heads * head_dim, width),
            prefix + "self_attn.v_proj.weight": (options.num_kv_heads * head_dim, width),
            prefix + "self_attn.o_proj.weight": (width, options.num_heads * head_dim),
            prefix + "self_attn.q_norm.weight": (head_dim,),
            prefix + "self_attn.k_norm.weight": (head_dim,),
            prefix + "post_attention_layernorm.weight": (width,),
            prefix + "mlp.gate_proj.weight": (options.intermediate_size, width),
            prefix + "mlp.up_proj.weight": (options.intermediate_size, width),
            prefix + "mlp.down_proj.weight": (width, options.intermediate_size),
        }
    if rank:
        shapes["markov_head.markov_w1.weight"] = (options.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (draft_vocab_size, rank)
        if options.markov_kind == "gated":
            shapes |= {"markov_head.gate_proj.weight": (rank, width + rank), "markov_head.gate_proj.bias": (rank,)}
        if options.markov_kind == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + width)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if options.confidence != "none":
        features = width + (rank if options.confidence == "markov" else 0)
        shapes["confidence_head.proj.weight"] = (1, features)
        if options.confidence_bias:
            shapes["confidence_head.proj.bias"] = (1,)
    if options.draft_vocab_size is not None:
        shapes["lm_head.weight"] = (draft_vocab_size, width)
    return shapes
