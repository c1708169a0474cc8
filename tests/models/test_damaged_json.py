"""Any field of a config may hold any JSON value: the answer is a config or a UserError, never another exception."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import UserError
from outrider.models.dspark.config_json import parse_config as parse_drafter
from outrider.models.dspark.config_json import read_config as read_drafter
from outrider.models.fields import read_config_json
from outrider.models.kimi_k3.config import parse_config as parse_target
from outrider.models.shards import read_header
from outrider.testing.toy import ToyOptions, kimi_linear_toy, toy_config
from outrider.testing.toy_dspark import ToyDrafterOptions, toy_drafter_config

MAX_MESSAGE_CHARS = 600
ODD_VALUES: tuple[object, ...] = (
    None, True, 0, -1, 1.5, 1e308, float("nan"), float("inf"), 2**31, 10**12, 10**400, "", "x", "\ud800",
    [], [1], [None], ["a"], [[1]], {}, {"a": 1},
)  # fmt: skip

DRAFTERS = [
    toy_drafter_config(
        ToyDrafterOptions(
            family=family, yarn_factor=4.0, layer_types=("full_attention", "sliding_attention"), sliding_window=5
        )
    )
    for family in ("deepspec", "specforge", "speculators")
]
TARGETS = [toy_config(ToyOptions()), toy_config(kimi_linear_toy())]


def paths(node: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Places of all values in a document; of a list only the first element."""
    if path:
        yield path
    items = node.items() if isinstance(node, dict) else enumerate(node[:1]) if isinstance(node, list) else ()
    for key, child in items:
        yield from paths(child, (*path, key))


def variants(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The document with each value replaced by each odd one."""
    for path in paths(document):
        for value in ODD_VALUES:
            changed = copy.deepcopy(document)
            section = changed
            for key in path[:-1]:
                section = section[key]
            section[path[-1]] = value
            yield f"{path}={str(value)[:40]!r}", changed


@pytest.mark.parametrize(
    ("parse", "document"),
    [*((parse_drafter, document) for document in DRAFTERS), *((parse_target, document) for document in TARGETS)],
)
def test_odd_values_are_refused_with_a_short_message(
    parse: Callable[[dict[str, Any]], object], document: dict[str, Any]
) -> None:
    num_refused = 0
    for name, changed in variants(document):
        try:
            parse(changed)
        except UserError as error:
            num_refused += 1
            assert len(str(error)) < MAX_MESSAGE_CHARS, name
        except Exception as error:
            pytest.fail(f"{name}: {type(error).__name__}: {error}")
    assert num_refused > 200


@pytest.mark.parametrize("read", [read_drafter, read_config_json])
def test_files_that_are_no_json_object_are_refused(read: Callable[[Path], object], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for content in (b"", b"{", b"[]", b"null", b'{"a": "\xff\xfe"}', b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"config\.json"):
            read(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match="cannot read"):
        read(tmp_path)


def test_odd_values_in_a_tensor_header_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    good = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    num_refused = 0
    for name, changed in variants(good):
        header = json.dumps(changed).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        try:
            read_header(file)
        except UserError as error:
            num_refused += 1
            assert "model.safetensors" in str(error), name
    assert num_refused > 80


@pytest.mark.parametrize(
    ("name", "value"),
    [("rms_norm_eps", -1e-6), ("rms_norm_eps", 0), ("activation_situ_beta", 0), ("activation_situ_linear_beta", -1)],
)
def test_divisors_must_be_positive(name: str, value: float) -> None:
    raw = toy_config(ToyOptions())
    raw["text_config"][name] = value
    with pytest.raises(UserError, match=f"{name}=.*above 0"):
        parse_target(raw)


def test_sizes_that_would_never_end_are_refused() -> None:
    for name in ("num_hidden_layers", "num_experts"):
        raw = toy_config(ToyOptions())
        raw["text_config"][name] = 2_000_000_000
        with pytest.raises(UserError, match=f"{name}=2000000000 exceeds"):
            parse_target(json.loads(json.dumps(raw)))


def test_a_block_beyond_the_attention_tile_is_refused() -> None:
    raw = toy_drafter_config(ToyDrafterOptions())
    assert parse_drafter({**raw, "block_size": 64}).num_block_rows == 64
    with pytest.raises(UserError, match="block_size=65"):
        parse_drafter({**raw, "block_size": 65})
