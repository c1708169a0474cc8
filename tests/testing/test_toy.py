"""Toy checkpoints: real form on disk, reproducible, not degenerate."""

import json

import torch
from safetensors import safe_open

from outrider.models.kimi_k3.config import parse_config
from outrider.testing.reference_k3 import reference_forward, reference_greedy
from outrider.testing.toy import (
    ToyOptions,
    deep_toy,
    kimi_linear_toy,
    toy_config,
    toy_tensors,
    unquantized,
    write_toy_checkpoint,
)


def test_files_are_in_the_release_form(tmp_path):
    write_toy_checkpoint(tmp_path, ToyOptions(vision_tensors=True), seed=3)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["model_type"] == "kimi_k3" and raw["text_config"]["model_type"] == "kimi_linear"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert shards == sorted(set(index["weight_map"].values())) and len(shards) == 3
    prefixes = {name.split(".")[0] for name in index["weight_map"]}
    assert prefixes == {"language_model", "vision_tower", "mm_projector"}
    found = {}
    for shard in shards:
        with safe_open(tmp_path / shard, framework="pt") as handle:
            found |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    assert set(found) == set(index["weight_map"])
    layer = "language_model.model.layers.1."
    a_log = found[layer + "self_attn.A_log"]
    assert a_log.dtype == torch.float32 and a_log.shape == (16,)
    assert a_log[:3].all() and not a_log[3:].any()
    packed = found[layer + "block_sparse_moe.experts.0.w2.weight_packed"]
    assert packed.dtype == torch.uint8 and packed.shape == (32, 16)
    assert found[layer + "self_attn.q_proj.weight"].dtype == torch.bfloat16


def test_seed_decides_everything():
    first, again, other = (toy_tensors(ToyOptions(), seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_all_presets_parse():
    assert parse_config(toy_config(deep_toy())).num_snapshots == 4
    assert not parse_config(toy_config(kimi_linear_toy())).wrapped
    assert not parse_config(toy_config(unquantized(ToyOptions()))).moe.quantized


def test_logits_and_gates_are_not_degenerate():
    """Spread logits, different experts per token, mixes that use more than one candidate."""
    options = ToyOptions()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, options.vocab_size, (12,), generator=generator).tolist()
    reference = reference_forward(toy_tensors(options, 5), toy_config(options), ids)
    assert 0.5 < reference.logits_TV.std() < 5
    assert len(set(reference.logits_TV.argmax(-1).tolist())) > 3
    assert len({chosen for layer in reference.expert_ids for chosen in layer}) > 10
    assert (reference.mixtures_LTD[5] - reference.prefixes_LTD[5]).abs().max() > 0.5


def test_reference_is_causal_and_greedy_follows_the_logits():
    options = kimi_linear_toy()
    tensors, config = toy_tensors(options, 5), toy_config(options)
    long, short = (reference_forward(tensors, config, ids).logits_TV for ids in ((5, 7, 9, 11), (5, 7)))
    assert torch.allclose(long[:2], short, rtol=0, atol=1e-12)
    tokens = reference_greedy(tensors, config, (5, 7), 3)
    logits = reference_forward(tensors, config, (5, 7, *tokens)).logits_TV
    assert tokens == tuple(logits[1:4].argmax(-1).tolist())


def test_reference_decodes_mxfp4_by_the_table():
    """A single expert matrix with every code: low nibble first, scale 2^(code - 127)."""
    options = ToyOptions(num_layers=2, mla_layers=(1,))
    tensors, config = toy_tensors(options, 1), toy_config(options)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = torch.tensor([*table, *(-v for v in table)])
    name = "language_model.model.layers.1.block_sparse_moe.experts.{}.{}."
    for e in range(options.num_experts):
        for w in ("w1", "w2", "w3"):
            base = name.format(e, w)
            packed, scale = tensors[base + "weight_packed"], tensors[base + "weight_scale"]
            rows = []
            for row_bytes, row_scale in zip(packed.tolist(), scale.tolist(), strict=True):
                codes = [code for byte in row_bytes for code in (byte & 15, byte >> 4)]
                rows.append([values[c].item() * 2.0 ** (row_scale[i // 32] - 127) for i, c in enumerate(codes)])
            tensors[base + "weight"] = torch.tensor(rows)
    plain = {n: t for n, t in tensors.items() if not n.endswith(("weight_packed", "weight_scale"))}
    packed_only = toy_tensors(options, 1)
    first, second = (reference_forward(t, config, (3, 4, 5)).logits_TV for t in (plain, packed_only))
    assert torch.equal(first, second)
