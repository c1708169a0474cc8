"""Which tensors the safetensors files of a checkpoint hold, read from headers and index only.

Own header parsing: names, dtypes, shapes and offsets are checked against each other, the shard index
and the file sizes before any data is touched, so a damaged download fails with a name, not a crash.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.errors import CheckpointError

__all__ = ["INDEX_NAME", "TensorEntry", "read_header", "scan_checkpoint"]

INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor as its file header describes it; no data has been read."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """``json`` hook that refuses a name given twice (plain dicts keep the last one silently)."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise CheckpointError(f"name {name!r} appears twice in one JSON object")
        found[name] = value
    return found


def _parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object strictly; every failure names the file."""
    try:
        parsed = json.loads(text, object_pairs_hook=_unique_object)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where} holds a JSON {type(parsed).__name__}, expected an object")
    return parsed


def _parse_entry(file: Path, name: str, raw: object, data_bytes: int) -> tuple[TensorEntry, int, int]:
    """Check one header entry; return it with its data offsets in bytes."""
    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{file.name}: tensor {name!r} has a malformed header entry: {raw!r}")
    if not isinstance(raw["dtype"], str) or raw["dtype"] not in DTYPES:
        raise CheckpointError(f"{file.name}: tensor {name!r} has dtype {raw['dtype']!r}, known are {', '.join(DTYPES)}")
    dtype = DTYPES[raw["dtype"]]
    numbers = [raw["shape"], raw["data_offsets"]]
    if not all(isinstance(n, list) and all(type(i) is int and i >= 0 for i in n) for n in numbers):
        raise CheckpointError(f"{file.name}: tensor {name!r} has a malformed shape or offsets: {raw!r}")
    shape = tuple(raw["shape"])
    num_bytes = math.prod(shape) * dtype.itemsize
    if len(raw["data_offsets"]) != 2 or raw["data_offsets"][1] - raw["data_offsets"][0] != num_bytes:
        raise CheckpointError(
            f"{file.name}: tensor {name!r} of shape {shape} and dtype {dtype} needs {num_bytes} bytes, "
            f"its data_offsets are {raw['data_offsets']}"
        )
    begin, end = raw["data_offsets"]
    if end > data_bytes:
        raise CheckpointError(
            f"{file.name} is truncated: tensor {name!r} ends at data byte {end}, "
            f"the file has {data_bytes}; download it again"
        )
    entry = TensorEntry(name=name, file=file, dtype=dtype, shape=shape, num_bytes=num_bytes)
    return entry, begin, end


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Read the header of one safetensors file: names, dtypes and shapes, checked against the file size.

    Raises:
        CheckpointError: truncated or malformed file, unknown dtype, duplicate name, overlapping data.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{file.name} is truncated or not a safetensors file: {size} bytes, "
                    f"header length field {header_bytes}"
                )
            header = _parse_json_object(stream.read(header_bytes), f"header of {file.name}")
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint file {file.name}: {error}") from error
    header.pop("__metadata__", None)
    data_bytes = size - 8 - header_bytes
    parsed = [_parse_entry(file, name, raw, data_bytes) for name, raw in header.items()]
    cursor = 0
    for entry, begin, end in sorted(parsed, key=lambda item: (item[1], item[2])):
        if begin != cursor:
            raise CheckpointError(
                f"{file.name}: data of tensor {entry.name!r} starts at byte {begin}, expected {cursor} (gap or overlap)"
            )
        cursor = end
    if cursor != data_bytes:
        raise CheckpointError(f"{file.name}: {data_bytes - cursor} bytes after the last tensor")
    return {entry.name: entry for entry, _, _ in parsed}


def _read_index(index_file: Path) -> dict[str, str]:
    """Read ``weight_map`` of a shard index: tensor name to file name."""
    try:
        text = index_file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint index {index_file.name}: {error}") from error
    index = _parse_json_object(text, index_file.name)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index_file.name} has no 'weight_map' object of tensor name to file name")
    for name, file_name in weight_map.items():
        if Path(file_name).name != file_name or not file_name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index_file.name}: tensor {name!r} points to {file_name!r}; "
                "expected the bare name of a .safetensors file in the same directory"
            )
    return weight_map


def _indexed_entries(index_file: Path) -> dict[str, TensorEntry]:
    """Entries of a sharded checkpoint; index and shard headers must agree in both directions."""
    weight_map = _read_index(index_file)
    entries: dict[str, TensorEntry] = {}
    for file_name in sorted(set(weight_map.values())):
        shard = index_file.parent / file_name
        if not shard.is_file():
            name = min(n for n, f in weight_map.items() if f == file_name)
            raise CheckpointError(f"shard {file_name} is missing, needed for tensor {name!r}")
        for name, entry in read_header(shard).items():
            if weight_map.get(name) != file_name:
                raise CheckpointError(
                    f"tensor {name!r} is in shard {file_name}, "
                    f"{index_file.name} places it in {weight_map.get(name, 'no shard')}"
                )
            entries[name] = entry
    for name, file_name in weight_map.items():
        if name not in entries:
            raise CheckpointError(f"{index_file.name} places tensor {name!r} in {file_name}, not found there")
    return entries


def _plain_entries(files: Sequence[Path]) -> dict[str, TensorEntry]:
    """Entries of one or several files without an index; a name may exist once only."""
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                raise CheckpointError(f"tensor {name!r} is in both {entries[name].file.name} and {file.name}")
            entries[name] = entry
    return entries


def scan_checkpoint(path: Path) -> dict[str, TensorEntry]:
    """Find the safetensors files of ``path`` (a directory or one file) and read their headers."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise CheckpointError(f"{path.name} is not a .safetensors file; other formats are not loaded")
        return _plain_entries([path])
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist")
    index_file = path / INDEX_NAME
    if index_file.is_file():
        return _indexed_entries(index_file)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickles = sorted(f.name for f in path.iterdir() if f.suffix in PICKLE_SUFFIXES)
        found = f"; {pickles[0]} is a pickle file and is never opened, convert it" if pickles else ""
        raise CheckpointError(f"no .safetensors file in {path}{found}")
    return _plain_entries(files)
