"""Streams safetensors checkpoints by name and fills parameters with nothing left over on either side.

Only safetensors files are opened: no pickle, ever. Files are memory-mapped one at a time and each
tensor is copied straight to its place, so peak memory is about the weights once.

The strict rule of ``fill_parameters``: every tensor of the checkpoint is used exactly once (or its
prefix is skipped by name), every element of every parameter is written exactly once.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from outrider.errors import CheckpointError
from outrider.models.shards import TensorEntry, scan_checkpoint

__all__ = [
    "FLOATING",
    "Assignment",
    "CheckpointReader",
    "SourceTensor",
    "check_coverage",
    "check_names",
    "direct_assignments",
    "fill_parameters",
]

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Progress = Callable[[int, int], None]  # bytes done, bytes in total


class CheckpointReader(AbstractContextManager["CheckpointReader"]):
    """A checkpoint on disk, by tensor name.

    Opening reads headers only and checks index, shards, offsets and sizes. ``load`` maps the file of
    the tensor; one file is mapped at a time, so reading in ``names()`` order streams each file once.
    """

    def __init__(self, path: str | Path) -> None:
        """Open a directory (with or without a shard index) or one ``.safetensors`` file."""
        self.path = Path(path)
        self._entries = scan_checkpoint(self.path)
        self._open_file: Path | None = None
        self._handle: Any = None  # safetensors gives its handle no public type

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def names(self) -> tuple[str, ...]:
        """All tensor names, in file order."""
        return tuple(self._entries)

    def entry(self, name: str) -> TensorEntry:
        """Header record of ``name``; CheckpointError when the checkpoint lacks it."""
        if name not in self._entries:
            raise CheckpointError(f"tensor {name!r} is not in checkpoint {self.path.name}")
        return self._entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of ``name``, without reading its data."""
        return self.entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of ``name``, without reading its data."""
        return self.entry(name).dtype

    def num_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.num_bytes for entry in self._entries.values())

    def load(self, name: str) -> torch.Tensor:
        """Tensor ``name`` on the CPU in its stored dtype, backed by the memory map of its file."""
        entry = self.entry(name)
        try:
            if self._open_file != entry.file:
                self.close()
                self._handle = safe_open(entry.file, framework="pt", device="cpu")
                self._open_file = entry.file
            tensor: torch.Tensor = self._handle.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read tensor {name!r} from {entry.file.name}: {error}") from error
        return tensor

    def close(self) -> None:
        """Unmap the open file; the reader can still be used."""
        if self._handle is not None:
            self._handle.__exit__(None, None, None)
        self._handle = None
        self._open_file = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """What one checkpoint tensor must look like."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATING


