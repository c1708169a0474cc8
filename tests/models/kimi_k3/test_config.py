"""Config parsing: the release, every variant, and a clear error for every broken field."""

import copy
import json
from pathlib import Path

import pytest

from outrider.errors import ConfigError, UnsupportedError
from outrider.models.fields import read_config_json
from outrider.models.kimi_k3.config import parse_config
from outrider.testing.toy import ToyOptions, kimi_linear_toy, toy_config

K3 = json.loads((Path(__file__).parents[2] / "data" / "k3_config.json").read_text())


def changed(path: str, value: object) -> dict:
    """The release config with one dotted field replaced; the value ``...`` removes it."""
    raw = copy.deepcopy(K3)
    *parents, last = path.split(".")
    section = raw
    for name in parents:
        section = section[name]
    if value is ...:
        del section[last]
    else:
        section[last] = value
    return raw


def test_release_numbers():
    config = parse_config(K3)
    assert (config.num_layers, len(config.kda_layers), len(config.mla_layers)) == (93, 69, 24)
    assert config.mla_layers == (*range(3, 92, 4), 92)  # the tail: 91 and 92 are both MLA
    assert config.moe_layers == (False,) + (True,) * 92
    assert config.num_snapshots == 8
    assert (config.kda.inner_size, config.mla.qk_head_dim, config.mla.latent_row_size) == (12288, 192, 576)
    assert config.moe.shared_intermediate_size == 6144
    assert config.moe.quantized and config.wrapped
    assert config.eos_token_ids == (163586,)
    assert config.mla.lora_norm_eps == 1e-6  # U1


def test_kimi_linear_form():
    config = parse_config(toy_config(kimi_linear_toy()))
    assert not config.wrapped
    assert config.attn_res_block_size is None and config.num_snapshots == 0
    assert config.kda.gate_lower_bound is None and not config.kda.full_rank_gate
    assert config.mla.q_lora_rank is None and not config.mla.output_gate
    assert config.moe.latent_size is None and not config.moe.latent_norm
    assert config.activation == "silu"


def test_absent_keys_mean_the_kimi_linear_variant():
    """Keys that only K3 has may be absent altogether; other spellings of the 48B file are read."""
    raw = toy_config(kimi_linear_toy())
    for name in ("attn_res_block_size", "routed_expert_hidden_size", "latent_moe_use_norm", "q_lora_rank"):
        del raw[name]
    del raw["mla_use_output_gate"], raw["linear_attn_config"]["use_full_rank_gate"]
    raw["model_max_length"] = raw.pop("max_position_embeddings")
    raw["eos_token_id"] = [1, 2]
    config = parse_config(raw)
    assert config.max_position_embeddings == 4096
    assert config.eos_token_ids == (1, 2)
    assert config == parse_config(toy_config(kimi_linear_toy()) | {"eos_token_id": [1, 2]})


def test_mla_lora_norm_eps_can_be_set():
    config = parse_config(toy_config(ToyOptions(mla_lora_norm_eps=1e-5)))
    assert config.mla.lora_norm_eps == 1e-5


def test_wrapper_ids_win_over_text_ids():
    assert parse_config(changed("text_config.eos_token_id", 7)).eos_token_ids == (163586,)
    assert parse_config(changed("eos_token_id", ...)).eos_token_ids == (163586,)


def test_a_lone_expert_keeps_its_weight():
    """The vendor code renormalises only what has more than one weight."""
    assert parse_config(K3).moe.renormalize
    assert not parse_config(changed("text_config.num_experts_per_token", 1)).moe.renormalize


def test_the_quantisation_section_may_lie_in_the_wrapper():
    raw = changed("text_config.quantization_config", ...)
    assert not parse_config(raw).moe.quantized
    raw["quantization_config"] = K3["text_config"]["quantization_config"]
    assert parse_config(raw).moe.quantized


WRONG = {
    "model_type": ("llama", "model_type='llama'"),
    "text_config": (..., "text_config is missing"),
    "text_config.model_type": ("deepseek", "text_config.model_type='deepseek'"),
    "text_config.hidden_size": (..., "text_config.hidden_size is missing"),
    "text_config.vocab_size": ("many", "vocab_size='many': expected an integer"),
    "text_config.num_hidden_layers": (0, "num_hidden_layers=0: expected an integer of at least 1"),
    "text_config.rms_norm_eps": (True, "rms_norm_eps=True: expected a finite number"),
    "text_config.hidden_act": ("gelu", "hidden_act='gelu': expected 'silu' or 'situ'"),
    "text_config.mla_use_output_gate": (1, "mla_use_output_gate=1: expected true or false"),
    "text_config.num_key_value_heads": (8, "num_key_value_heads=8 must equal num_attention_heads=96"),
    "text_config.num_experts_per_token": (897, "num_experts_per_token=897 exceeds num_experts=896"),
    "text_config.routed_expert_hidden_size": (3585, "3585 is not a multiple of 32"),
    "text_config.moe_intermediate_size": (100, "moe_intermediate_size=100 is not a multiple of 32"),
    "text_config.linear_attn_config": (..., "linear_attn_config is missing"),
    "text_config.linear_attn_config.gate_lower_bound": (0.0, "gate_lower_bound=0.0 is not negative"),
    "text_config.linear_attn_config.short_conv_kernel_size": (1, "short_conv_kernel_size=1"),
    "text_config.linear_attn_config.kda_layers": ([1, "2"], "expected an integer or a list of integers"),
    "eos_token_id": (163840, "eos_token_id=163840 is outside the vocabulary 0..163839"),
}


@pytest.mark.parametrize("path", WRONG)
def test_wrong_field_is_named(path):
    value, message = WRONG[path]
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        parse_config(changed(path, value))


def test_layer_lists_must_partition():
    lists = K3["text_config"]["linear_attn_config"]
    full, kda = lists["full_attn_layers"], lists["kda_layers"]
    cases = (
        ("full_attn_layers", [*full, 1], "lists layer 1, which is already kda"),
        ("full_attn_layers", full[:-1], r"layers \[93\] are in neither"),
        ("full_attn_layers", [*full[:-1], 94], r"lists layer 94, outside 1\.\.93 \(the lists are 1-based\)"),
        ("kda_layers", [0, *kda[1:]], r"lists layer 0, outside 1\.\.93"),
        ("kda_layers", [*kda, 2], "lists layer 2, which is already kda"),
    )
    for name, value, message in cases:
        with pytest.raises(ConfigError, match=message):
            parse_config(changed(f"text_config.linear_attn_config.{name}", value))


UNSUPPORTED = {
    "text_config.num_expert_group": 8,
    "text_config.mla_use_nope": False,
    "text_config.tie_word_embeddings": True,
    "text_config.num_nextn_predict_layers": 1,
    "text_config.moe_router_activation_func": "softmax",
    "text_config.topk_method": "greedy",
    "text_config.quantization_config.format": "nvfp4-pack-quantized",
    "text_config.quantization_config.config_groups.group_0.weights.group_size": 16,
}


@pytest.mark.parametrize("path", UNSUPPORTED)
def test_unsupported_feature_is_named(path):
    with pytest.raises(UnsupportedError, match=path.rsplit(".", maxsplit=1)[-1]):
        parse_config(changed(path, UNSUPPORTED[path]))


def test_config_file_errors(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_config_json(tmp_path)
    for text, message in (("{", "not valid JSON"), ("[]", "expected an object"), ("\xff", "not valid JSON")):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ConfigError, match=message):
            read_config_json(tmp_path)
