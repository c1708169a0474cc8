"""Published drafters at their full sizes, shapes only: no storage is taken for any weight."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import CheckpointError, UnsupportedError
from outrider.models.dspark.config import BlockLayout, MarkovKind
from outrider.models.dspark.config_json import parse_config
from outrider.models.dspark.model import DSparkModel
from outrider.models.inspect_drafter import describe_drafter
from outrider.testing.published_drafters import KIMI_K3_INFERACT, PUBLISHED, QWEN3_4B

DTYPES = {"d2t": ("I64", 8), "t2d": ("BOOL", 1)}
COPIES = ("embed_tokens.weight", "t2d")


def write_headers(directory: Path, config: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """config.json and one safetensors file of the right length whose data is a hole."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    header, begin = {}, 0
    for name, shape in shapes.items():
        dtype, size = DTYPES.get(name, ("BF16", 2))
        end = begin + size * int(torch.Size(shape).numel())
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + begin)


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_shapes_of_the_file_are_those_of_the_module(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    write_headers(tmp_path, published.config, published.shapes)
    report = describe_drafter(tmp_path)
    assert report.has_weights
    reduced = report.config.reduced_vocabulary
    copies = {*COPIES, "d2t", *(() if reduced else ("lm_head.weight",))}
    trained = {n: torch.Size(shape).numel() for n, shape in published.shapes.items() if n not in copies}
    assert report.num_parameters == sum(trained.values())
    if published.num_parameters is not None:
        assert report.num_parameters == published.num_parameters
    with torch.device("meta"):
        state = DSparkModel(report.config).state_dict()
    assert state.keys() == (trained.keys() | {"d2t"} if reduced else trained.keys())
    assert all(tuple(state[n].shape) == published.shapes[n] for n in state)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_missing_an_extra_and_a_misshapen_tensor_are_named(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    last = f"layers.{parse_config(published.config).num_layers - 1}.mlp.down_proj.weight"
    damaged = {
        "missing": {n: shape for n, shape in published.shapes.items() if n != last},
        "belongs to no parameter": {**published.shapes, "layers.0.self_attn.kv_b_proj.weight": (16, 16)},
        "has shape": {**published.shapes, last: published.shapes[last][::-1]},
    }
    for words, shapes in damaged.items():
        write_headers(tmp_path, published.config, shapes)
        with pytest.raises(CheckpointError, match=words):
            describe_drafter(tmp_path)


def test_prefixes_and_the_spellings_of_specforge_load_too(tmp_path: Path) -> None:
    published = PUBLISHED["RadixArk Kimi-K3"]
    for prefix in ("model.", "draft_model.", "logit_head."):
        renamed = {prefix + n: shape for n, shape in published.shapes.items()}
        write_headers(tmp_path, published.config, renamed)
        assert describe_drafter(tmp_path).num_parameters == published.num_parameters


def test_layouts_and_heads_follow_the_checkpoint_not_its_name() -> None:
    parsed = {name: parse_config(published.config) for name, published in PUBLISHED.items()}
    for size in ("4b", "8b", "14b"):
        dspark, dflash = parsed[f"dspark_qwen3_{size}_block7"], parsed[f"dflash_qwen3_{size}_block7"]
        assert dspark.layout is dflash.layout is BlockLayout.ANCHOR_FIRST
        assert dspark.num_draft_tokens == dflash.num_draft_tokens == 7
        assert (dflash.markov, dflash.confidence) == (MarkovKind.NONE, None)
    assert parsed["dspark_qwen3_14b_block7"].aux_layer_ids == (1, 10, 19, 28, 37)
    assert parsed["Qwen3-0.6B speculators, reduced"].aux_layer_ids == (1, 13, 24)  # ids of layer inputs
    assert parsed["GLM-5.2 speculators"].layout is BlockLayout.ANCHOR_DROP  # it lacks the key


def test_an_mla_drafter_is_refused_and_never_loads_as_gqa(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="K3DSparkModel has an MLA body"):
        parse_config(KIMI_K3_INFERACT)
    # The same file under the config of a grouped-query drafter: the names give it away.
    mla = {"context_proj.weight": (2560, 12800), "layers.0.self_attn.kv_a_proj_with_mqa.weight": (576, 2560)}
    write_headers(tmp_path, QWEN3_4B, mla)
    with pytest.raises(CheckpointError, match="kv_a_proj_with_mqa"):
        describe_drafter(tmp_path)
