"""Random checkpoints of a chosen size, in the real forms, to measure with: their speed is that of trained ones.

A shape is a JSON file with the `config.json` of a target under ``target`` and that of its DSpark drafter, or
null, under ``drafter``. The checkpoints that are written from it load like any other.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.config import user_cache_directory
from outrider.errors import ConfigError
from outrider.models.dspark.config import DSparkConfig
from outrider.models.dspark.config_json import parse_config as parse_drafter_config
from outrider.models.dspark.model import DSparkModel
from outrider.models.kimi_k3.config import parse_config
from outrider.models.layers import shapes_only
from outrider.models.shards import INDEX_NAME
from outrider.testing.toy import release_tensors

__all__ = ["RandomPair", "RandomShape", "cached_pair", "load_shape", "shape_names", "write_pair"]

WRITER_VERSION = 1  # raise it when the same shape and seed give other files
SHARD_BYTES = 2 * 10**9
SHAPES = "shapes"


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomShape:
    """A size of target and drafter, as the JSON objects of their configs."""

    name: str
    target: Mapping[str, Any]
    drafter: Mapping[str, Any] | None

    @property
    def digest(self) -> str:
        """Twelve hex digits that change with either config and with the way of writing."""
        content = json.dumps([WRITER_VERSION, self.target, self.drafter], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPair:
    """Checkpoint directories of a shape."""

    target: Path
    drafter: Path | None


def shape_names() -> tuple[str, ...]:
    """The shapes that come with the package."""
    folder = resources.files("outrider.bench") / SHAPES
    return tuple(sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json")))


def load_shape(name: str) -> RandomShape:
    """A shape of the package by name, or one from a ``.json`` file.

    Raises:
        ConfigError: there is no such shape, or the file holds none.
    """
    if name in shape_names():
        text = (resources.files("outrider.bench") / SHAPES / f"{name}.json").read_text(encoding="utf-8")
    elif name.endswith(".json"):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the shape {name}: {error}; give a UTF-8 JSON file") from error
    else:
        raise ConfigError(f"no random shape {name!r}; use {', '.join(shape_names())} or a .json file")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the shape {name} is not valid JSON: {error}") from error
    return _shape_of(Path(name).stem if name.endswith(".json") else name, content)


def _shape_of(name: str, content: object) -> RandomShape:
    if not isinstance(content, dict) or not isinstance(content.get("target"), dict):
        raise ConfigError(f"the shape {name} needs an object `target`: the config.json of a model")
    drafter = content.get("drafter")
    if drafter is not None and not isinstance(drafter, dict):
        raise ConfigError(f"the shape {name} needs an object or null as `drafter`: the config.json of a drafter")
    return RandomShape(name=name, target=content["target"], drafter=drafter)


def cached_pair(shape: RandomShape, *, seed: int = 0, directory: Path | None = None) -> RandomPair:
    """The checkpoints of a shape, written at the first call and kept in the user's cache folder.

    Args:
        shape: what to write.
        seed: of the weights.
        directory: where to keep it; None is the user's cache.

    Raises:
        ConfigError, UnsupportedError: a config of the shape is out of range or not offered.
    """
    base = directory or user_cache_directory() / "random"
    folder = base / f"{shape.name}-{shape.digest}-{seed}"
    pair = RandomPair(target=folder / "target", drafter=None if shape.drafter is None else folder / "drafter")
    if folder.is_dir():
        return pair
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        write_pair(shape, partial, seed=seed)
        try:
            partial.rename(folder)  # whole or not at all, also when two processes write
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return pair


def write_pair(shape: RandomShape, folder: Path, *, seed: int) -> None:
    """Write ``target`` and, if the shape has one, ``drafter`` under ``folder``."""
    config = parse_config(dict(shape.target))
    drafter = None if shape.drafter is None else parse_drafter_config(shape.drafter)
    tensors = release_tensors(
        config,
        torch.Generator().manual_seed(seed),
        packed=config.moe is not None and config.moe.quantized,
        dtype=torch.bfloat16,
        noise_dtype=torch.float32,
    )
    (folder / "target").mkdir(parents=True)
    _write_config(folder / "target", shape.target)
    _write_shards(folder / "target", tensors)
    if drafter is not None and shape.drafter is not None:
        (folder / "drafter").mkdir()
        _write_config(folder / "drafter", shape.drafter)
        weights = dict(_drafter_tensors(drafter, torch.Generator().manual_seed(seed + 1)))
        save_file(weights, folder / "drafter" / "model.safetensors", metadata={"format": "pt"})


def _write_config(directory: Path, config: Mapping[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _write_shards(directory: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Shards of about SHARD_BYTES and their index; no more than one shard is in memory."""
    names_of: list[list[str]] = []
    num_bytes, held_bytes, held = 0, 0, dict[str, torch.Tensor]()

    def flush() -> None:
        nonlocal held_bytes
        save_file(held, directory / f"shard-{len(names_of)}", metadata={"format": "pt"})
        names_of.append(list(held))
        held.clear()
        held_bytes = 0

    for name, tensor in tensors:
        held[name] = tensor
        held_bytes += tensor.nbytes
        num_bytes += tensor.nbytes
        if held_bytes >= SHARD_BYTES:
            flush()
    if held:
        flush()
    weight_map: dict[str, str] = {}
    for index, names in enumerate(names_of):
        file_name = f"model-{index + 1:05d}-of-{len(names_of):06d}.safetensors"
        (directory / f"shard-{index}").rename(directory / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index_json = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index_json), encoding="utf-8")


def _drafter_tensors(config: DSparkConfig, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights of a drafter under DeepSpec flat names, bfloat16, with the maps of a reduced vocabulary."""
    with shapes_only():
        model = DSparkModel(config)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight") or name.startswith("fc_norm"):
            value = 1 + 0.1 * noise
        elif name.endswith("bias"):
            value = 0.1 * noise
        else:
            value = noise / parameter.shape[-1] ** 0.5
        yield name, value.to(torch.bfloat16)
    if config.reduced_vocabulary:
        kept_V = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
        marked = torch.zeros(config.vocab_size, dtype=torch.bool)
        marked[kept_V] = True
        yield "d2t", kept_V - torch.arange(config.draft_vocab_size)
        yield "t2d", marked
