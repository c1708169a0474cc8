"""Drafter checkpoint -> DSparkModel: name mapping, strict both ways, copies of the target dropped.

Every tensor of the file is used, verified and dropped, or refused by name; every parameter is filled. The head of a
reduced vocabulary may be left out of the file: it is then the target's rows that ``d2t`` chooses, gathered here.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.errors import CheckpointError, allocating
from outrider.models.dspark.config import DSparkConfig
from outrider.models.dspark.config_json import read_config
from outrider.models.dspark.model import DSparkModel
from outrider.models.layers import allocate, shapes_only
from outrider.models.weights import (
    Assignment,
    CheckpointReader,
    SourceTensor,
    check_names,
    direct_assignments,
    fill_parameters,
)

__all__ = ["TargetTables", "check_headers", "confidence_digest", "load_model", "normalise_name", "stores_head"]

_PREFIXES = ("model.", "draft_model.", "logit_head.")
_RENAMED = {"context_proj": "fc", "context_norm": "hidden_norm", "final_norm": "norm"}
_COPIES = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")  # the target's, or implied by it
_COMPARE_ROWS = 4096  # rows of a table compared at a time, so that no second copy is built


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTables:
    """The target's tables that drafter checkpoints copy, in the target's dtype."""

    embedding_VD: torch.Tensor
    head_VD: torch.Tensor


def load_model(path: Path, tables: TargetTables, *, dtype: torch.dtype, device: torch.device) -> DSparkModel:
    """Read config and weights of a drafter directory.

    Args:
        path: directory with ``config.json`` and safetensors files.
        tables: the target's embedding and head; copies in the checkpoint must equal them.
        dtype: compute dtype of all parameters.
        device: where the parameters live.

    Raises:
        CheckpointError: a tensor is missing, unknown, misshapen, or a copy differs from the target.
        ConfigError, UnsupportedError: see ``config_json.parse_config``.
    """
    config = read_config(path)
    with shapes_only(), allocating("a drafter of the sizes in its config"):
        model = DSparkModel(config).to(dtype)
    with CheckpointReader(path) as reader:
        names = _canonical_names(reader)
        dropped = _drop_copies(reader, names, config, tables)
        skipped = tuple(names[name] for name in dropped)
        assignments = _assignments(model, {name: raw for name, raw in names.items() if name not in dropped})
        check_names(reader, assignments, skipped)  # before memory is taken for a config that does not fit the files
        allocate(model, device)
        model.eval()
        fill_parameters(reader, _stored_parameters(model, names), assignments, skipped_prefixes=skipped)
        if model.d2t is not None:
            _check_vocabulary_map(model.d2t.cpu(), config, reader, names)
        if model.lm_head is not None and model.d2t is not None and not stores_head(names):
            _gather_head(model.lm_head, model.d2t, tables.head_VD)
    return model


def stores_head(names: Collection[str]) -> bool:
    """Whether a reduced vocabulary's head is among these tensors; if not, it is the target's rows that d2t chooses.

    Args:
        names: tensor names, canonical or as in the file.
    """
    return "lm_head.weight" in {normalise_name(name) for name in names}


def confidence_digest(path: Path) -> str:
    """SHA-256 of the confidence head's weights as they are stored; "" for a drafter without the head.

    Raises:
        CheckpointError: the weights cannot be read.
    """
    with CheckpointReader(path) as reader:
        names = _canonical_names(reader)
        heads = sorted(name for name in names if name.startswith("confidence_head."))
        digest = hashlib.sha256()
        for name in heads:
            digest.update(reader.load(names[name]).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if heads else ""


def check_headers(reader: CheckpointReader, model: DSparkModel) -> None:
    """Check names, shapes and dtypes against a model (on any device); no data is read.

    Raises:
        CheckpointError: a tensor is missing, unknown or misshapen.
    """
    names = _canonical_names(reader)
    parameters = _stored_parameters(model, names)
    copies = {n for n in names if n.startswith("verifier_") or (n in _COPIES and n not in parameters)}
    used = {name: raw for name, raw in names.items() if name not in copies}
    check_names(reader, _assignments(model, used), tuple(names[name] for name in copies))


def normalise_name(raw: str) -> str:
    """Checkpoint tensor name -> DeepSpec flat name: wrappers stripped, known synonyms renamed."""
    name = raw
    while (prefix := next((p for p in _PREFIXES if name.startswith(p)), None)) is not None:
        name = name[len(prefix) :]
    head, dot, rest = name.partition(".")
    return _RENAMED.get(head, head) + dot + rest


def _canonical_names(reader: CheckpointReader) -> dict[str, str]:
    """Canonical name -> name in the file."""
    names: dict[str, str] = {}
    for raw in reader.names():
        name = normalise_name(raw)
        if name in names:
            raise CheckpointError(f"tensors {names[name]!r} and {raw!r} both mean {name!r}; remove one")
        names[name] = raw
    return names


def _stored_parameters(model: DSparkModel, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Parameters and buffers that the file must hold: all, but for a head that its d2t implies."""
    parameters: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    if "d2t" in parameters and "d2t" in names and not stores_head(names):
        del parameters["lm_head.weight"]
    return parameters


