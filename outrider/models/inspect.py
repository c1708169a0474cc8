"""The architecture report: what a checkpoint is, counted from its config alone or from its files."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from outrider.cache.layout import PagedLayout, RecurrentLayout
from outrider.models.fields import read_config_json
from outrider.models.kimi_k3.checkpoint import (
    SKIPPED_PREFIXES,
    assignments,
    holds_packed_experts,
    text_prefix,
    text_tensors,
)
from outrider.models.kimi_k3.config import KimiK3Config, parse_config
from outrider.models.kimi_k3.model import cache_layouts
from outrider.models.layers import Build
from outrider.models.shards import INDEX_NAME
from outrider.models.weights import CheckpointReader, SourceTensor, check_names

__all__ = ["Inspection", "WeightKind", "describe", "readable_bytes", "render"]

# Kind of a tensor by a part of its name; the first match wins.
_KINDS = (
    ("model.embed_tokens.", "embedding"),
    ("lm_head.", "output head"),
    (".experts.", "routed experts"),
    (".shared_experts.", "shared experts"),
    (".block_sparse_moe.gate.", "router"),
    (".routed_expert_", "latent projections"),
    ("_res_", "attention residuals"),
    (".mlp.", "dense MLP"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightKind:
    """One family of weights, summed over layers."""

    name: str
    num_tensors: int
    num_parameters: int
    num_active: int  # parameters one token uses in the products; the embedding lookup counts 0
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Everything the report shows. Byte counts are exact, not rounded."""

    model_type: str
    config: KimiK3Config
    has_weights: bool  # False: only config.json was there, bytes assume bfloat16 storage
    packed_experts: bool
    kinds: tuple[WeightKind, ...]
    latents: PagedLayout
    recurrent: RecurrentLayout

    @property
    def num_parameters(self) -> int:
        """All text parameters; an ``A_log`` counts one value per head, without its padding."""
        return sum(kind.num_parameters for kind in self.kinds)

    @property
    def num_active(self) -> int:
        """Parameters one token uses: no embedding table, only the chosen experts."""
        return sum(kind.num_active for kind in self.kinds)

    @property
    def num_bytes(self) -> int:
        """Bytes of all text tensors."""
        return sum(kind.num_bytes for kind in self.kinds)

    @property
    def num_tensors(self) -> int:
        """Text tensors in the checkpoint."""
        return sum(kind.num_tensors for kind in self.kinds)


def _kind(config: KimiK3Config, name: str) -> str:
    """Weight family of a tensor name (without the wrapper prefix)."""
    for part, kind in _KINDS:
        if part in name:
            return kind
    layer = re.search(r"layers\.(\d+)\.self_attn\.", name)
    if layer is None:
        return "norms"
    return {"kda": "KDA attention", "mla": "MLA attention"}[config.layer_kinds[int(layer[1])]]


def _num_parameters(config: KimiK3Config, source: SourceTensor) -> int:
    """Logical parameters of one stored tensor."""
    if source.name.endswith(".A_log"):
        return config.kda.num_heads
    if source.name.endswith(".weight_packed"):
        return 2 * math.prod(source.shape)  # two 4-bit codes per byte
    if source.name.endswith(".weight_scale"):
        return 0
    return math.prod(source.shape)


def _assumed_bytes(source: SourceTensor) -> int:
    """Bytes of a tensor in the release form: bytes, fp32 where only fp32 is accepted, else bfloat16."""
    if torch.uint8 in source.dtypes:
        return math.prod(source.shape)
    return math.prod(source.shape) * (2 if torch.bfloat16 in source.dtypes else 4)


def _active(config: KimiK3Config, kind: str, num_parameters: int) -> int:
    if kind == "embedding":
        return 0
    if kind == "routed experts" and config.moe is not None:
        return num_parameters * config.moe.experts_per_token // config.moe.num_experts
    return num_parameters


def _count(config: KimiK3Config, sources: Iterator[tuple[SourceTensor, int]]) -> tuple[WeightKind, ...]:
    """Sum (tensor, bytes) pairs by weight family, in order of first appearance."""
    tensors: dict[str, int] = {}
    parameters: dict[str, int] = {}
    sizes: dict[str, int] = {}
    prefix = text_prefix(config)
    for source, num_bytes in sources:
        kind = _kind(config, source.name.removeprefix(prefix))
        tensors[kind] = tensors.get(kind, 0) + 1
        parameters[kind] = parameters.get(kind, 0) + _num_parameters(config, source)
        sizes[kind] = sizes.get(kind, 0) + num_bytes
    return tuple(
        WeightKind(
            name=kind,
            num_tensors=tensors[kind],
            num_parameters=parameters[kind],
            num_active=_active(config, kind, parameters[kind]),
            num_bytes=sizes[kind],
        )
        for kind in tensors
    )