def _only(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Default conversion: the single source as it is."""
    (tensor,) = tensors
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One or more checkpoint tensors, converted, written to rows of one parameter.

    ``rows`` is a half-open range over the parameter flattened to two dimensions (all leading
    dimensions together; the elements of a 1-d parameter); None is the whole parameter. ``convert``
    gets the source tensors in order and returns a tensor with as many elements as the rows hold; it
    may raise CheckpointError, to which the tensor names are added.
    """

    sources: tuple[SourceTensor, ...]
    parameter: str
    rows: tuple[int, int] | None = None
    convert: Callable[[tuple[torch.Tensor, ...]], torch.Tensor] = _only


def direct_assignments(
    destination: Mapping[str, torch.Tensor],
    names: Mapping[str, str],
    dtypes: tuple[torch.dtype, ...] = FLOATING,
) -> tuple[Assignment, ...]:
    """Whole-tensor assignments: checkpoint name to parameter name, equal shapes.

    Raises:
        CheckpointError: a parameter name that ``destination`` does not have.
    """
    for name, parameter in names.items():
        if parameter not in destination:
            raise CheckpointError(f"tensor {name!r} maps to parameter {parameter!r}, which does not exist")
    return tuple(
        Assignment(
            sources=(SourceTensor(name=name, shape=tuple(destination[parameter].shape), dtypes=dtypes),),
            parameter=parameter,
        )
        for name, parameter in names.items()
    )


def _destination_tensors(destination: nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name."""
    if isinstance(destination, nn.Module):
        return destination.state_dict(keep_vars=True)
    return dict(destination)


def _flat_rows(tensor: torch.Tensor) -> torch.Tensor:
    """View with all leading dimensions joined; 1-d becomes one element per row."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.dim() >= 2 else tensor.view(-1, 1)


def _num_rows(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[:-1]) if tensor.dim() >= 2 else tensor.numel()


def check_coverage(tensors: Mapping[str, torch.Tensor], assignments: Iterable[Assignment]) -> None:
    """Check that every row of every parameter is assigned exactly once; values are not read.

    Raises:
        CheckpointError: a parameter is unknown, filled twice, or not filled completely.
    """
    ranges: dict[str, list[tuple[int, int, str]]] = {name: [] for name in tensors}
    for item in assignments:
        source = item.sources[0].name
        if item.parameter not in tensors:
            raise CheckpointError(f"tensor {source!r} maps to parameter {item.parameter!r}, which does not exist")
        begin, end = item.rows if item.rows is not None else (0, _num_rows(tensors[item.parameter]))
        ranges[item.parameter].append((begin, end, source))
    for name, parts in ranges.items():
        cursor = 0
        for begin, end, source in sorted(parts):
            if begin < cursor:
                raise CheckpointError(f"rows {begin}:{cursor} of parameter {name!r} are filled twice, by {source!r}")
            if begin > cursor:
                raise CheckpointError(f"rows {cursor}:{begin} of parameter {name!r} are filled by no tensor")
            cursor = end
        if cursor != _num_rows(tensors[name]):
            raise CheckpointError(
                f"parameter {name!r} has {_num_rows(tensors[name])} rows, the checkpoint mapping fills {cursor}"
            )


def check_names(reader: CheckpointReader, assignments: Iterable[Assignment], skipped_prefixes: tuple[str, ...]) -> None:
    """Both directions by name, shape and dtype, from headers only.

    Raises:
        CheckpointError: a needed tensor is missing, used twice, or has another shape or dtype; or the
            checkpoint holds a name that nothing uses.
    """
    used: set[str] = set()
    for item in assignments:
        for source in item.sources:
            if source.name in used:
                raise CheckpointError(f"tensor {source.name!r} is used twice")
            used.add(source.name)
            if source.name not in reader:
                raise CheckpointError(
                    f"tensor {source.name!r} is missing: expected shape {source.shape}, "
                    f"dtype {_dtype_names(source.dtypes)}"
                )
            entry = reader.entry(source.name)
            if entry.shape != source.shape:
                raise CheckpointError(
                    f"tensor {source.name!r} has shape {entry.shape}, expected {source.shape} (dtype {entry.dtype})"
                )
            if entry.dtype not in source.dtypes:
                raise CheckpointError(
                    f"tensor {source.name!r} has dtype {entry.dtype}, expected {_dtype_names(source.dtypes)} "
                    f"(shape {entry.shape})"
                )
    unknown = [n for n in reader.names() if n not in used and not n.startswith(skipped_prefixes)]
    if unknown:
        entry = reader.entry(unknown[0])
        raise CheckpointError(
            f"tensor {unknown[0]!r} (shape {entry.shape}, dtype {entry.dtype}) belongs to no parameter; "
            f"{len(unknown)} unknown in all"
        )


def _dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)


def _by_file(reader: CheckpointReader, assignments: Sequence[Assignment]) -> Iterator[Assignment]:
    """Assignments ordered by the file of their first source: each file is mapped about once."""
    order = {name: position for position, name in enumerate(reader.names())}
    yield from sorted(assignments, key=lambda item: order[item.sources[0].name])


def _converted(reader: CheckpointReader, item: Assignment) -> torch.Tensor:
    """Load and convert the sources of one assignment; errors of the conversion get the tensor's name."""
    tensors = tuple(reader.load(source.name) for source in item.sources)
    try:
        return item.convert(tensors)
    except CheckpointError as error:
        names = " and ".join(repr(source.name) for source in item.sources)
        raise CheckpointError(f"tensor {names}: {error}") from error


@torch.no_grad()
def fill_parameters(
    reader: CheckpointReader,
    destination: nn.Module | Mapping[str, torch.Tensor],
    assignments: Sequence[Assignment],
    *,
    skipped_prefixes: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> None:
    """Copy a checkpoint into already allocated parameters, strictly in both directions.

    Everything is checked from headers before the first byte of data is read. Values are converted to
    the dtype and device of the parameter.

    Args:
        reader: Open checkpoint.
        destination: Module (parameters and persistent buffers) or tensors by name.
        assignments: What goes where.
        skipped_prefixes: Names that start so are left unread, e.g. ``("vision_tower.",)``.
        progress: Called after each assignment with (bytes done, bytes in total).

    Raises:
        CheckpointError: names the tensor or parameter, expected and found.
    """
    tensors = _destination_tensors(destination)
    check_coverage(tensors, assignments)
    check_names(reader, assignments, skipped_prefixes)
    total = sum(reader.entry(source.name).num_bytes for item in assignments for source in item.sources)
    done = 0
    for item in _by_file(reader, assignments):
        rows = _flat_rows(tensors[item.parameter].detach())
        begin, end = item.rows if item.rows is not None else (0, rows.shape[0])
        value = _converted(reader, item)
        target = rows[begin:end]
        if value.numel() != target.numel():
            raise CheckpointError(
                f"tensor {item.sources[0].name!r} gives {value.numel()} elements, shape {list(value.shape)}, "
                f"rows {begin}:{end} of parameter {item.parameter!r} hold {target.numel()}"
            )
        target.copy_(value.reshape(target.shape))
        done += sum(reader.entry(source.name).num_bytes for source in item.sources)
        if progress is not None:
            progress(done, total)
    reader.close()
