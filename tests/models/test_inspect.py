"""The architecture report: exact counts for the release from its config, real bytes for a toy."""

import json
import shutil
from pathlib import Path

import pytest

from outrider.errors import CheckpointError, ConfigError
from outrider.models.inspect import describe, render
from outrider.testing.toy import ToyOptions, toy_tensors, write_toy_checkpoint

K3_CONFIG = Path(__file__).parents[1] / "data" / "k3_config.json"


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    directory = tmp_path_factory.mktemp("k3")
    shutil.copy(K3_CONFIG, directory / "config.json")
    return describe(directory)


def test_release_counts_from_config_alone(release):
    assert not release.has_weights and release.packed_experts
    assert release.num_parameters == 2_779_484_476_000
    assert release.num_active == 104_189_612_640
    assert release.num_tensors == 497_052
    by_name = {kind.name: kind for kind in release.kinds}
    assert by_name["routed experts"].num_parameters == 2_722_740_830_208
    assert release.num_parameters - by_name["routed experts"].num_parameters == 56_743_645_792
    assert by_name["routed experts"].num_bytes == 17_547_264 * 896 * 92


def test_release_cache_bytes(release):
    assert release.latents.bytes_per_token == 27_648
    assert round(release.recurrent.state_bytes_per_slot / 1e6, 1) == 434.1
    assert round(release.recurrent.bytes_per_slot / 1e6, 1) == 449.4


def test_rendered_report_says_it(release):
    text = render(release)
    for part in (
        "2,779,484,476,000",
        "104,189,612,640",
        "27,648 B per token",
        "434.110 MB",
        "449.372 MB",
        "22x(3K M) 3K 2M",
        "D 92S",
        "block 12, 8 snapshots",
        "MXFP4",
    ):
        assert part in text


def test_toy_bytes_come_from_the_files(tmp_path):
    options = ToyOptions(vision_tensors=True)
    report = describe(write_toy_checkpoint(tmp_path, options))
    tensors = {n: t for n, t in toy_tensors(options).items() if n.startswith("language_model.")}
    assert report.has_weights
    assert report.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert report.num_tensors == len(tensors)
    assert "from the files" in render(report)


def test_wrong_checkpoints_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        describe(tmp_path)
    write_toy_checkpoint(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["text_config"]["vocab_size"] += 1
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight' has shape \(97, 64\), expected \(98, 64\)"):
        describe(tmp_path)
