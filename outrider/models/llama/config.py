"""The numbers of a Llama or Qwen3 model, parsed once from ``config.json`` and validated."""

from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError, UnsupportedError
from outrider.models.fields import Fields, shown
from outrider.ops.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

__all__ = ["LlamaConfig", "parse_config"]

MODEL_TYPES = ("llama", "qwen3")
MAX_LAYERS = 1_000  # far above any model; a damaged number must not become millions of tensor names


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """A whole model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_norms: bool  # queries and keys are normed per head (Qwen3)
    tied_head: bool  # the embedding is the output head
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int

    @property
    def kv_size(self) -> int:
        """Values of the keys of one token, and of its values."""
        return self.num_kv_heads * self.head_dim

    @property
    def query_size(self) -> int:
        """Values of the queries of one token."""
        return self.num_heads * self.head_dim


def parse_config(raw: dict[str, Any]) -> LlamaConfig:
    """Parse and validate.

    Raises:
        ConfigError: a field is missing, malformed or contradicts another.
        UnsupportedError: a form that is not offered, such as biases or sliding windows.
    """
    fields = Fields(raw, where="")
    family = fields.choice("model_type", MODEL_TYPES)
    _check_offered(fields, raw)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers, num_kv_heads = (
        fields.integer("num_hidden_layers"),
        fields.integer("num_key_value_heads", default=num_heads),
    )
    if num_layers > MAX_LAYERS:
        raise ConfigError(f"num_hidden_layers={num_layers} exceeds {MAX_LAYERS}, the most that is offered")
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}"
            "; groups must be equal"
        )
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise ConfigError(
            f"hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}; state head_dim"
        )
    head_dim = fields.integer("head_dim", default=max(hidden_size // num_heads, 1))
    if head_dim % 2:
        raise ConfigError(f"head_dim={head_dim} is odd; rotary positions need an even one")
    longest = fields.integer("max_position_embeddings")
    theta, scaling = _rope(fields, longest)
    return LlamaConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_norms=family == "qwen3",
        tied_head=fields.flag("tie_word_embeddings", default=False),
        rms_norm_eps=fields.positive("rms_norm_eps", default=1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=longest,
    )


def _check_offered(fields: Fields, raw: dict[str, Any]) -> None:
    activation = fields.text("hidden_act", default="silu")
    if activation != "silu":
        raise UnsupportedError(f"hidden_act={activation!r} is not offered; 'silu' is")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if fields.flag(name, default=False):
            raise UnsupportedError(f"{name}=true is not offered by this family")
    kinds = raw.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(map(str, kinds)) != {"full_attention"}):
        raise UnsupportedError(f"layer_types={shown(kinds)} is not offered; every layer must be 'full_attention'")
    if raw.get("quantization_config") is not None:
        raise UnsupportedError("quantization_config is not offered by this family; use the unquantised checkpoint")


def _rope(fields: Fields, longest: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from ``rope_parameters`` (new) or ``rope_theta`` with ``rope_scaling`` (old)."""
    rope = fields.optional_section("rope_parameters") or fields.optional_section("rope_scaling")
    theta = fields.positive("rope_theta", default=10_000.0)
    if rope is None:
        return theta, None
    theta = rope.positive("rope_theta", default=theta)
    if rope.number("partial_rotary_factor", default=fields.number("partial_rotary_factor", default=1.0)) != 1.0:
        raise UnsupportedError("partial_rotary_factor below 1 is not offered by this family")
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, LinearScaling(factor=rope.positive("factor"))
        case "llama3":
            return theta, _llama3(rope)
        case "yarn":
            return theta, _yarn(rope, longest)
    raise UnsupportedError(f"rope type {kind!r} is not offered; default, linear, llama3 and yarn are")


def _llama3(rope: Fields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=rope.positive("factor"),
        low_freq_factor=rope.positive("low_freq_factor"),
        high_freq_factor=rope.positive("high_freq_factor"),
        original_max_positions=rope.integer("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ConfigError(
            f"{rope.where}high_freq_factor={scaling.high_freq_factor:g} must exceed "
            f"low_freq_factor={scaling.low_freq_factor:g}"
        )
    return scaling


def _yarn(rope: Fields, longest: int) -> YarnScaling:
    original = rope.integer("original_max_position_embeddings", default=longest)
    return YarnScaling(
        factor=rope.positive("factor", default=longest / original),
        original_max_positions=original,
        beta_fast=rope.positive("beta_fast", default=32.0),
        beta_slow=rope.positive("beta_slow", default=1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", default=True),
    )
