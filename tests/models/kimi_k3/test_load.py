"""Loading whole checkpoints: every mutation gets a named error, nothing loads half."""

import json

import pytest
import torch

from outrider.errors import CheckpointError, ConfigError, UnsupportedError
from outrider.models.registry import load_target
from outrider.testing.toy import (
    ToyOptions,
    kimi_linear_toy,
    toy_config,
    toy_tensors,
    write_tensors,
    write_toy_checkpoint,
)

OPTIONS = ToyOptions(num_layers=4, mla_layers=(2, 3), num_shards=2)
LAYER = "language_model.model.layers.1."


@pytest.fixture
def tensors():
    return toy_tensors(OPTIONS)


def load(directory, tensors, raw=None):
    write_tensors(directory, tensors, OPTIONS.num_shards)
    (directory / "config.json").write_text(json.dumps(toy_config(OPTIONS) if raw is None else raw))
    return load_target(directory, dtype=torch.float32)


def replaced(name, change):
    def mutate(tensors):
        tensors[name] = change(tensors[name])

    return mutate


def removed(name):
    def mutate(tensors):
        del tensors[name]

    return mutate


def added(name):
    def mutate(tensors):
        tensors[name] = torch.zeros(2)

    return mutate


def pad_tail(a_log):
    a_log = a_log.clone()
    a_log[-1] = 0.5
    return a_log


