"""Random checkpoints: loadable by the strict loaders, written once, the same from the same seed."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from outrider.bench.random_pair import RandomShape, cached_pair, load_shape, shape_names
from outrider.errors import ConfigError
from outrider.models.dspark.checkpoint import TargetTables
from outrider.models.dspark.config_json import parse_config as parse_drafter
from outrider.models.dspark.load import load_predictor
from outrider.models.inspect import describe
from outrider.models.kimi_k3.config import parse_config
from outrider.models.numerics import NumericsChoice
from outrider.models.registry import load_target
from outrider.testing.toy import ToyOptions, toy_config
from outrider.testing.toy_dspark import ToyDrafterOptions, toy_drafter_config

OPTIONS = ToyOptions(num_layers=4, mla_layers=(2, 3), attn_res_block_size=3)


@pytest.fixture
def small() -> RandomShape:
    drafter = ToyDrafterOptions(
        family="speculators", hidden_size=64, num_target_layers=4, aux_layer_ids=(0, 1, 2), draft_vocab_size=60
    )
    return RandomShape(name="small", target=toy_config(OPTIONS), drafter=toy_drafter_config(drafter))


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_pair_loads_like_any_other(small: RandomShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.random_pair.SHARD_BYTES", 60_000)  # several shards
    pair = cached_pair(small, directory=tmp_path)
    assert len(list(pair.target.glob("*.safetensors"))) > 2
    choice = NumericsChoice(probe="skip")
    target = load_target(pair.target, dtype=torch.bfloat16, numerics=choice)
    assert describe(pair.target).packed_experts
    assert pair.drafter is not None
    tables = TargetTables(embedding_VD=target.embedding, head_VD=target.lm_head)
    predictor = load_predictor(pair.drafter, target, tables, max_context=64, numerics=choice)
    assert predictor.num_draft_tokens == 4
    values = torch.cat([parameter.flatten().float() for parameter in predictor._model.parameters()])
    assert values.isfinite().all() and values.std() > 0.01


def test_it_is_written_once_and_depends_on_the_seed(small: RandomShape, tmp_path: Path) -> None:
    first = cached_pair(small, directory=tmp_path / "one")
    times = {path: path.stat().st_mtime_ns for path in first.target.iterdir()}
    assert cached_pair(small, directory=tmp_path / "one") == first
    assert {path: path.stat().st_mtime_ns for path in first.target.iterdir()} == times
    again = cached_pair(small, directory=tmp_path / "two")
    other = cached_pair(small, directory=tmp_path / "two", seed=5)
    assert digest(first.target.parent) == digest(again.target.parent) != digest(other.target.parent)
    assert not list(tmp_path.rglob("*partial*"))


def test_nothing_half_written_is_left(small: RandomShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outrider.bench.random_pair.save_file", full)
    with pytest.raises(OSError, match="No space"):
        cached_pair(small, directory=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "millions"), [("k3-60m", (55, 65)), ("k3-200m", (180, 220))])
def test_shipped_shapes_have_the_size_of_their_name(name: str, millions: tuple[int, int], tmp_path: Path) -> None:
    shape = load_shape(name)
    (tmp_path / "config.json").write_text(json.dumps(shape.target), encoding="utf-8")
    report = describe(tmp_path)
    assert millions[0] * 1e6 < report.num_parameters < millions[1] * 1e6
    assert report.packed_experts and report.config.layer_kinds[-2:] == ("mla", "mla")
    assert shape.drafter is not None
    drafter = parse_drafter(shape.drafter)
    assert drafter.num_draft_tokens == 7
    assert (drafter.target_hidden_size, drafter.vocab_size) == (report.config.hidden_size, report.config.vocab_size)


def test_the_small_shape_is_what_its_issue_asked_for() -> None:
    config = parse_config(dict(load_shape("k3-60m").target))
    assert (config.hidden_size, config.num_layers, config.attn_res_block_size, config.vocab_size) == (512, 14, 6, 8192)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.experts_per_token) == (32, 4)


def test_the_truncated_shape_has_the_layers_of_the_release() -> None:
    release = json.loads((Path(__file__).parents[1] / "data/k3_config.json").read_text(encoding="utf-8"))
    ours, theirs = load_shape("k3-truncated").target["text_config"], release["text_config"]
    shorter = {"num_hidden_layers", "num_experts", "linear_attn_config", "quantization_config"}
    unused = {"initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"}
    differing = {key for key in theirs if ours.get(key) != theirs[key]} - unused
    assert differing <= shorter
    assert {**ours["linear_attn_config"], "kda_layers": 0, "full_attn_layers": 0} == {
        **theirs["linear_attn_config"], "kda_layers": 0, "full_attn_layers": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "needs an object `target`"),
        ('{"target": 3}', "needs an object `target`"),
        ('{"target": {}, "drafter": []}', "object or null as `drafter`"),
        ("{", "not valid JSON"),
    ],
)
def test_a_file_that_is_no_shape(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "shape.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        load_shape(str(file))


def test_unknown_shapes_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"k3-200m, k3-60m, k3-truncated"):
        load_shape("k3-1t")
    with pytest.raises(ConfigError, match="cannot read"):
        load_shape(str(tmp_path / "absent.json"))
    assert shape_names() == ("k3-200m", "k3-60m", "k3-truncated")
