"""The strict loader: every damage has a name, nothing is left over on either side."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.errors import CheckpointError
from outrider.models.shards import INDEX_NAME
from outrider.models.weights import (
    Assignment,
    CheckpointReader,
    SourceTensor,
    direct_assignments,
    fill_parameters,
)

A = torch.arange(6, dtype=torch.float32).view(2, 3)
B = torch.arange(4, dtype=torch.bfloat16)


def write_sharded(directory: Path) -> Path:
    save_file({"a": A}, directory / "model-1.safetensors")
    save_file({"b": B}, directory / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return directory


def edit_index(directory: Path, **changes: str | None) -> None:
    index = json.loads((directory / INDEX_NAME).read_text())
    for name, file_name in changes.items():
        if file_name is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = file_name
    (directory / INDEX_NAME).write_text(json.dumps(index))


def raw_file(path: Path, header: str, data: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)


def test_reads_names_shapes_and_data(tmp_path):
    reader = CheckpointReader(write_sharded(tmp_path))
    assert set(reader.names()) == {"a", "b"}
    assert reader.shape("a") == (2, 3)
    assert reader.dtype("b") == torch.bfloat16
    assert reader.num_bytes() == 24 + 8
    assert torch.equal(reader.load("a"), A)
    assert torch.equal(reader.load("b"), B)
    assert torch.equal(reader.load("a"), A)  # back to an earlier file


def test_single_file_and_plain_directory(tmp_path):
    save_file({"a": A}, tmp_path / "x.safetensors")
    assert CheckpointReader(tmp_path).names() == ("a",)
    assert CheckpointReader(tmp_path / "x.safetensors").names() == ("a",)


def test_headers_alone_are_read_at_open(tmp_path):
    """Opening must not read data: a sparse 1 TB file opens at once."""
    size = 1 << 40
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    file = tmp_path / "big.safetensors"
    raw_file(file, header)
    with file.open("r+b") as stream:
        stream.truncate(8 + len(header) + size)
    assert CheckpointReader(file).shape("w") == (size,)


DAMAGE = {
    "missing shard": (lambda d: (d / "model-2.safetensors").unlink(), "shard model-2.safetensors is missing.*'b'"),
    "index names a tensor the shard lacks": (
        lambda d: edit_index(d, c="model-1.safetensors"),
        "'c' in model-1.safetensors, not found there",
    ),
    "index places a tensor in another shard": (
        lambda d: edit_index(d, b="model-1.safetensors"),
        "'b' in model-1.safetensors, not found there",
    ),
    "shard holds a tensor the index lacks": (
        lambda d: save_file({"b": B, "x": A}, d / "model-2.safetensors"),
        "'x' is in shard model-2.safetensors, .* no shard",
    ),
    "index points outside": (
        lambda d: edit_index(d, b="../model-2.safetensors"),
        "bare name of a .safetensors file",
    ),
    "index points to a pickle": (lambda d: edit_index(d, b="model.bin"), "bare name of a .safetensors file"),
    "index is not JSON": (lambda d: (d / INDEX_NAME).write_text("{"), "not valid JSON"),
    "index has no map": (lambda d: (d / INDEX_NAME).write_text("{}"), "no 'weight_map'"),
    "index has a name twice": (
        lambda d: (d / INDEX_NAME).write_text('{"weight_map": {"a": "m.safetensors", "a": "n.safetensors"}}'),
        "'a' appears twice",
    ),
    "truncated data": (
        lambda d: (d / "model-1.safetensors").write_bytes((d / "model-1.safetensors").read_bytes()[:-1]),
        "model-1.safetensors is truncated: tensor 'a'",
    ),
    "truncated header": (
        lambda d: (d / "model-1.safetensors").write_bytes((d / "model-1.safetensors").read_bytes()[:20]),
        "model-1.safetensors is truncated",
    ),
    "empty file": (lambda d: (d / "model-1.safetensors").write_bytes(b""), "model-1.safetensors is truncated"),
    "trailing bytes": (
        lambda d: (d / "model-1.safetensors").write_bytes((d / "model-1.safetensors").read_bytes() + b"x"),
        "1 bytes after the last tensor",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoint_is_named(tmp_path, name):
    damage, message = DAMAGE[name]
    damage(write_sharded(tmp_path))
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tmp_path)


BAD_HEADERS = {
    "unknown dtype": ('{"w": {"dtype": "F7", "shape": [1], "data_offsets": [0, 1]}}', "'w' has dtype 'F7'"),
    "wrong offsets": ('{"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}}', "'w' .*needs 2 bytes"),
    "negative shape": ('{"w": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}', "'w'.*malformed shape"),
    "not an object": ("[]", "expected an object"),
    "missing key": ('{"w": {"dtype": "U8", "shape": [1]}}', "'w' has a malformed header entry"),
    "name twice": (
        '{"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, '
        '"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
        "'w' appears twice",
    ),
    "overlap": (
        '{"v": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, '
        '"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
        "gap or overlap",
    ),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_malformed_header_is_named(tmp_path, name):
    header, message = BAD_HEADERS[name]
    raw_file(tmp_path / "m.safetensors", header, b"\0")
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tmp_path)


def test_duplicate_across_files_without_index(tmp_path):
    save_file({"a": A}, tmp_path / "x.safetensors")
    save_file({"a": A}, tmp_path / "y.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' is in both x\.safetensors and y\.safetensors"):
        CheckpointReader(tmp_path)


def test_pickle_is_never_opened(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle file and is never opened"):
        CheckpointReader(tmp_path)
    with pytest.raises(CheckpointError, match="other formats are not loaded"):
        CheckpointReader(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="does not exist"):
        CheckpointReader(tmp_path / "nothing")


def fill(directory: Path, destination: dict[str, torch.Tensor], *assignments: Assignment, **options: object) -> None:
    fill_parameters(CheckpointReader(directory), destination, assignments, **options)


def one(name: str, shape: tuple[int, ...], parameter: str, rows: tuple[int, int] | None = None) -> Assignment:
    return Assignment(sources=(SourceTensor(name=name, shape=shape),), parameter=parameter, rows=rows)


def test_fills_joined_rows_and_casts(tmp_path):
    write_sharded(tmp_path)
    joined = torch.full((3, 3), torch.nan, dtype=torch.float64)
    tail = torch.full((4,), torch.nan)
    save_file({"b": B, "c": torch.ones(1, 3)}, tmp_path / "model-2.safetensors")
    edit_index(tmp_path, c="model-2.safetensors")
    seen: list[tuple[int, int]] = []
    fill(
        tmp_path,
        {"joined": joined, "tail": tail},
        one("c", (1, 3), "joined", (2, 3)),
        one("a", (2, 3), "joined", (0, 2)),
        one("b", (4,), "tail"),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert torch.equal(joined, torch.cat([A, torch.ones(1, 3)]).double())
    assert torch.equal(tail, B.float())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (24 + 8 + 12, 24 + 8 + 12)


def test_direct_assignments(tmp_path):
    save_file({"old": A}, tmp_path / "x.safetensors")
    destination = {"new": torch.zeros(2, 3)}
    fill(tmp_path, destination, *direct_assignments(destination, {"old": "new"}))
    assert torch.equal(destination["new"], A)
    with pytest.raises(CheckpointError, match="'old' maps to parameter 'other', which does not exist"):
        direct_assignments(destination, {"old": "other"})


MISMATCHES = {
    "missing tensor": ([one("z", (2, 3), "p")], {"p": (2, 3)}, r"'z' is missing: expected shape \(2, 3\)"),
    "wrong shape": ([one("a", (3, 2), "p")], {"p": (3, 2)}, r"'a' has shape \(2, 3\), expected \(3, 2\)"),
    "unused tensor": ([one("a", (2, 3), "p")], {"p": (2, 3)}, r"'b' .* belongs to no parameter"),
    "used twice": (
        [one("a", (2, 3), "p"), one("a", (2, 3), "q"), one("b", (4,), "r")],
        {"p": (2, 3), "q": (2, 3), "r": (4,)},
        "'a' is used twice",
    ),
    "unknown parameter": ([one("a", (2, 3), "nope")], {"p": (2, 3)}, "parameter 'nope', which does not exist"),
    "unfilled parameter": (
        [one("a", (2, 3), "p"), one("b", (4,), "q")],
        {"p": (2, 3), "q": (4,), "r": (1,)},
        "parameter 'r' has 1 rows, the checkpoint mapping fills 0",
    ),
    "gap": ([one("a", (2, 3), "p", (1, 3))], {"p": (3, 3)}, "rows 0:1 of parameter 'p' are filled by no tensor"),
    "overlap": (
        [one("a", (2, 3), "p", (0, 2)), one("b", (4,), "p", (1, 3))],
        {"p": (3, 3)},
        "rows 1:2 of parameter 'p' are filled twice",
    ),
    "too few elements": (
        [one("a", (2, 3), "p"), one("b", (4,), "q")],
        {"p": (2, 4), "q": (4,)},
        "'a' gives 6 elements.*hold 8",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch_is_named(tmp_path, name):
    assignments, shapes, message = MISMATCHES[name]
    destination = {parameter: torch.zeros(shape) for parameter, shape in shapes.items()}
    with pytest.raises(CheckpointError, match=message):
        fill(write_sharded(tmp_path), destination, *assignments)


def test_wrong_dtype_is_named(tmp_path):
    save_file({"a": A}, tmp_path / "x.safetensors")
    source = SourceTensor(name="a", shape=(2, 3), dtypes=(torch.uint8,))
    with pytest.raises(CheckpointError, match=r"'a' has dtype torch\.float32, expected torch\.uint8"):
        fill(tmp_path, {"p": torch.zeros(2, 3)}, Assignment(sources=(source,), parameter="p"))


def test_skipped_prefix_is_not_read(tmp_path):
    save_file({"a": A, "vision_tower.x": A.clone()}, tmp_path / "x.safetensors")
    destination = {"p": torch.zeros(2, 3)}
    fill(tmp_path, destination, one("a", (2, 3), "p"), skipped_prefixes=("vision_tower.",))
    assert torch.equal(destination["p"], A)


def test_nothing_is_written_when_names_do_not_match(tmp_path):
    destination = {"p": torch.zeros(2, 3)}
    with pytest.raises(CheckpointError):
        fill(write_sharded(tmp_path), destination, one("a", (2, 3), "p"))
    assert not destination["p"].any()