def describe(path: str | Path) -> Inspection:
    """Inspect a checkpoint directory; ``config.json`` alone is enough.

    With weights present, names, shapes and dtypes are checked from headers; no data is read.

    Raises:
        ConfigError: config missing, malformed or out of range.
        CheckpointError: weights are present and do not match the config.
    """
    directory = Path(path)
    raw = read_config_json(directory)
    config = parse_config(raw)
    has_weights = (directory / INDEX_NAME).is_file() or any(directory.glob("*.safetensors"))
    if has_weights:
        with CheckpointReader(directory) as reader:
            packed = holds_packed_experts(config, reader)
            plan = tuple(assignments(config, reader, on_disk_packed=packed, keep_packed=False))
            check_names(reader, plan, SKIPPED_PREFIXES)
            sources = (source for item in plan for source in item.sources)
            kinds = _count(config, ((source, reader.entry(source.name).num_bytes) for source in sources))
    else:
        packed = config.moe is not None and config.moe.quantized
        kinds = _count(config, ((source, _assumed_bytes(source)) for source in text_tensors(config, packed=packed)))
    latents, recurrent = cache_layouts(config, Build(dtype=torch.bfloat16, device=torch.device("meta")))
    return Inspection(
        model_type=raw["model_type"],
        config=config,
        has_weights=has_weights,
        packed_experts=packed,
        kinds=kinds,
        latents=latents,
        recurrent=recurrent,
    )


def _runs(labels: list[str]) -> str:
    """``['K', 'K', 'M'] -> '2K M'``, repeated units folded: ``'22x(3K M) K 2M'``."""
    runs = [(label, len(list(group))) for label, group in groupby(labels)]
    words = [label if count == 1 else f"{count}{label}" for label, count in runs]
    pairs = [f"{a} {b}" for a, b in zip(words[::2], words[1::2], strict=False)]
    tail = words[2 * len(pairs) :]
    folded = [(pair, len(list(group))) for pair, group in groupby(pairs)]
    return " ".join([pair if count == 1 else f"{count}x({pair})" for pair, count in folded] + tail)


def readable_bytes(num_bytes: int) -> str:
    """Bytes in powers of ten, three digits after the point."""
    for factor, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3f} {unit}"
    return f"{num_bytes} B"


def _architecture_lines(report: Inspection) -> Iterator[str]:
    config = report.config
    kda, mla, moe = config.kda, config.mla, config.moe
    kinds = ["K" if kind == "kda" else "M" for kind in config.layer_kinds]
    ffn = ["S" if is_moe else "D" for is_moe in config.moe_layers]
    gate = "softplus" if kda.gate_lower_bound is None else f"sigmoid bounded at {kda.gate_lower_bound:g}"
    yield f"model type      {report.model_type}, context {config.max_position_embeddings:,} tokens"
    yield f"width           {config.hidden_size}, vocabulary {config.vocab_size:,}, {config.activation} activation"
    yield f"layers          {config.num_layers}: {len(config.kda_layers)} KDA, {len(config.mla_layers)} MLA"
    yield f"attention       {_runs(kinds)}  (K = KDA, M = MLA, in order)"
    yield f"feed-forward    {_runs(ffn)}  (D = dense, S = sparse)"
    if config.attn_res_block_size is None:
        yield "residual        ordinary stream"
    else:
        yield (
            f"residual        attention residuals, block {config.attn_res_block_size}, {config.num_snapshots} snapshots"
        )
    yield f"KDA             {kda.num_heads} heads x {kda.head_dim}, conv {kda.conv_kernel_size}, decay gate {gate}"
    yield (
        f"MLA             {mla.num_heads} heads, q {mla.q_lora_rank or 'full'} rank, latent {mla.kv_lora_rank} "
        f"+ {mla.rope_head_dim}, value {mla.v_head_dim}, output gate {'yes' if mla.output_gate else 'no'}"
    )
    if moe is not None:
        latent = "model width" if moe.latent_size is None else f"latent {moe.latent_size}"
        yield (
            f"MoE             {moe.num_experts} experts, top {moe.experts_per_token}, width "
            f"{moe.intermediate_size} on {latent}, shared width {moe.shared_intermediate_size}, "
            f"{'MXFP4' if report.packed_experts else 'unquantised'}"
        )


def render(report: Inspection) -> str:
    """The report as plain text, one table of weights and one of caches."""
    latents, recurrent = report.latents, report.recurrent
    source = "from the files" if report.has_weights else "from config.json alone, bfloat16 storage assumed"
    lines = [*_architecture_lines(report), "", f"weights         {source}"]
    lines.append(f"{'':19}{'tensors':>8} {'parameters':>19} {'active':>17} {'bytes':>14}")
    for kind in report.kinds:
        lines.append(
            f"{kind.name:<19}{kind.num_tensors:>8,} {kind.num_parameters:>19,} {kind.num_active:>17,} "
            f"{readable_bytes(kind.num_bytes):>14}"
        )
    lines.append(
        f"{'total':<19}{report.num_tensors:>8,} {report.num_parameters:>19,} {report.num_active:>17,} "
        f"{readable_bytes(report.num_bytes):>14}"
    )
    lines += [
        "",
        "caches          (bfloat16 model)",
        f"MLA latents     {latents.bytes_per_token:,} B per token",
        f"KDA states      {readable_bytes(recurrent.state_bytes_per_slot)} per sequence, whatever its length",
        f"conv windows    {readable_bytes(recurrent.conv_bytes_per_slot)} per sequence "
        f"({readable_bytes(recurrent.bytes_per_slot)} with the states)",
        f"delta log       {readable_bytes(recurrent.log_bytes_per_row)} per tentative row",
    ]
    return "\n".join(lines)