@torch.no_grad()
def _gather_head(lm_head: torch.nn.Linear, d2t_U: torch.Tensor, head_VD: torch.Tensor) -> None:
    """Fill a reduced head with the target's rows of its ids.

    Raises:
        CheckpointError: the target's head has another width.
    """
    if head_VD.shape[1] != lm_head.weight.shape[1]:
        raise CheckpointError(
            f"the drafter stores no head and has width {lm_head.weight.shape[1]}, but the target's head has width "
            f"{head_VD.shape[1]}; use the drafter trained for this target"
        )
    target_ids_U = torch.arange(d2t_U.shape[0], device=d2t_U.device) + d2t_U
    if int(target_ids_U.max()) >= head_VD.shape[0]:
        raise CheckpointError(
            f"d2t names target id {int(target_ids_U.max())}, but the target's head has {head_VD.shape[0]} rows; use "
            "the drafter trained for this target"
        )
    lm_head.weight.copy_(head_VD[target_ids_U.to(head_VD.device)])


def _assignments(model: DSparkModel, names: Mapping[str, str]) -> tuple[Assignment, ...]:
    parameters = _stored_parameters(model, names)
    unknown = sorted(set(names) - set(parameters))
    if unknown:
        raise CheckpointError(
            f"drafter tensor {names[unknown[0]]!r} belongs to no parameter; {len(unknown)} unknown in all; "
            "config.json and weights must come from the same drafter"
        )
    missing = sorted(set(parameters) - set(names))
    if missing:
        raise CheckpointError(
            f"drafter tensor {missing[0]!r} of shape {tuple(parameters[missing[0]].shape)} is missing; "
            f"{len(missing)} missing in all; config.json and weights must come from the same drafter"
        )
    direct = direct_assignments(parameters, {raw: name for name, raw in names.items() if name != "d2t"})
    if model.d2t is None:
        return direct
    source = SourceTensor(name=names["d2t"], shape=tuple(model.d2t.shape), dtypes=(torch.int64,))
    return (*direct, Assignment(sources=(source,), parameter="d2t"))


def _drop_copies(
    reader: CheckpointReader, names: Mapping[str, str], config: DSparkConfig, tables: TargetTables
) -> set[str]:
    """Canonical names that are copies of the target's tables (verified here) or say nothing more."""
    dropped = {name for name in names if name.startswith("verifier_")}
    if "embed_tokens.weight" in names:
        _check_copy(reader, names["embed_tokens.weight"], tables.embedding_VD)
        dropped.add("embed_tokens.weight")
    if "t2d" in names:  # the inverse of d2t, checked against it when there is one
        dropped.add("t2d")
    if config.reduced_vocabulary:
        return dropped
    if "lm_head.weight" in names:
        _check_copy(reader, names["lm_head.weight"], tables.head_VD)
        dropped.add("lm_head.weight")
    if "d2t" in names:
        if reader.load(names["d2t"]).count_nonzero():
            raise CheckpointError(
                f"d2t moves ids, but draft_vocab_size equals the vocabulary of {config.vocab_size}; "
                "state the reduced size"
            )
        dropped.add("d2t")
    return dropped


def _check_copy(reader: CheckpointReader, raw: str, target_VD: torch.Tensor) -> None:
    """Exact comparison in the narrower of the two dtypes, once at load; the copy is not kept.

    Both may have been rounded from one table, so that only the narrower one's bits can be equal.
    """
    copy_VD = reader.load(raw)
    if copy_VD.shape != target_VD.shape:
        raise CheckpointError(
            f"drafter tensor {raw!r} has shape {tuple(copy_VD.shape)}, the target's table {tuple(target_VD.shape)}; "
            "use the drafter trained for this target"
        )
    dtype = min(copy_VD.dtype, target_VD.dtype, key=lambda dtype: torch.finfo(dtype).bits)
    for begin in range(0, target_VD.shape[0], _COMPARE_ROWS):
        rows = slice(begin, begin + _COMPARE_ROWS)
        if not torch.equal(copy_VD[rows].to(target_VD.device, dtype), target_VD[rows].to(dtype)):
            raise CheckpointError(
                f"drafter tensor {raw!r} differs from the target's table (first in rows {begin}..); "
                "the drafter was trained against another target"
            )


def _check_vocabulary_map(
    d2t_V: torch.Tensor, config: DSparkConfig, reader: CheckpointReader, names: Mapping[str, str]
) -> None:
    """Draft ids map to different target ids inside the vocabulary, and t2d marks exactly those."""
    target_ids = torch.arange(config.draft_vocab_size) + d2t_V
    if int(target_ids.min()) < 0 or int(target_ids.max()) >= config.vocab_size:
        raise CheckpointError(
            f"d2t maps draft ids to {int(target_ids.min())}..{int(target_ids.max())}, outside the vocabulary "
            f"of {config.vocab_size}; it must hold offsets, target id = draft id + d2t[draft id]"
        )
    if len(set(target_ids.tolist())) != config.draft_vocab_size:
        raise CheckpointError("d2t maps two draft ids to one target id; the checkpoint is damaged")
    if "t2d" in names:
        marked = reader.load(names["t2d"]).bool()
        if marked.shape != (config.vocab_size,) or int(marked.sum()) != config.draft_vocab_size:
            raise CheckpointError(
                f"t2d marks {int(marked.sum())} of {marked.numel()} ids, expected {config.draft_vocab_size} "
                f"of {config.vocab_size}"
            )
        if not bool(marked[target_ids].all()):
            raise CheckpointError("t2d and d2t name different target ids; the checkpoint is damaged")
