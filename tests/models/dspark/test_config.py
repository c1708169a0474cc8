import json
import math
from dataclasses import replace

import pytest
import torch

from outrider.errors import CheckpointError, ConfigError, UnsupportedError
from outrider.models.dspark.config import (
    AuxStream,
    BlockLayout,
    MarkovKind,
    TapConvention,
    WindowOrigin,
    check_target,
)
from outrider.models.dspark.config_json import parse_config, read_config
from outrider.models.dspark.model import DSparkModel
from outrider.testing.published_drafters import DFLASH_ZLAB, GLM_5_2, KIMI_K3_RADIXARK, QWEN3_4B
from outrider.testing.toy_dspark import ToyDrafterOptions, toy_drafter_config

FAMILIES = ("deepspec", "specforge", "speculators")


@pytest.mark.parametrize(
    ("config", "total"),
    [(QWEN3_4B, 615_221_249), (KIMI_K3_RADIXARK, 2_249_289_601), (GLM_5_2, 1_903_901_569)],
    ids=["qwen3-4b", "k3-radixark", "glm-5.2"],
)
def test_official_sizes(config, total):
    with torch.device("meta"):
        model = DSparkModel(parse_config(config))
    assert model.num_parameters() == total


def test_state_dict_names_are_the_flat_format():
    with torch.device("meta"):
        names = set(DSparkModel(parse_config(QWEN3_4B)).state_dict())
    per_layer = [
        "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
        "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    ]  # fmt: skip
    expected = {f"layers.{i}.{part}.weight" for i in range(5) for part in per_layer}
    expected |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    expected |= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert names == expected


def test_conventions_are_explicit_after_loading():
    qwen, k3, glm = (parse_config(c) for c in (QWEN3_4B, KIMI_K3_RADIXARK, GLM_5_2))
    assert (qwen.layout, qwen.num_draft_tokens) == (BlockLayout.ANCHOR_FIRST, 7)
    assert (k3.layout, k3.num_draft_tokens) == (BlockLayout.ANCHOR_FIRST, 7)
    assert (glm.layout, glm.num_draft_tokens) == (BlockLayout.ANCHOR_DROP, 7)  # 8 rows, the key is absent
    assert k3.aux_layer_ids == (7, 23, 51, 67, 83)
    assert glm.aux_layer_ids == (7, 22, 38, 54, 69)  # input-of in the file
    assert k3.aux_hidden_stream is AuxStream.MIXTURE
    assert k3.markov is MarkovKind.VANILLA
    assert k3.rope.theta == 10000
    assert k3.rope.yarn is not None
    assert k3.rope.yarn.original_max_position == 65536
    assert k3.rope.yarn.attention_factor == pytest.approx(0.1 * math.log(16) + 1)
    assert qwen.rope.yarn is None and qwen.rope.theta == 1e6


@pytest.mark.parametrize("family", FAMILIES)
def test_families_normalise_to_one_record(family):
    reference = parse_config(toy_drafter_config(ToyDrafterOptions(family="deepspec")))
    other = parse_config(toy_drafter_config(ToyDrafterOptions(family=family)))
    if family == "speculators":
        assert other.num_target_layers is None
        mask = replace(other.layer_masks[0], window_origin=WindowOrigin.QUERY)
        assert other.aux_layer_convention is TapConvention.INPUT
        other = replace(other, num_target_layers=6, layer_masks=(mask, mask), aux_layer_convention=TapConvention.OUTPUT)
    assert other == reference


@pytest.mark.parametrize(
    ("config", "changes", "layout"),
    [
        (DFLASH_ZLAB, {}, BlockLayout.ANCHOR_DROP),
        (
            QWEN3_4B,
            {"markov_rank": 0, "enable_confidence_head": False, "architectures": ["X"]},
            BlockLayout.ANCHOR_FIRST,
        ),
        (QWEN3_4B, {"sample_from_anchor": False}, BlockLayout.ANCHOR_DROP),
        (GLM_5_2, {"sample_from_anchor": True}, BlockLayout.ANCHOR_FIRST),
    ],
    ids=["z-lab", "deepspec-dflash", "explicit-false", "explicit-true"],
)
def test_layout_rules(config, changes, layout):
    parsed = parse_config({**config, **changes})
    assert parsed.layout is layout
    assert parsed.num_draft_tokens == parsed.num_block_rows - (layout is BlockLayout.ANCHOR_DROP)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask_token_id": 151936}, "mask_token_id=151936"),
        ({"target_layer_ids": [1, 9, 17, 25, 36]}, "aux layer id 36"),
        ({"target_layer_ids": [-1, 9]}, "aux layer id -1"),
        ({"target_layer_ids": [9, 9]}, "ascend"),
        ({"target_layer_ids": []}, "taps no target layer"),
        ({"markov_rank": 0}, "confidence_head_with_markov"),
        ({"markov_head_type": "bigram"}, "bigram"),
        ({"num_key_value_heads": 5}, "multiple"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"block_size": None}, "block_size"),
        ({"block_size": "7"}, "must be an integer"),
        ({"rope_parameters": None}, "rope_theta"),
        ({"draft_vocab_size": 151937}, "draft_vocab_size"),
        ({"aux_hidden_stream": "middle"}, "aux_hidden_stream"),
        ({"target_layer_ids": [33, 1]}, r"\[33, 1\] must ascend"),
        ({"aux_layer_convention": "inputs"}, "aux_layer_convention='inputs'; known are"),
        (
            {"aux_layer_convention": "input", "target_layer_ids": [0, 9]},
            r"aux layer id 0 \(input convention\) means the output of layer -1",
        ),
    ],
)
def test_contradictions_are_named(changes, words):
    with pytest.raises(ConfigError, match=words):
        parse_config({**QWEN3_4B, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "k3_dspark"},
        {"dflash_config": {**KIMI_K3_RADIXARK["dflash_config"], "attention_mode": "mla"}},
        {"kv_lora_rank": 512},
        {"dspark_block_size": 5},
        {"architectures": ["Gemma4DSparkModel"]},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}},
    ],
)
def test_known_but_not_offered(changes):
    with pytest.raises(UnsupportedError):
        parse_config({**QWEN3_4B, **changes})


