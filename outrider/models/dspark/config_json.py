"""config.json of the supported drafter families -> DSparkConfig.

Families: DeepSpec (flat keys on a copy of the target's config), SpecForge (keys nested in
``dflash_config`` or ``dspark_config``) and speculators (``transformer_layer_config``).
Foreign key names appear only in this file.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError, ConfigError, UnsupportedError
from outrider.models.dspark.config import (
    AuxStream,
    BlockLayout,
    ConfidenceConfig,
    DraftLayerMask,
    DSparkConfig,
    MarkovKind,
    RopeConfig,
    TapConvention,
    WindowOrigin,
    YarnConfig,
)
from outrider.models.fields import MAX_INTEGER, is_finite_number, shown
from outrider.ops.rope import yarn_magnitude

__all__ = ["parse_config", "read_config"]

_NESTED_KEYS = ("dspark_config", "dflash_config")
_MISSING = object()
_MAX_LAYERS = 1_000
_MAX_YARN_FACTOR = 1e6  # far above any model, and products with positions stay numbers


def read_config(path: Path) -> DSparkConfig:
    """Read ``config.json`` (a file, or a directory that holds it).

    Raises:
        CheckpointError: the file is missing or no JSON object.
        ConfigError: a key is missing or contradicts another.
        UnsupportedError: the family or a feature is known but not offered.
    """
    file = path
    try:
        file = path / "config.json" if path.is_dir() else path
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"no drafter config at {file}; give its checkpoint directory") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file} must hold a JSON object, found {type(parsed).__name__}")
    return parse_config(parsed)


def parse_config(config: Mapping[str, Any]) -> DSparkConfig:
    """Normalise one parsed config.json; see the module docstring for the families.

    Raises:
        ConfigError: a key is missing or contradicts another.
        UnsupportedError: the family or a feature is known but not offered.
    """
    _refuse_unsupported(config)
    keys = _Keys(config)
    speculators = "speculators_model_type" in config
    body = _Keys(keys.mapping("transformer_layer_config")) if speculators else keys
    _refuse_unsupported_body(body)
    vocab_size = body.integer("vocab_size")
    hidden_size = body.integer("hidden_size")
    num_heads, num_layers = body.integer("num_attention_heads"), body.integer("num_hidden_layers")
    if num_heads < 1 or not 1 <= num_layers <= _MAX_LAYERS:
        raise ConfigError(
            f"drafter num_attention_heads={num_heads}, num_hidden_layers={num_layers} are out of range; use at least "
            f"1 of each and at most {_MAX_LAYERS} layers"
        )
    markov_rank = keys.integer("markov_rank", 0)
    convention, rope = _tap_convention(keys, speculators), _rope(body)
    return DSparkConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=body.integer("num_key_value_heads", num_heads),
        head_dim=body.integer("head_dim", hidden_size // num_heads),
        intermediate_size=body.integer("intermediate_size"),
        rms_norm_eps=body.positive("rms_norm_eps"),
        rope=rope,
        vocab_size=vocab_size,
        draft_vocab_size=keys.integer("draft_vocab_size", vocab_size),
        num_block_rows=keys.integer("block_size"),
        layout=_layout(keys),
        mask_token_id=keys.integer("mask_token_id"),
        target_hidden_size=keys.integer("target_hidden_size", hidden_size),
        num_target_layers=_num_target_layers(keys, speculators),
        aux_layer_ids=_aux_layer_ids(keys, speculators, convention),
        aux_layer_convention=convention,
        aux_hidden_stream=_aux_stream(keys),
        aux_norm=keys.boolean("fc_norm", False),
        markov=_markov(keys, markov_rank),
        markov_rank=markov_rank,
        confidence=_confidence(keys),
        layer_masks=_layer_masks(keys, body, speculators),
        max_context=_max_context(body, rope),
    )


class _Keys:
    """Typed access; drafter keys are sought prefixed, then nested, then flat."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def find(self, name: str) -> Any:
        """The value of ``name``, or _MISSING; a null counts as missing."""
        candidates = [self.config.get(f"dspark_{name}")]
        candidates += [self._nested(nested).get(name) for nested in _NESTED_KEYS]
        candidates.append(self.config.get(name))
        return next((value for value in candidates if value is not None), _MISSING)

    def _nested(self, name: str) -> Mapping[str, Any]:
        value = self.config.get(name)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"drafter config {name}={shown(value)} must be an object")
        return value or {}

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._or_default(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_INTEGER:
            raise ConfigError(f"drafter config {name}={shown(value)} must be an integer below {MAX_INTEGER}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._or_default(name, default)
        if not is_finite_number(value):
            raise ConfigError(f"drafter config {name}={shown(value)} must be a finite number")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise ConfigError(f"drafter config {name}={value!r} must be above 0")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self._or_default(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"drafter config {name}={shown(value)} must be true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._or_default(name, default)
        if not isinstance(value, str):
            raise ConfigError(f"drafter config {name}={shown(value)} must be a string")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.find(name)
        if not isinstance(value, dict):
            raise ConfigError(f"drafter config needs an object {name}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.find(name)
        if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, int) for item in value):
            raise ConfigError(f"drafter config needs a list of integers {name}")
        return tuple(value)

    def texts(self, name: str, default: Sequence[str] = ()) -> tuple[str, ...]:
        value = self._or_default(name, list(default))
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"drafter config {name}={shown(value)} must be a list of strings")
        return tuple(value)

    def _or_default(self, name: str, default: Any) -> Any:
        value = self.find(name)
        if value is not _MISSING:
            return value
        if default is None:
            raise ConfigError(f"drafter config lacks {name}; the checkpoint's config.json must state it")
        return default


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    keys = _Keys(config)
    architectures = keys.texts("architectures")
    name = ", ".join(architectures) or shown(config.get("model_type"))
    if config.get("model_type") == "k3_dspark" or keys.text("attention_mode", "gqa") == "mla":
        raise UnsupportedError(f"drafter {name} has an MLA body; only grouped-query drafters load")
    if "kv_lora_rank" in config:
        raise UnsupportedError(f"drafter {name} has kv_lora_rank, an MLA body, which is not offered")
    if "dspark_block_size" in config:
        raise UnsupportedError(f"{name} bundles its drafter as mtp stages, which are not offered")
    if any("gemma" in item.lower() for item in architectures):
        raise UnsupportedError(f"drafter {name} has a Gemma body, which is not offered")
    family = config.get("speculators_model_type", "dspark")
    if family not in ("dspark", "dflash"):
        raise UnsupportedError(f"speculators_model_type={shown(family)}; dspark and dflash load")


def _refuse_unsupported_body(body: _Keys) -> None:
    if body.boolean("attention_bias", False):
        raise UnsupportedError("drafter attention_bias=true is not offered")
    if body.text("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"drafter hidden_act={body.find('hidden_act')!r}; only silu is offered")
    if "kv_lora_rank" in body.config:
        raise UnsupportedError("the drafter has kv_lora_rank, an MLA body, which is not offered")


def _layout(keys: _Keys) -> BlockLayout:
    """Rules of the checkpoint, in order; never inferred from having a Markov head."""
    explicit = keys.find("sample_from_anchor")
    if explicit is not _MISSING:
        first = keys.boolean("sample_from_anchor", False)
    elif "num_anchors" in keys.config:
        first = True  # DeepSpec, its own dflash_* drafters with markov_rank 0 included
    elif "Qwen3DSparkModel" in keys.texts("architectures"):
        first = True
    else:
        first = keys.text("projector_type", "none") == "dspark"
    return BlockLayout.ANCHOR_FIRST if first else BlockLayout.ANCHOR_DROP


def _num_target_layers(keys: _Keys, speculators: bool) -> int | None:
    if speculators and keys.find("num_target_layers") is _MISSING:
        return None  # the family has no such key; the target itself bounds the ids
    return keys.integer("num_target_layers")


def _tap_convention(keys: _Keys, speculators: bool) -> TapConvention:
    """As stated (a key of ours, no family has one), or the family's own."""
    default = TapConvention.INPUT if speculators else TapConvention.OUTPUT
    name = keys.text("aux_layer_convention", default.value)
    known = [convention.value for convention in TapConvention]
    if name not in known:
        raise ConfigError(f"aux_layer_convention={shown(name)}; known are {known}")
    return TapConvention(name)


def _aux_layer_ids(keys: _Keys, speculators: bool, convention: TapConvention) -> tuple[int, ...]:
    name = "aux_hidden_state_layer_ids" if speculators else "target_layer_ids"
    return tuple(layer_id + convention.offset for layer_id in keys.integers(name))


def _aux_stream(keys: _Keys) -> AuxStream:
    known = {"attn_res": AuxStream.MIXTURE, "prefix": AuxStream.PREFIX}
    name = keys.text("aux_hidden_stream", "attn_res")
    if name not in known:
        raise ConfigError(f"aux_hidden_stream={name!r}; known are {list(known)}")
    return known[name]


def _markov(keys: _Keys, rank: int) -> MarkovKind:
    if rank == 0:
        return MarkovKind.NONE
    name = keys.text("markov_head_type", MarkovKind.VANILLA.value)
    known = [kind.value for kind in MarkovKind if kind is not MarkovKind.NONE]
    if name not in known:
        raise ConfigError(f"markov_head_type={name!r}; known are {known}")
    return MarkovKind(name)


def _confidence(keys: _Keys) -> ConfidenceConfig | None:
    if not keys.boolean("enable_confidence_head", False):
        return None
    return ConfidenceConfig(
        with_markov=keys.boolean("confidence_head_with_markov", False),
        bias=keys.boolean("confidence_head_bias", True),
    )


def _layer_masks(keys: _Keys, body: _Keys, speculators: bool) -> tuple[DraftLayerMask, ...]:
    num_layers = body.integer("num_hidden_layers")
    names = body.texts("layer_types", ["full_attention"] * num_layers)
    if speculators:
        sliding_causal = not keys.boolean("sliding_window_non_causal", False)
        origin = WindowOrigin.ANCHOR
    else:
        sliding_causal = True
        origin = WindowOrigin.QUERY
    everywhere = None if keys.find("causal") is _MISSING else keys.boolean("causal", False)
    masks = []
    for name in names:
        if name not in ("full_attention", "sliding_attention"):
            raise UnsupportedError(f"drafter layer type {name!r} is not offered")
        sliding = name == "sliding_attention"
        masks.append(
            DraftLayerMask(
                causal_block=(sliding and sliding_causal) if everywhere is None else everywhere,
                window=_window(keys, body) if sliding else None,
                window_origin=origin,
            )
        )
    return tuple(masks)


def _window(keys: _Keys, body: _Keys) -> int:
    if body.find("sliding_window") is not _MISSING:
        return body.integer("sliding_window")
    return keys.integer("swa_window_size")


def _rope(body: _Keys) -> RopeConfig:
    """Accept ``rope_parameters`` (new), ``rope_scaling`` plus ``rope_theta`` (old), or neither."""
    found = body.find("rope_parameters")
    if found is _MISSING:
        found = body.find("rope_scaling")
    rope = _Keys(found if isinstance(found, dict) else {})
    theta = rope.number("rope_theta", body.number("rope_theta", -1.0))
    if theta <= 0.0:
        raise ConfigError("drafter config states no positive rope_theta, flat or in rope_parameters")
    partial = rope.number("partial_rotary_factor", body.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedError(f"drafter partial_rotary_factor={partial} is not offered, only 1")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta, yarn=None)
    if kind != "yarn":
        raise UnsupportedError(f"drafter rope type {kind!r} is not offered; default and yarn are")
    return RopeConfig(theta=theta, yarn=_yarn(rope, body))


def _max_context(body: _Keys, rope: RopeConfig) -> int | None:
    """Positions that the drafter was made for: as stated, or as far as YaRN stretches the original ones."""
    stated = body.integer("max_position_embeddings", 0)
    stretched = round(rope.yarn.factor * rope.yarn.original_max_position) if rope.yarn else 0
    return max(stated, stretched) or None


def _yarn(rope: _Keys, body: _Keys) -> YarnConfig:
    longest = body.integer("max_position_embeddings", 0)
    original = rope.integer("original_max_position_embeddings", longest)
    if original < 1:
        raise ConfigError("yarn needs original_max_position_embeddings or max_position_embeddings")
    factor = rope.number("factor", longest / original)
    if not 1.0 <= factor <= _MAX_YARN_FACTOR:
        raise ConfigError(f"yarn factor={factor:g} is outside 1..{_MAX_YARN_FACTOR:g}")
    if not rope.boolean("truncate", True):
        raise UnsupportedError("yarn truncate=false is not offered")
    mscale, mscale_all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        default = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    else:
        default = yarn_magnitude(factor)
    return YarnConfig(
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", default),
    )
