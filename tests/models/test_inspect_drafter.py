"""The drafter report: from config.json alone in every family, checked against headers with weights."""

import json

import pytest
from safetensors.torch import load_file

from outrider.cli.arguments import Inspect
from outrider.cli.inspect import run_inspect
from outrider.errors import CheckpointError, UnsupportedError
from outrider.models.inspect_drafter import describe_drafter, is_drafter, render_drafter
from outrider.testing.toy_dspark import ToyDrafterOptions, toy_drafter_config, write_toy_drafter

FAMILIES = {
    "deepspec": ("DeepSpec", {}),
    "specforge": ("SpecForge", {"yarn_factor": 8.0}),
    "speculators": ("speculators", {"draft_vocab_size": 41}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_config_alone_says_what_the_weights_say(family, tmp_path, capsys):
    name, extra = FAMILIES[family]
    options = ToyDrafterOptions(family=family, **extra)
    (tmp_path / "config.json").write_text(json.dumps(toy_drafter_config(options)))
    assert run_inspect(Inspect(path=str(tmp_path), json=True)) == 0
    alone = json.loads(capsys.readouterr().out)
    assert (alone["family"], alone["layout"], alone["num_draft_tokens"]) == (name, "anchor_first", 4)
    assert alone["aux_layer_ids"] == [0, 2, 4]  # output-of, whatever the family writes
    assert alone["aux_layer_convention"] == ("input" if family == "speculators" else "output")
    assert alone["draft_vocab_size"] == (options.draft_vocab_size or 97)
    assert (alone["markov"], alone["markov_rank"], alone["confidence_head"]) == ("vanilla", 16, True)
    assert alone["context_bytes_per_token"] == 2 * 2 * 2 * 8 * 2  # layers, keys and values, heads, width, bytes
    write_toy_drafter(tmp_path, options)
    tensors = load_file(tmp_path / "model.safetensors")
    report = describe_drafter(tmp_path)
    assert report.has_weights and report.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    trained = sum(t.numel() for key, t in tensors.items() if not key.endswith(("d2t", "t2d")))
    assert report.num_parameters == alone["num_parameters"] == trained


def test_rendered_report_says_it(tmp_path, capsys):
    options = ToyDrafterOptions(
        family="speculators", draft_vocab_size=41, extra_config={"sample_from_anchor": False}, confidence="hidden"
    )
    (tmp_path / "config.json").write_text(json.dumps(toy_drafter_config(options)))
    assert run_inspect(Inspect(path=str(tmp_path))) == 0
    text = capsys.readouterr().out
    for part in (
        "speculators",
        "4 rows, anchor-drop: 3 drafts",
        "after layers 0, 2, 4",
        "1, 3, 5 (input convention)",
        "41 of 97",
        "vanilla, rank 16",
    ):
        assert part in text
    assert "confidence head hidden" in text and "128 B per token" in text and "from config.json alone" in text
    assert render_drafter(describe_drafter(tmp_path)) + "\n" == text


def test_weights_of_another_drafter_and_refused_families_are_named(tmp_path):
    write_toy_drafter(tmp_path, ToyDrafterOptions())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    with pytest.raises(CheckpointError, match="has shape"):
        describe_drafter(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "k3_dspark"}))
    with pytest.raises(UnsupportedError, match="MLA body"):
        describe_drafter(tmp_path)
    assert is_drafter(config) and not is_drafter({"model_type": "kimi_k3"})
