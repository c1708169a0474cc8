"""The architecture report of a drafter, counted from its config alone or checked against its files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.models.dspark.checkpoint import check_headers, stores_head
from outrider.models.dspark.config import DSparkConfig
from outrider.models.dspark.config_json import parse_config
from outrider.models.dspark.model import DSparkModel
from outrider.models.fields import read_config_json
from outrider.models.layers import shapes_only
from outrider.models.shards import INDEX_NAME
from outrider.models.weights import CheckpointReader

__all__ = ["DrafterInspection", "describe_drafter", "is_drafter", "render_drafter"]

# A key that only configs of that family have; the first match wins.
_FAMILIES = (
    ("speculators_model_type", "speculators"),
    ("dspark_config", "SpecForge"),
    ("dflash_config", "SpecForge"),
    ("target_layer_ids", "DeepSpec"),
    ("dspark_block_size", "mtp stages"),  # known and refused, with the reason
)
_PARTS = ("fc", "fc_norm", "hidden_norm", "layers", "norm", "markov_head", "confidence_head", "lm_head")
BFLOAT16_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterInspection:
    """Everything the report shows."""

    family: str
    config: DSparkConfig
    has_weights: bool
    num_bytes: int  # of the files with weights, else of all parameters in bfloat16
    parameters: Mapping[str, int]  # by part; the target's embedding and head are not the drafter's

    @property
    def num_parameters(self) -> int:
        """All trained values."""
        return sum(self.parameters.values())

    @property
    def context_bytes_per_token(self) -> int:
        """Cached keys and values of one context token in a bfloat16 model."""
        return self.config.context_row_size * BFLOAT16_BYTES


def is_drafter(raw: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json belongs to a drafter, offered or not."""
    return _family(raw) is not None


def _family(raw: Mapping[str, Any]) -> str | None:
    if raw.get("model_type") == "k3_dspark":
        return "k3_dspark"
    return next((family for key, family in _FAMILIES if key in raw), None)


def describe_drafter(path: Path) -> DrafterInspection:
    """Inspect a drafter directory; ``config.json`` alone is enough.

    With weights present, names, shapes and dtypes are checked from headers; no data is read.

    Raises:
        ConfigError, UnsupportedError: config missing, contradictory, or a known family that is not offered.
        CheckpointError: weights are present and do not match the config.
    """
    raw = read_config_json(path)
    config = parse_config(raw)
    with shapes_only():
        model = DSparkModel(config)
    counts = dict.fromkeys(_PARTS, 0)
    for name, parameter in model.named_parameters():
        counts[name.split(".")[0]] += parameter.numel()
    num_bytes = sum(counts.values()) * BFLOAT16_BYTES
    has_weights = (path / INDEX_NAME).is_file() or any(path.glob("*.safetensors"))
    if has_weights:
        with CheckpointReader(path) as reader:
            check_headers(reader, model)
            num_bytes = reader.num_bytes()
            if not stores_head(reader.names()):
                counts["lm_head"] = 0  # the target's rows, gathered at load
    return DrafterInspection(
        family=_family(raw) or "DeepSpec",
        config=config,
        has_weights=has_weights,
        num_bytes=num_bytes,
        parameters={part: count for part, count in counts.items() if count},
    )


def _lines(report: DrafterInspection) -> Iterator[str]:
    config = report.config
    layers = "all" if config.num_target_layers is None else config.num_target_layers
    taps = ", ".join(map(str, config.aux_layer_ids))
    masks = {(mask.causal_block, mask.window) for mask in config.layer_masks}
    shapes = sorted(f"{'causal' if causal else 'full'} block, window {window or 'none'}" for causal, window in masks)
    yield f"drafter         {report.family} family"
    yield (
        f"body            {config.num_layers} layers, width {config.hidden_size}, {config.num_heads} heads "
        f"({config.num_kv_heads} key/value) x {config.head_dim}, MLP {config.intermediate_size}"
    )
    yield f"attention       {'; '.join(shapes)}, {'YaRN' if config.rope.yarn else 'plain'} rotary"
    yield (
        f"block           {config.num_block_rows} rows, {config.layout.value.replace('_', '-')}: "
        f"{config.num_draft_tokens} drafts per round"
    )
    yield f"taps            after layers {taps} (0-based) of {layers}, {config.aux_hidden_stream.value} stream"
    written = ", ".join(str(t - config.aux_layer_convention.offset) for t in config.aux_layer_ids)
    yield f"taps as written {written} ({config.aux_layer_convention.value} convention)"
    reduced = "reduced" if config.reduced_vocabulary else "the target's"
    ids = f"{config.draft_vocab_size:,} of {config.vocab_size:,} ids ({reduced})"
    yield f"vocabulary      {ids}, mask {config.mask_token_id}"
    rank = f", rank {config.markov_rank}" if config.markov_rank else ""
    yield f"Markov head     {config.markov.value}{rank}"
    confidence = config.confidence
    reads = "none" if confidence is None else "hidden and Markov" if confidence.with_markov else "hidden"
    yield f"confidence head {reads}"


def render_drafter(report: DrafterInspection) -> str:
    """The report as plain text."""
    source = "from the files" if report.has_weights else "from config.json alone, bfloat16 storage assumed"
    lines = [*_lines(report), "", f"weights         {source}"]
    lines += [f"{part:<19}{count:>19,}" for part, count in report.parameters.items()]
    lines += [
        f"{'total':<19}{report.num_parameters:>19,} parameters, {report.num_bytes:,} B",
        "",
        "caches          (bfloat16 model)",
        f"drafter context {report.context_bytes_per_token:,} B per token",
    ]
    return "\n".join(lines)
