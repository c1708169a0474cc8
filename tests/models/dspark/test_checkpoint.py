import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import CheckpointError, ConfigError
from outrider.models.dspark.checkpoint import TargetTables, check_headers, load_model, normalise_name
from outrider.models.weights import CheckpointReader
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(0)
EMBEDDING = torch.randn(97, 32, generator=GENERATOR).to(torch.bfloat16)
HEAD = torch.randn(97, 32, generator=GENERATOR).to(torch.bfloat16)
TABLES = TargetTables(embedding_VD=EMBEDDING, head_VD=HEAD)
COPIES = {"embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}

FORMATS = {
    "deepspec": ToyDrafterOptions(family="deepspec"),
    "deepspec-dflash": ToyDrafterOptions(family="deepspec", markov_rank=0, confidence="none"),
    "deepspec-gated": ToyDrafterOptions(markov_kind="gated", tap_norm=True),
    "deepspec-rnn": ToyDrafterOptions(markov_kind="rnn", confidence="hidden"),
    "specforge": ToyDrafterOptions(family="specforge", yarn_factor=16.0),
    "speculators": ToyDrafterOptions(family="speculators"),
    "speculators-reduced": ToyDrafterOptions(family="speculators", draft_vocab_size=33),
    "no-confidence-bias": ToyDrafterOptions(confidence_bias=False),
}


def load(directory, tables=TABLES, dtype=torch.bfloat16):
    return load_model(directory, tables, dtype=dtype, device=CPU)


def edit(directory, change):
    """Apply ``change`` to the tensors of a written checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("with_copies", [False, True])
def test_round_trip(name, with_copies, tmp_path):
    options = FORMATS[name]
    copies = dict(COPIES) if with_copies else {}
    if options.draft_vocab_size is not None:
        copies.pop("lm_head.weight", None)  # the drafter's own head has that name
    weights = write_toy_drafter(tmp_path, options, copies=copies, dtype=torch.bfloat16)
    state = load(tmp_path).state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[key], weights[key]) for key in weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_copies_are_compared_in_the_targets_dtype(dtype, tmp_path):
    write_toy_drafter(tmp_path, FORMATS["deepspec"], copies=COPIES, dtype=torch.bfloat16)
    load(tmp_path, TargetTables(embedding_VD=EMBEDDING.to(dtype), head_VD=HEAD.to(dtype)), dtype)


def test_copies_are_compared_in_the_narrower_dtype(tmp_path):
    """A float32 target and a drafter that copied it in bfloat16."""
    wide = {name: table.float() + 1e-5 * torch.rand(table.shape) for name, table in COPIES.items()}
    write_toy_drafter(
        tmp_path, FORMATS["deepspec"], copies={n: t.bfloat16() for n, t in wide.items()}, dtype=torch.bfloat16
    )
    tables = TargetTables(embedding_VD=wide["embed_tokens.weight"], head_VD=wide["lm_head.weight"])
    load(tmp_path, tables, torch.float32)
    tables.head_VD[96, 31] += 0.5
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' differs"):
        load(tmp_path, tables, torch.float32)


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_another_target_is_named(name, tmp_path):
    other = COPIES[name].clone()
    other[96, 31] += 1  # the last value of the last row
    write_toy_drafter(tmp_path, FORMATS["deepspec"], copies={**COPIES, name: other}, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=f"'{name}' differs"):
        load(tmp_path)
    write_toy_drafter(tmp_path, FORMATS["deepspec"], copies={**COPIES, name: other[:5]}, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="shape"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["fc.weight", "layers.1.self_attn.k_norm.weight", "markov_head.markov_w2.weight", "confidence_head.proj.bias"],
)
def test_a_missing_tensor_is_named(name, tmp_path):
    write_toy_drafter(tmp_path, FORMATS["deepspec"])
    edit(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"'{name}'.*missing"):
        load(tmp_path)


def test_an_unknown_tensor_is_named(tmp_path):
    write_toy_drafter(tmp_path, FORMATS["specforge"])
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.kv_b_proj.weight": torch.zeros(4, 4)}))
    with pytest.raises(CheckpointError, match=r"kv_b_proj\.weight' belongs to no parameter"):
        load(tmp_path)


def test_a_body_of_other_sizes_is_refused(tmp_path):
    write_toy_drafter(tmp_path, FORMATS["deepspec"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 4}))
    with pytest.raises(CheckpointError, match=r"k_proj.weight' has shape \(16, 32\), expected \(32, 32\)"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "target_layer_ids": [0, 2]}))
    with pytest.raises(CheckpointError, match=r"'fc\.weight' has shape"):
        load(tmp_path)


def test_names_of_all_spellings():
    assert normalise_name("model.layers.0.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    assert normalise_name("draft_model.model.context_proj.weight") == "fc.weight"
    assert normalise_name("logit_head.markov_head.markov_w1.weight") == "markov_head.markov_w1.weight"
    assert normalise_name("context_norm.weight") == "hidden_norm.weight"
    assert normalise_name("final_norm.weight") == "norm.weight"
    assert normalise_name("norm.weight") == "norm.weight"


def test_two_spellings_of_one_tensor_are_refused(tmp_path):
    write_toy_drafter(tmp_path, FORMATS["deepspec"])
    edit(tmp_path, lambda tensors: tensors.update({"context_proj.weight": tensors["fc.weight"].clone()}))
    with pytest.raises(CheckpointError, match=r"both mean 'fc.weight'"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t["d2t"].add_(97), "outside the vocabulary"),
        (lambda t: t["d2t"].copy_(-torch.arange(33)), "two draft ids"),
        (lambda t: t["t2d"].logical_not_(), "t2d marks 64"),
        (lambda t: t.update(t2d=t["t2d"].roll(1)), "name different target ids"),
        (lambda t: t.pop("d2t"), "'d2t'.*missing"),
        (lambda t: (t.pop("d2t"), t.pop("lm_head.weight")), "'d2t' of shape .* is missing; 2 missing"),
        (lambda t: t.update(d2t=t["d2t"].float()), "dtype"),
    ],
)
def test_damaged_vocabulary_maps_are_refused(change, words, tmp_path):
    write_toy_drafter(tmp_path, FORMATS["speculators-reduced"])
    edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


def test_a_full_vocabulary_may_carry_an_identity_map(tmp_path):
    options = FORMATS["speculators"]
    identity = {"d2t": torch.zeros(97, dtype=torch.int64), "t2d": torch.ones(97, dtype=torch.bool)}
    write_toy_drafter(tmp_path, options, copies={**COPIES, **identity, "verifier_norm.weight": torch.ones(32)})
    assert load(tmp_path).d2t is None
    edit(tmp_path, lambda tensors: tensors["d2t"].add_(1))
    with pytest.raises(CheckpointError, match="d2t moves ids"):
        load(tmp_path)


def test_a_contradictory_config_is_refused_before_weights(tmp_path):
    write_toy_drafter(tmp_path, ToyDrafterOptions(mask_token_id=97))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="mask_token_id=97"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_head_that_is_not_stored_is_the_targets_rows_of_d2t(dtype, tmp_path):
    """And it is never the draft vocabulary's first rows: the map of the toy leaves ids out."""
    tables = TargetTables(embedding_VD=EMBEDDING.to(dtype), head_VD=HEAD.to(dtype))
    weights = write_toy_drafter(tmp_path, FORMATS["speculators-reduced"], dtype=torch.bfloat16)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    model = load(tmp_path, tables, dtype)
    ids = torch.arange(33) + weights["d2t"]
    assert not torch.equal(ids, torch.arange(33))
    assert model.lm_head is not None and torch.equal(model.lm_head.weight, tables.head_VD[ids])
    with CheckpointReader(tmp_path) as reader:
        check_headers(reader, model)


def test_a_head_that_is_not_stored_needs_the_targets_width_and_rows(tmp_path):
    write_toy_drafter(tmp_path, FORMATS["speculators-reduced"], dtype=torch.bfloat16)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match="stores no head and has width 32, but the target's head has width 16"):
        load(tmp_path, TargetTables(embedding_VD=EMBEDDING, head_VD=HEAD[:, :16]))
    with pytest.raises(CheckpointError, match="the target's head has 40 rows"):
        load(tmp_path, TargetTables(embedding_VD=EMBEDDING, head_VD=HEAD[:40]))


def test_a_full_vocabulary_without_a_head_uses_the_targets(tmp_path):
    write_toy_drafter(tmp_path, FORMATS["deepspec"], dtype=torch.bfloat16)
    assert load(tmp_path).lm_head is None