MUTATIONS = {
    "missing projection": (removed(LAYER + "self_attn.k_proj.weight"), r"k_proj\.weight' is missing.*\(48, 64\)"),
    "missing expert scale": (
        removed(LAYER + "block_sparse_moe.experts.5.w2.weight_scale"),
        r"experts\.5\.w2\.weight_scale' is missing",
    ),
    "unused layer-0 mix missing": (
        removed("language_model.model.layers.0.self_attention_res_proj.weight"),
        r"self_attention_res_proj\.weight' is missing",
    ),
    "unknown text name": (added("language_model.model.layers.9.x.weight"), r"layers\.9\.x\.weight' .* no parameter"),
    "unknown prefix": (added("audio_tower.x"), r"'audio_tower\.x' .* belongs to no parameter"),
    "unwrapped name": (added("model.norm.weight"), r"'model\.norm\.weight' .* belongs to no parameter"),
    "transposed": (
        replaced(LAYER + "self_attn.q_proj.weight", lambda t: t.T.contiguous()),
        r"q_proj\.weight' has shape \(64, 48\), expected \(48, 64\)",
    ),
    "A_log in bf16": (
        replaced(LAYER + "self_attn.A_log", lambda t: t.bfloat16()),
        r"A_log' has dtype torch\.bfloat16, expected torch\.float32",
    ),
    "dt_bias in bf16": (
        replaced(LAYER + "self_attn.dt_bias", lambda t: t.bfloat16()),
        r"dt_bias' has dtype torch\.bfloat16",
    ),
    "A_log with a live tail": (replaced(LAYER + "self_attn.A_log", pad_tail), r"A_log'.*must be zero padding"),
    "A_log per channel": (
        replaced(LAYER + "self_attn.A_log", lambda t: torch.zeros(48)),
        r"A_log' has shape \(48,\), expected \(16,\)",
    ),
    "packed codes in int8": (
        replaced(LAYER + "block_sparse_moe.experts.0.w1.weight_packed", lambda t: t.view(torch.int8)),
        r"w1\.weight_packed' has dtype torch\.int8, expected torch\.uint8",
    ),
    "scale code 255": (
        replaced(LAYER + "block_sparse_moe.experts.7.w3.weight_scale", lambda t: t.fill_(255)),
        r"experts\.7\.w3\.weight_scale': an MXFP4 scale code is 255",
    ),
    "one expert not quantised": (
        replaced(LAYER + "block_sparse_moe.experts.1.w1.weight_packed", lambda t: t[:, :1].contiguous()),
        r"experts\.1\.w1\.weight_packed' has shape \(32, 1\)",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutated_checkpoint_is_named(tmp_path, tensors, name):
    mutate, message = MUTATIONS[name]
    mutate(tensors)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, tensors)


CONFIG_MUTATIONS = {
    "one expert fewer": ("num_experts", 7, CheckpointError, r"gate\.weight' has shape \(8, 64\), expected \(7, 64\)"),
    "one layer fewer": ("num_hidden_layers", 3, ConfigError, r"layer 4, outside 1\.\.3"),
    "no attention residuals": ("attn_res_block_size", None, CheckpointError, "_res_.* belongs to no parameter"),
    "no latent": ("routed_expert_hidden_size", None, CheckpointError, "has shape"),
    "no MLA gate": ("mla_use_output_gate", False, CheckpointError, "g_proj.* belongs to no parameter"),
    "plain query": ("q_lora_rank", None, CheckpointError, r"q_proj\.weight' is missing"),
    "grouped selection": ("num_expert_group", 2, UnsupportedError, "num_expert_group=2"),
}


@pytest.mark.parametrize("name", CONFIG_MUTATIONS)
def test_config_that_contradicts_the_tensors(tmp_path, tensors, name):
    field, value, error, message = CONFIG_MUTATIONS[name]
    raw = toy_config(OPTIONS)
    raw["text_config"][field] = value
    with pytest.raises(error, match=message):
        load(tmp_path, tensors, raw)


def test_vision_tensors_are_skipped(tmp_path):
    options = ToyOptions(num_layers=2, mla_layers=(1,), vision_tensors=True)
    model = load_target(write_toy_checkpoint(tmp_path, options), dtype=torch.float32)
    assert not any("vision" in name for name, _ in model.named_parameters())


def test_quantisation_follows_the_tensors_not_the_config(tmp_path, tensors):
    """Rule of section 1.2: quantised iff weight_packed exists."""
    raw = toy_config(OPTIONS)
    del raw["text_config"]["quantization_config"]
    with_key = load(tmp_path, tensors)
    without = load(tmp_path, tensors, raw)
    assert torch.equal(with_key.layers[1].ffn.experts.gate_up, without.layers[1].ffn.experts.gate_up)


def test_a_nan_scale_is_refused_in_packed_form_too(tmp_path, tensors):
    MUTATIONS["scale code 255"][0](tensors)
    write_tensors(tmp_path, tensors, 1)
    (tmp_path / "config.json").write_text(json.dumps(toy_config(OPTIONS)))
    with pytest.raises(CheckpointError, match=MUTATIONS["scale code 255"][1]):
        load_target(tmp_path, dtype=torch.float32, experts="packed")


def test_packed_experts_need_packed_tensors(tmp_path):
    write_toy_checkpoint(tmp_path, kimi_linear_toy())
    with pytest.raises(CheckpointError, match="packed experts need weight_packed"):
        load_target(tmp_path, dtype=torch.float32, experts="packed")


@pytest.mark.parametrize("shape", [(3,), (16,), (1, 1, 3, 1)])
def test_stored_forms_of_a_log(tmp_path, tensors, shape):
    for name in [name for name in tensors if name.endswith("A_log")]:
        live = tensors[name][:3]
        tensors[name] = tensors[name] if shape == (16,) else live.view(shape).clone()
    model = load(tmp_path, tensors)
    assert torch.equal(model.layers[1].attention.a_log.weight, toy_tensors(OPTIONS)[LAYER + "self_attn.A_log"][:3])


def test_progress_ends_at_the_total(tmp_path):
    seen = []
    write_toy_checkpoint(tmp_path, OPTIONS)
    load_target(tmp_path, dtype=torch.float32, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(t.nbytes for t in toy_tensors(OPTIONS).values())


def test_unknown_architecture(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UnsupportedError, match="model_type 'gpt2' is not supported; supported are kimi_k3"):
        load_target(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("experts", ["unpacked", "packed"])
def test_every_parameter_is_written(tmp_path, monkeypatch, experts):
    """Memory starts as NaN and as byte 255; two different fills must give one model."""
    real_empty = torch.empty
    filled = []

    def load_over(float_value, byte_value):
        def filled_empty(*args, **kwargs):
            tensor = real_empty(*args, **kwargs)
            filled.append(tensor.numel())
            return tensor.fill_(float_value if tensor.is_floating_point() else byte_value)

        monkeypatch.setattr("outrider.models.layers.torch.empty", filled_empty)
        model = load_target(write_toy_checkpoint(tmp_path, OPTIONS), dtype=torch.float32, experts=experts)
        monkeypatch.undo()
        return dict(model.named_parameters())

    over_nan, over_ones = load_over(torch.nan, 255), load_over(1.0, 0)
    assert sum(filled) >= 2 * sum(parameter.numel() for parameter in over_nan.values())
    for name, parameter in over_nan.items():
        assert torch.isfinite(parameter).all(), name
        assert torch.equal(parameter, over_ones[name]), name


def test_bad_aux_layers(tmp_path):
    model = load_target(write_toy_checkpoint(tmp_path, OPTIONS), dtype=torch.float32)
    for ids, message in (((4,), r"aux layer id 4 is outside -1\.\.3"), ((-2,), "aux layer id -2"), ((1, 1), "twice")):
        with pytest.raises(ConfigError, match=message):
            model.set_aux_layers(ids, "mixture")
    assert model.aux_layer_ids == ()
