"""Acceptance 1: schedule, names and shapes of the release from its config alone (k3-architecture 11)."""

import json
import math
from pathlib import Path

import torch

from outrider.models.kimi_k3.checkpoint import assignments, text_tensors
from outrider.models.kimi_k3.config import parse_config
from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.layers import Build
from outrider.models.weights import check_coverage

CONFIG = parse_config(json.loads((Path(__file__).parents[2] / "data" / "k3_config.json").read_text()))
META = Build(dtype=torch.bfloat16, device=torch.device("meta"))
NUM_EXPERTS = 896


def expected_layer(i: int) -> dict[str, tuple[int, ...]]:
    """Section 11 typed out by hand; A_log is stored as 128 values."""
    h = 7168
    table = {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "self_attention_res_norm.weight": (h,),
        "mlp_res_norm.weight": (h,),
        "self_attention_res_proj.weight": (1, h),
        "mlp_res_proj.weight": (1, h),
        "self_attn.g_proj.weight": (12288, h),
        "self_attn.o_proj.weight": (h, 12288),
    }
    if i % 4 == 3 or i == 92:
        table |= {
            "self_attn.q_a_proj.weight": (1536, h),
            "self_attn.q_a_layernorm.weight": (1536,),
            "self_attn.q_b_proj.weight": (18432, 1536),
            "self_attn.kv_a_proj_with_mqa.weight": (576, h),
            "self_attn.kv_a_layernorm.weight": (512,),
            "self_attn.kv_b_proj.weight": (24576, 512),
        }
    else:
        for s in "qkv":
            table[f"self_attn.{s}_proj.weight"] = (12288, h)
            table[f"self_attn.{s}_conv1d.weight"] = (12288, 1, 4)
        table |= {
            "self_attn.f_a_proj.weight": (128, h),
            "self_attn.f_b_proj.weight": (12288, 128),
            "self_attn.b_proj.weight": (96, h),
            "self_attn.A_log": (128,),
            "self_attn.dt_bias": (12288,),
            "self_attn.o_norm.weight": (128,),
        }
    if i == 0:
        return table | {
            "mlp.gate_proj.weight": (33792, h),
            "mlp.up_proj.weight": (33792, h),
            "mlp.down_proj.weight": (h, 33792),
        }
    return table | {
        "block_sparse_moe.gate.weight": (896, h),
        "block_sparse_moe.gate.e_score_correction_bias": (896,),
        "block_sparse_moe.routed_expert_down_proj.weight": (3584, h),
        "block_sparse_moe.routed_expert_norm.weight": (3584,),
        "block_sparse_moe.routed_expert_up_proj.weight": (h, 3584),
        "block_sparse_moe.shared_experts.gate_proj.weight": (6144, h),
        "block_sparse_moe.shared_experts.up_proj.weight": (6144, h),
        "block_sparse_moe.shared_experts.down_proj.weight": (h, 6144),
    }


def expected_non_expert() -> dict[str, tuple[int, ...]]:
    table = {
        "model.embed_tokens.weight": (163840, 7168),
        "lm_head.weight": (163840, 7168),
        "model.norm.weight": (7168,),
        "model.output_attn_res_norm.weight": (7168,),
        "model.output_attn_res_proj.weight": (1, 7168),
    }
    for i in range(93):
        table |= {f"model.layers.{i}.{name}": shape for name, shape in expected_layer(i).items()}
    return {f"language_model.{name}": shape for name, shape in table.items()}


EXPERT = {
    "w1.weight_packed": (3072, 1792),
    "w1.weight_scale": (3072, 112),
    "w3.weight_packed": (3072, 1792),
    "w3.weight_scale": (3072, 112),
    "w2.weight_packed": (3584, 1536),
    "w2.weight_scale": (3584, 96),
}


def test_every_text_name_is_generated_once():
    expected = expected_non_expert()
    assert len(expected) == 2460
    found: dict[str, tuple[int, ...]] = {}
    fp32: set[str] = set()
    experts = []
    for source in text_tensors(CONFIG, packed=True):
        if ".experts." in source.name:
            experts.append(source.name)
            assert source.shape == EXPERT[source.name.split(".", 7)[7]], source.name
            continue
        assert source.name not in found, source.name
        found[source.name] = source.shape
        if torch.bfloat16 not in source.dtypes:
            fp32.add(source.name)
    assert found == expected
    assert len(found) + len(experts) == 497_052
    moe = "language_model.model.layers.{}.block_sparse_moe.experts.{}.{}"
    assert set(experts) == {moe.format(i, e, name) for i in range(1, 93) for e in range(NUM_EXPERTS) for name in EXPERT}
    endings = {name.rsplit(".layers.", 1)[1].split(".", 1)[1] for name in fp32}
    assert endings == {
        *(f"self_attn.{s}_conv1d.weight" for s in "qkv"),
        "self_attn.A_log",
        "self_attn.dt_bias",
        "self_attn.o_norm.weight",
        "block_sparse_moe.gate.e_score_correction_bias",
    }


def test_names_fill_the_shape_only_model_exactly():
    plan = assignments(CONFIG, None, on_disk_packed=True, keep_packed=False)
    model = KimiK3Model(CONFIG, experts="unpacked", build=META)
    check_coverage(model.state_dict(), plan)
    assert all(parameter.is_meta for parameter in model.parameters())
    # Logical parameters: all of the checkpoint but the mixes, stored fused (norm * proj).
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total + (2 * 93 + 1) * 7168 == 2_779_484_476_000


def test_packed_model_holds_the_bytes_of_the_files():
    model = KimiK3Model(CONFIG, experts="packed", build=META)
    num_bytes = sum(p.numel() for p in model.parameters() if p.dtype == torch.uint8)
    assert num_bytes == 17_547_264 * NUM_EXPERTS * 92
    assert num_bytes == NUM_EXPERTS * 92 * sum(math.prod(shape) for shape in EXPERT.values())


def test_pruned_variant_differs_in_experts_only():
    raw = json.loads((Path(__file__).parents[2] / "data" / "k3_config.json").read_text())
    raw["text_config"]["num_experts"] = 16
    few = [source.name for source in text_tensors(parse_config(raw), packed=True)]
    assert len(set(few)) == len(few) == 2460 + 92 * 16 * 6


def test_cache_layouts_of_the_release():
    latents, recurrent = KimiK3Model(CONFIG, experts="packed", build=META).cache_layouts
    assert latents.bytes_per_token == 27_648
    assert recurrent.state_bytes_per_slot == 434_110_464
    assert recurrent.bytes_per_slot == 449_372_160
    assert recurrent.log_bytes_per_row == 69 * (96 * 3 * 128 * 4 + 3 * 12288 * 2)
