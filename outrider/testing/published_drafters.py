"""config.json and tensor shapes of published drafters, as far as their sources state them (dspark.md section 2).

Shapes are written from the published tables, not from our module, so that the two can be compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "DFLASH_ZLAB",
    "GLM_5_2",
    "KIMI_K3_INFERACT",
    "KIMI_K3_RADIXARK",
    "PUBLISHED",
    "QWEN3_4B",
    "PublishedDrafter",
]

Shapes = dict[str, tuple[int, ...]]

# config.json contents of published drafters, as far as their sources state them
QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": 7,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "layer_types": ["full_attention"] * 5,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "mask_token_id": 151669,
    "max_position_embeddings": 40960,
    "num_anchors": 512,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "sliding_window": None,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}

KIMI_K3_RADIXARK: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    "model_type": "qwen3",
    "block_size": 7,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_attention_heads": 64,
    "num_hidden_layers": 5,
    "num_key_value_heads": 16,
    "num_target_layers": 93,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "rope_theta": 10000,
    "vocab_size": 163840,
    "dflash_config": {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "mask_token_id": 163824,
        "target_layer_ids": [7, 23, 51, 67, 83],
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "confidence_head_alpha": 1.0,
    },
}

GLM_5_2: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "transformer_layer_config": {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_attention_heads": 64,
        "num_hidden_layers": 5,
        "num_key_value_heads": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 8000000,
        "vocab_size": 154880,
    },
    "draft_vocab_size": 154880,
    "block_size": 8,
    "target_hidden_size": 6144,
    "aux_hidden_state_layer_ids": [8, 23, 39, 55, 70],
    "mask_token_id": 154856,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "speculators_config": {"algorithm": "dspark", "default_proposal_method": "greedy"},
}

# original z-lab DFlash: no Markov head, row 0 unused
DFLASH_ZLAB: dict[str, Any] = {
    **{key: value for key, value in QWEN3_4B.items() if key not in ("num_anchors", "architectures", "markov_rank")},
    "architectures": ["DFlashDraftModel"],
    "enable_confidence_head": False,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "block_size": 16,
}


def _qwen3(**changes: Any) -> dict[str, Any]:
    return {**QWEN3_4B, **changes}


QWEN3_8B = _qwen3(hidden_size=4096, intermediate_size=12288)
QWEN3_14B = _qwen3(
    hidden_size=5120,
    intermediate_size=17408,
    num_attention_heads=40,
    num_target_layers=40,
    target_layer_ids=[1, 10, 19, 28, 37],
)
NO_HEADS = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}

# the example of the speculators documentation: a third of the vocabulary, ids of layer inputs
QWEN3_0_6B_SPECULATORS: dict[str, Any] = {
    **{key: value for key, value in GLM_5_2.items() if key != "transformer_layer_config"},
    "transformer_layer_config": {
        "model_type": "qwen3",
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 3,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "vocab_size": 151936,
    },
    "draft_vocab_size": 32000,
    "target_hidden_size": 1024,
    "aux_hidden_state_layer_ids": [2, 14, 25],
    "mask_token_id": 151669,
    "sample_from_anchor": True,
}

# an MLA body, which is not offered
KIMI_K3_INFERACT: dict[str, Any] = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": False,
    "rms_norm_eps": 1e-5,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "target_hidden_size": 7168,
    "target_num_hidden_layers": 93,
    "num_target_layers": 5,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "mask_token_id": 163837,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDrafter:
    """One checkpoint: its config, the shape of every tensor under its name in the file, and its trained values."""

    config: Mapping[str, Any]
    shapes: Shapes
    num_parameters: int | None  # as published, copies of the target left out; None where nobody states it


def _body(width: int, layers: int, heads: tuple[int, int, int], inner: int, prefix: str = "") -> Shapes:
    query, key, head_dim = heads
    shapes: Shapes = {prefix + "hidden_norm.weight": (width,), prefix + "norm.weight": (width,)}
    for i in range(layers):
        layer = f"{prefix}layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (width,),
            layer + "post_attention_layernorm.weight": (width,),
            layer + "self_attn.q_proj.weight": (query * head_dim, width),
            layer + "self_attn.k_proj.weight": (key * head_dim, width),
            layer + "self_attn.v_proj.weight": (key * head_dim, width),
            layer + "self_attn.o_proj.weight": (width, query * head_dim),
            layer + "self_attn.q_norm.weight": (head_dim,),
            layer + "self_attn.k_norm.weight": (head_dim,),
            layer + "mlp.gate_proj.weight": (inner, width),
            layer + "mlp.up_proj.weight": (inner, width),
            layer + "mlp.down_proj.weight": (width, inner),
        }
    return shapes


def _heads(vocab: int, draft_vocab: int, width: int, prefix: str = "") -> Shapes:
    return {
        prefix + "markov_head.markov_w1.weight": (vocab, 256),
        prefix + "markov_head.markov_w2.weight": (draft_vocab, 256),
        prefix + "confidence_head.proj.weight": (1, width + 256),
        prefix + "confidence_head.proj.bias": (1,),
    }


def _qwen3_shapes(width: int, heads: tuple[int, int, int], inner: int) -> Shapes:
    """DeepSpec's Qwen3 drafters without their heads; embedding and head are copies of the target's."""
    copies = {"embed_tokens.weight": (151936, width), "lm_head.weight": (151936, width)}
    return {**copies, "fc.weight": (width, 5 * width), **_body(width, 5, heads, inner)}


_QWEN3_SIZES = {
    "4b": (QWEN3_4B, _qwen3_shapes(2560, (32, 8, 128), 9728), 2560),
    "8b": (QWEN3_8B, _qwen3_shapes(4096, (32, 8, 128), 12288), 4096),
    "14b": (QWEN3_14B, _qwen3_shapes(5120, (40, 8, 128), 17408), 5120),
}
PUBLISHED: dict[str, PublishedDrafter] = {}
for _size, (_config, _shapes, _width) in _QWEN3_SIZES.items():
    PUBLISHED[f"dspark_qwen3_{_size}_block7"] = PublishedDrafter(
        config=_config,
        shapes={**_shapes, **_heads(151936, 151936, _width)},
        num_parameters=615_221_249 if _size == "4b" else None,
    )
    PUBLISHED[f"dflash_qwen3_{_size}_block7"] = PublishedDrafter(
        config={**_config, **NO_HEADS}, shapes=_shapes, num_parameters=None
    )
PUBLISHED["RadixArk Kimi-K3"] = PublishedDrafter(
    config=KIMI_K3_RADIXARK,
    shapes={"fc.weight": (7168, 35840), **_body(7168, 5, (64, 16, 64), 14336), **_heads(163840, 163840, 7168)},
    num_parameters=2_249_289_601,
)
PUBLISHED["GLM-5.2 speculators"] = PublishedDrafter(
    config=GLM_5_2,
    shapes={
        "embed_tokens.weight": (154880, 6144),
        "lm_head.weight": (154880, 6144),
        "fc.weight": (6144, 5 * 6144),
        **_body(6144, 5, (64, 64, 64), 12288),
        **_heads(154880, 154880, 6144),
    },
    num_parameters=1_903_901_569,
)
PUBLISHED["Qwen3-0.6B speculators, reduced"] = PublishedDrafter(
    config=QWEN3_0_6B_SPECULATORS,
    shapes={
        "fc.weight": (1024, 3 * 1024),
        **_body(1024, 3, (16, 8, 128), 3072),
        **_heads(151936, 32000, 1024),
        "lm_head.weight": (32000, 1024),
        "d2t": (32000,),
        "t2d": (151936,),
    },
    num_parameters=None,
)