def test_masks_of_sliding_layers():
    sliding = {"layer_types": ["sliding_attention"] + ["full_attention"] * 4, "sliding_window": 64}
    masks = parse_config({**QWEN3_4B, **sliding}).layer_masks
    assert (masks[0].causal_block, masks[0].window, masks[0].window_origin) == (True, 64, WindowOrigin.QUERY)
    assert (masks[1].causal_block, masks[1].window) == (False, None)
    body = {**GLM_5_2["transformer_layer_config"], **sliding}
    for non_causal in (True, False):
        config = {**GLM_5_2, "transformer_layer_config": body, "sliding_window_non_causal": non_causal}
        mask = parse_config(config).layer_masks[0]
        assert (mask.causal_block, mask.window_origin) == (not non_causal, WindowOrigin.ANCHOR)
    dflash = {**KIMI_K3_RADIXARK["dflash_config"], "causal": True}
    assert all(m.causal_block for m in parse_config({**KIMI_K3_RADIXARK, "dflash_config": dflash}).layer_masks)


def test_yarn_forms():
    old = parse_config(KIMI_K3_RADIXARK).rope
    new = {k: v for k, v in KIMI_K3_RADIXARK.items() if k not in ("rope_scaling", "rope_theta")}
    yarn = {"type": "yarn", "factor": 16.0, "rope_theta": 10000.0, "original_max_position_embeddings": 65536}
    assert parse_config({**new, "rope_parameters": yarn}).rope == old
    del yarn["factor"]  # the ratio of the two lengths
    assert parse_config({**new, "rope_parameters": yarn}).rope == old
    scaled = parse_config({**new, "rope_parameters": {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}}).rope
    assert scaled.yarn is not None and scaled.yarn.attention_factor == 1.0


def test_every_row_that_the_layout_allows_is_a_draft():
    config = parse_config(QWEN3_4B)
    assert config.num_draft_tokens == 7
    assert parse_config(GLM_5_2).num_draft_tokens == 7  # 8 rows, but row 0 drafts nothing


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 5}, "vocab_size"),
        ({"hidden_size": 64}, "hidden size"),
        ({"num_layers": 93}, "num_target_layers"),
    ],
)
def test_wrong_target_is_refused(changes, words):
    facts = {"vocab_size": 151936, "hidden_size": 2560, "num_layers": 36}
    check_target(parse_config(QWEN3_4B), **facts)
    with pytest.raises(CheckpointError, match=words):
        check_target(parse_config(QWEN3_4B), **{**facts, **changes})
    with pytest.raises(CheckpointError, match="hidden_size=2560, but it reads the target's embedding of width 64"):
        check_target(parse_config({**QWEN3_4B, "target_hidden_size": 64}), **{**facts, "hidden_size": 64})


def test_last_layer_is_a_legal_tap_and_the_next_is_not():
    glm = parse_config({**GLM_5_2, "aux_hidden_state_layer_ids": [8, 78]})
    check_target(glm, vocab_size=154880, hidden_size=6144, num_layers=78)
    with pytest.raises(CheckpointError, match=r"aux layer id 78 \(input convention\) means the output of layer 77"):
        check_target(glm, vocab_size=154880, hidden_size=6144, num_layers=77)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("convention", TapConvention)
def test_the_convention_of_the_taps_is_a_key_with_a_default_per_family(family, convention):
    """The same numbers in the file are other layers, and what is stated wins over the family."""
    options = ToyDrafterOptions(family=family, aux_layer_ids=(1, 2, 4))
    config = toy_drafter_config(options)
    name = "aux_hidden_state_layer_ids" if family == "speculators" else "target_layer_ids"
    place = config["dflash_config"] if family == "specforge" else config
    place[name] = [2, 3, 5]
    default = parse_config(config)
    assert default.aux_layer_convention is (TapConvention.INPUT if family == "speculators" else TapConvention.OUTPUT)
    place["aux_layer_convention"] = convention.value
    stated = parse_config(config)
    assert stated.aux_layer_ids == ((2, 3, 5) if convention is TapConvention.OUTPUT else (1, 2, 4))
    assert [stated.written_tap(t) for t in stated.aux_layer_ids] == [
        f"aux layer id {written} ({convention.value} convention)" for written in (2, 3, 5)
    ]


def test_the_last_hidden_state_is_behind_the_last_norm():
    ids = {"target_layer_ids": [2, 36], "aux_layer_convention": "hidden_states"}
    facts = {"vocab_size": 151936, "hidden_size": 2560, "num_layers": 36}
    with pytest.raises(CheckpointError, match=r"aux layer id 36 \(hidden_states convention\).*behind its last norm"):
        check_target(parse_config({**QWEN3_4B, **ids}), **facts)
    check_target(parse_config({**QWEN3_4B, **ids, "aux_layer_convention": "input"}), **facts)


def test_read_config_names_the_file(tmp_path):
    with pytest.raises(CheckpointError, match="no drafter config"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    assert read_config(tmp_path) == parse_config(QWEN3_4B)
