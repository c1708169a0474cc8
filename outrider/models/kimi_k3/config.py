"""The numbers of a K3-architecture text model, parsed once from ``config.json`` and validated.

Accepts the wrapper form (``model_type: kimi_k3`` with a nested ``text_config``) and the bare text form
(``model_type: kimi_linear``); the latter covers the Kimi-Linear 48B family: plain residual stream, no
latent MoE, SiLU, low-rank output gate, softplus forget gate, no MLA gate.
"""

from dataclasses import dataclass
from typing import Any, Literal

from outrider.errors import ConfigError, UnsupportedError
from outrider.models.fields import Fields, shown

__all__ = ["KdaConfig", "KimiK3Config", "MlaConfig", "MoeConfig", "parse_config"]

WRAPPER_TYPE = "kimi_k3"
TEXT_TYPE = "kimi_linear"
MXFP4_GROUP = 32
# Far above any model; a damaged number must not become millions of tensor names.
MAX_LAYERS, MAX_EXPERTS = 1_000, 10_000

LayerKind = Literal["kda", "mla"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaConfig:
    """Kimi Delta Attention (k3-architecture section 5)."""

    num_heads: int
    head_dim: int  # key width and value width
    conv_kernel_size: int
    full_rank_gate: bool  # one g_proj; otherwise g_a_proj and g_b_proj of rank head_dim
    gate_lower_bound: float | None  # None selects the softplus forget gate

    @property
    def inner_size(self) -> int:
        """Channels of each of q, k and v."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention without rotary positions (section 6)."""

    num_heads: int
    q_lora_rank: int | None  # None: one plain q_proj
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int  # ordinary content dims: never rotated
    v_head_dim: int
    output_gate: bool
    # U1 of k3-architecture section 15: the vendor file builds these two norms with its class default
    # 1e-6, other engines use rms_norm_eps. Default 1e-6; the config key mla_lora_norm_eps overrides.
    lora_norm_eps: float

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def latent_row_size(self) -> int:
        """Values of one cached row: normed latent, then the shared key part."""
        return self.kv_lora_rank + self.rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Sparse feed-forward layers (section 7)."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    latent_size: int | None  # width the routed experts work in; None: the model width
    latent_norm: bool
    shared_intermediate_size: int  # 0: no shared expert
    renormalize: bool
    routed_scaling_factor: float
    quantized: bool  # config declares MXFP4 experts; the loader goes by the tensors it finds


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiK3Config:
    """A whole text model."""

    wrapped: bool  # wrapper form: text names start with "language_model."
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # dense layers
    layer_kinds: tuple[LayerKind, ...]
    moe_layers: tuple[bool, ...]
    rms_norm_eps: float
    attn_res_block_size: int | None  # None: ordinary residual stream
    activation: Literal["silu", "situ"]
    situ_beta: float
    situ_linear_beta: float | None
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig | None  # None: every layer is dense

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layer_kinds)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based indices of the KDA layers."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "kda")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """0-based indices of the MLA layers."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "mla")

    @property
    def num_snapshots(self) -> int:
        """Attention-residual snapshots of one forward: one at every layer i % block size == 0."""
        if self.attn_res_block_size is None:
            return 0
        return -(-self.num_layers // self.attn_res_block_size)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _layer_kinds(linear: Fields, num_layers: int) -> tuple[LayerKind, ...]:
    """Layer kinds from the two 1-based lists, which must partition 1..num_layers."""
    _require(
        num_layers <= MAX_LAYERS,
        f"num_hidden_layers={num_layers} exceeds {MAX_LAYERS}, the most that is offered",
    )
    kinds: list[LayerKind | None] = [None] * num_layers
    sources: tuple[tuple[str, LayerKind], ...] = (("kda_layers", "kda"), ("full_attn_layers", "mla"))
    for name, kind in sources:
        for layer in linear.integers(name):
            where = f"{linear.where}{name}"
            _require(
                1 <= layer <= num_layers,
                f"{where} lists layer {layer}, outside 1..{num_layers} (the lists are 1-based)",
            )
            _require(
                kinds[layer - 1] is None,
                f"{where} lists layer {layer}, which is already {kinds[layer - 1]}; list each layer once",
            )
            kinds[layer - 1] = kind
    missing = [i + 1 for i, kind in enumerate(kinds) if kind is None]
    _require(not missing, f"layers {shown(missing)} are in neither kda_layers nor full_attn_layers (1-based)")
    return tuple(kind for kind in kinds if kind is not None)


def _parse_kda(linear: Fields) -> KdaConfig:
    lower_bound = linear.optional_number("gate_lower_bound")
    _require(
        lower_bound is None or lower_bound < 0.0,
        f"{linear.where}gate_lower_bound={lower_bound} is not negative: it is the least log decay of one token",
    )
    return KdaConfig(
        num_heads=linear.integer("num_heads"),
        head_dim=linear.integer("head_dim"),
        conv_kernel_size=linear.integer("short_conv_kernel_size", minimum=2),
        full_rank_gate=linear.flag("use_full_rank_gate", default=False),
        gate_lower_bound=lower_bound,
    )


def _parse_mla(text: Fields) -> MlaConfig:
    num_heads = text.integer("num_attention_heads")
    num_kv_heads = text.integer("num_key_value_heads", default=num_heads)
    _require(
        num_kv_heads == num_heads,
        f"num_key_value_heads={num_kv_heads} must equal num_attention_heads={num_heads} for latent attention",
    )
    if not text.flag("mla_use_nope", default=True):
        raise UnsupportedError("mla_use_nope=false asks for rotary positions in MLA; only true is offered")
    return MlaConfig(
        num_heads=num_heads,
        q_lora_rank=text.optional_integer("q_lora_rank"),
        kv_lora_rank=text.integer("kv_lora_rank"),
        nope_head_dim=text.integer("qk_nope_head_dim"),
        rope_head_dim=text.integer("qk_rope_head_dim"),
        v_head_dim=text.integer("v_head_dim"),
        output_gate=text.flag("mla_use_output_gate", default=False),
        lora_norm_eps=text.positive("mla_lora_norm_eps", default=1e-6),
    )


def _declares_mxfp4(config: Fields) -> bool:
    """Whether ``quantization_config`` declares MXFP4 experts; any other scheme is refused."""
    quantization = config.optional_section("quantization_config")
    if quantization is None:
        return False
    found = (quantization.text("quant_method"), quantization.text("format", default=""))
    if found != ("compressed-tensors", "mxfp4-pack-quantized"):
        raise UnsupportedError(
            f"quantization_config quant_method, format = {found}; "
            "only compressed-tensors, mxfp4-pack-quantized (or no quantisation) is offered"
        )
    group = quantization.section("config_groups").section("group_0").section("weights")
    for name, expected in (("num_bits", 4), ("group_size", MXFP4_GROUP)):
        value = group.integer(name)
        if value != expected:
            raise UnsupportedError(f"{group.where}{name}={value}; only {expected} is offered")
    return True


def _check_router(text: Fields) -> None:
    """Refuse router variants whose selection would differ from sigmoid with a correction bias."""
    groups = text.integer("num_expert_group", default=1)
    if groups != 1:
        raise UnsupportedError(f"num_expert_group={groups}: grouped expert selection is not offered, only 1")
    for name, expected in (("moe_router_activation_func", "sigmoid"), ("topk_method", "noaux_tc")):
        value = text.text(name, default=expected)
        if value != expected:
            raise UnsupportedError(f"{name}={value!r} is not offered, only {expected!r}")


def _parse_moe(wrapper: Fields, text: Fields) -> MoeConfig | None:
    num_experts = text.optional_integer("num_experts")
    if num_experts is None:
        return None
    _check_router(text)
    latent_size = text.optional_integer("routed_expert_hidden_size")
    moe = MoeConfig(
        num_experts=num_experts,
        experts_per_token=text.integer("num_experts_per_token"),
        intermediate_size=text.integer("moe_intermediate_size"),
        latent_size=latent_size,
        latent_norm=latent_size is not None and text.flag("latent_moe_use_norm", default=False),
        shared_intermediate_size=text.integer("num_shared_experts", default=0, minimum=0)
        * text.integer("moe_intermediate_size"),
        # The vendor code renormalises only when there is more than one weight (section 1.4).
        renormalize=text.flag("moe_renormalize", default=True) and text.integer("num_experts_per_token") > 1,
        routed_scaling_factor=text.number("routed_scaling_factor", default=1.0),
        # The vendor code copies the section from text_config to the wrapper; accept it in either place.
        quantized=_declares_mxfp4(text if text.has("quantization_config") else wrapper),
    )
    _require(num_experts <= MAX_EXPERTS, f"num_experts={num_experts} exceeds {MAX_EXPERTS}, the most that is offered")
    _require(
        moe.experts_per_token <= num_experts,
        f"num_experts_per_token={moe.experts_per_token} exceeds num_experts={num_experts}",
    )
    if moe.quantized:
        width = latent_size if latent_size is not None else text.integer("hidden_size")
        for name, size in (("expert input width", width), ("moe_intermediate_size", moe.intermediate_size)):
            _require(
                size % MXFP4_GROUP == 0,
                f"{name}={size} is not a multiple of {MXFP4_GROUP}, the MXFP4 group along the input axis",
            )
    return moe


def _moe_layers(text: Fields, num_layers: int, moe: MoeConfig | None) -> tuple[bool, ...]:
    if moe is None:
        return (False,) * num_layers
    first = text.integer("first_k_dense_replace", default=0, minimum=0)
    every = text.integer("moe_layer_freq", default=1)
    return tuple(i >= first and i % every == 0 for i in range(num_layers))


def _token_ids(wrapper: Fields, text: Fields, name: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids of a key that may be absent, null, one id or a list; the wrapper wins."""
    source = wrapper if wrapper.has(name) else text
    ids = source.integers(name) if source.has(name) else ()
    for token_id in ids:
        _require(0 <= token_id < vocab_size, f"{name}={token_id} is outside the vocabulary 0..{vocab_size - 1}")
    return ids


def _check_extras(text: Fields) -> None:
    """Refuse features of the config format that change the computation and are not implemented."""
    for name in ("tie_word_embeddings", "attention_bias"):
        if text.flag(name, default=False):
            raise UnsupportedError(f"{name}=true is not offered for this architecture, only false")
    num_mtp = text.integer("num_nextn_predict_layers", default=0, minimum=0)
    if num_mtp:
        raise UnsupportedError(f"num_nextn_predict_layers={num_mtp} is not offered, only 0")


def parse_config(raw: dict[str, Any]) -> KimiK3Config:
    """Parse ``config.json`` of a K3 or Kimi-Linear checkpoint.

    Raises:
        ConfigError: a field is missing, has the wrong type or is out of range; names field and value.
        UnsupportedError: a valid field selects something that is not implemented.
    """
    wrapper = Fields(raw, where="")
    model_type = wrapper.text("model_type")
    wrapped = model_type == WRAPPER_TYPE
    text = wrapper.section("text_config") if wrapped else wrapper
    text_type = text.text("model_type")
    _require(
        text_type == TEXT_TYPE,
        f"{text.where}model_type={text_type!r} is not {TEXT_TYPE!r} (or {WRAPPER_TYPE!r} with a text_config)",
    )
    _check_extras(text)
    num_layers = text.integer("num_hidden_layers")
    vocab_size = text.integer("vocab_size")
    linear = text.section("linear_attn_config")
    moe = _parse_moe(wrapper, text)
    activation = text.choice("hidden_act", ("silu", "situ"))
    beta, linear_name = text.positive("activation_situ_beta", default=1.0), "activation_situ_linear_beta"
    bos, pad = (_token_ids(wrapper, text, name, vocab_size) for name in ("bos_token_id", "pad_token_id"))
    return KimiK3Config(
        wrapped=wrapped,
        vocab_size=vocab_size,
        hidden_size=text.integer("hidden_size"),
        intermediate_size=text.integer("intermediate_size"),
        layer_kinds=_layer_kinds(linear, num_layers),
        moe_layers=_moe_layers(text, num_layers, moe),
        rms_norm_eps=text.positive("rms_norm_eps"),
        attn_res_block_size=text.optional_integer("attn_res_block_size"),
        activation="situ" if activation == "situ" else "silu",
        situ_beta=beta,
        situ_linear_beta=text.positive(linear_name) if text.has(linear_name) else None,
        max_position_embeddings=_max_positions(text),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_token_ids(wrapper, text, "eos_token_id", vocab_size),
        pad_token_id=pad[0] if pad else None,
        kda=_parse_kda(linear),
        mla=_parse_mla(text),
        moe=moe,
    )


def _max_positions(text: Fields) -> int:
    """Context cap; Kimi-Linear checkpoints spell it ``model_max_length``."""
    name = "max_position_embeddings" if text.has("max_position_embeddings") else "model_max_length"
    return text.integer(name)
