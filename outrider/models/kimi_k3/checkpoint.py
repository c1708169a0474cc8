"""Checkpoint names of the K3 text model and where each tensor goes (k3-architecture section 11).

``assignments`` is the only list of names: the loader fills parameters from it, the architecture report
counts it and the toy writer generates it. Projections that read the same input are joined into one
weight by rows, so a layer needs one product where the checkpoint has up to six matrices.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

from outrider.errors import CheckpointError
from outrider.models.kimi_k3.config import MXFP4_GROUP, KimiK3Config, MoeConfig
from outrider.models.weights import FLOATING, Assignment, CheckpointReader, SourceTensor
from outrider.ops.quant import SCALE_NAN, decode_mxfp4

__all__ = ["SKIPPED_PREFIXES", "assignments", "holds_packed_experts", "text_prefix", "text_tensors"]

SKIPPED_PREFIXES = ("vision_tower.", "mm_projector.")  # section 12; nothing else is skipped
BYTES = (torch.uint8,)

Convert = Callable[[tuple[torch.Tensor, ...]], torch.Tensor]


def text_prefix(config: KimiK3Config) -> str:
    """What every text name starts with."""
    return "language_model." if config.wrapped else ""


def holds_packed_experts(config: KimiK3Config, reader: CheckpointReader) -> bool:
    """Whether the routed experts on disk are MXFP4: iff ``weight_packed`` exists, whatever config says."""
    if True not in config.moe_layers:
        return False
    layer = config.moe_layers.index(True)
    return f"{text_prefix(config)}model.layers.{layer}.block_sparse_moe.experts.0.w1.weight_packed" in reader


class _Plan:
    """Collects assignments; names and parameters are relative to the scope set last."""

    def __init__(self, config: KimiK3Config) -> None:
        self._items: list[Assignment] = []
        self._prefix = text_prefix(config)
        # The release stores these in fp32 and they must not lose bits; bare Kimi-Linear files vary.
        self.fp32 = (torch.float32, torch.float64) if config.wrapped else FLOATING
        self._names = self._prefix
        self._parameters = ""

    def take(self) -> list[Assignment]:
        """What was collected since the last call."""
        items, self._items = self._items, []
        return items

    def scope(self, names: str, parameters: str) -> None:
        """Prefix the names and parameters that follow."""
        self._names = self._prefix + names
        self._parameters = parameters

    def source(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = FLOATING) -> SourceTensor:
        return SourceTensor(name=self._names + name, shape=shape, dtypes=dtypes)

    def add(
        self, parameter: str, sources: tuple[SourceTensor, ...], rows: tuple[int, int] | None, convert: Convert
    ) -> None:
        self._items.append(
            Assignment(sources=sources, parameter=self._parameters + parameter, rows=rows, convert=convert)
        )

    def whole(
        self,
        parameter: str,
        name: str,
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, ...] = FLOATING,
    ) -> None:
        """One tensor fills one parameter."""
        self.add(parameter, (self.source(name, shape, dtypes),), None, _first)

    def joined(self, parameter: str, in_size: int, parts: Iterable[tuple[str, int]]) -> None:
        """Matrices (name, rows) with one input, stacked by rows into one parameter."""
        begin = 0
        for name, num_rows in parts:
            source = self.source(f"{name}.weight", (num_rows, in_size))
            self.add(parameter, (source,), (begin, begin + num_rows), _first)
            begin += num_rows


def _first(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return tensors[0]


def _score_vector(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Fused scoring vector of an attention-residual mix, ``norm * proj`` (section 4.2), unrounded."""
    norm_D, proj_1D = tensors
    return norm_D.to(torch.float64) * proj_1D[0].to(torch.float64)


def _narrow_heads(num_heads: int) -> Convert:
    """``A_log`` is per head; a longer one is zero-padded and the padding must be exactly zero (5.4)."""

    def convert(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        flat = tensors[0].reshape(-1)
        if bool((flat[num_heads:] != 0).any()):
            raise CheckpointError(
                f"entries from {num_heads} on must be zero padding, found "
                f"{flat[num_heads:].abs().max().item():g}; the decay rate is per head"
            )
        return flat[:num_heads]

    return convert


def _decode(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """MXFP4 bytes to exact float values."""
    packed, scale = tensors
    return decode_mxfp4(packed, _checked_scale((scale,)), torch.float32)


def _checked_scale(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """MXFP4 scale codes as they are; refuses the code for NaN."""
    (scale,) = tensors
    if bool((scale == SCALE_NAN).any()):
        raise CheckpointError(f"an MXFP4 scale code is {SCALE_NAN} (NaN); the file is damaged")
    return scale


def _a_log_shape(config: KimiK3Config, name: str, reader: CheckpointReader | None) -> tuple[int, ...]:
    """Stored shape of ``A_log``: K3 pads to head_dim; Kimi-Linear has [1, 1, H, 1] or [H]. All are accepted."""
    num_heads, head_dim = config.kda.num_heads, config.kda.head_dim
    padded, four_dims = (max(num_heads, head_dim),), (1, 1, num_heads, 1)
    if reader is not None and name in reader and reader.shape(name) in (padded, (num_heads,), four_dims):
        return reader.shape(name)
    return padded if config.wrapped else four_dims


def _kda(plan: _Plan, config: KimiK3Config, reader: CheckpointReader | None) -> None:
    kda, width = config.kda, config.hidden_size
    inner, rank = kda.inner_size, kda.head_dim
    gate = ("g_proj", inner) if kda.full_rank_gate else ("g_a_proj", rank)
    plan.joined(
        "in_proj",
        width,
        (
            ("q_proj", inner),
            ("k_proj", inner),
            ("v_proj", inner),
            gate,
            ("f_a_proj", rank),
            ("b_proj", kda.num_heads),
        ),
    )
    for index, name in enumerate(("q_conv1d", "k_conv1d", "v_conv1d")):
        source = plan.source(f"{name}.weight", (inner, 1, kda.conv_kernel_size), plan.fp32)
        plan.add("conv.weight", (source,), (index * inner, (index + 1) * inner), _first)
    plan.whole("f_b_proj", "f_b_proj.weight", (inner, rank))
    if not kda.full_rank_gate:
        plan.whole("g_b_proj", "g_b_proj.weight", (inner, rank))
    a_log = plan.source("A_log", (), plan.fp32)
    a_log = plan.source("A_log", _a_log_shape(config, a_log.name, reader), plan.fp32)
    plan.add("a_log.weight", (a_log,), None, _narrow_heads(kda.num_heads))
    plan.whole("dt_bias.weight", "dt_bias", (inner,), plan.fp32)
    plan.whole("o_norm.weight", "o_norm.weight", (kda.head_dim,), plan.fp32)
    plan.whole("o_proj", "o_proj.weight", (width, inner))


def _mla(plan: _Plan, config: KimiK3Config) -> None:
    mla, width = config.mla, config.hidden_size
    q_rows, value_rows = mla.num_heads * mla.qk_head_dim, mla.num_heads * mla.v_head_dim
    query = ("q_proj", q_rows) if mla.q_lora_rank is None else ("q_a_proj", mla.q_lora_rank)
    gate = (("g_proj", value_rows),) if mla.output_gate else ()
    plan.joined("in_proj", width, (query, ("kv_a_proj_with_mqa", mla.latent_row_size), *gate))
    if mla.q_lora_rank is not None:
        plan.whole("q_norm", "q_a_layernorm.weight", (mla.q_lora_rank,))
        plan.whole("q_b_proj", "q_b_proj.weight", (q_rows, mla.q_lora_rank))
    plan.whole("kv_norm", "kv_a_layernorm.weight", (mla.kv_lora_rank,))
    kv_b_rows = mla.num_heads * (mla.nope_head_dim + mla.v_head_dim)
    plan.whole("kv_b_proj", "kv_b_proj.weight", (kv_b_rows, mla.kv_lora_rank))
    plan.whole("o_proj", "o_proj.weight", (width, value_rows))


def _experts(plan: _Plan, moe: MoeConfig, in_size: int, *, on_disk_packed: bool, keep_packed: bool) -> None:
    """Routed experts: per expert the rows of w1 then w3 in ``gate_up``, w2 in ``down`` (section 7.3)."""
    inner = moe.intermediate_size
    # Name, parameter, first row within an expert, rows, columns of the three matrices.
    matrices = (
        ("w1", "experts.gate_up", 0, inner, in_size),
        ("w3", "experts.gate_up", inner, inner, in_size),
        ("w2", "experts.down", 0, in_size, inner),
    )
    for name, parameter, offset, num_rows, num_columns in matrices:
        rows_per_expert = in_size if parameter == "experts.down" else 2 * inner
        shape = (num_rows, num_columns)
        packed_shape, scale_shape = (num_rows, num_columns // 2), (num_rows, num_columns // MXFP4_GROUP)
        for e in range(moe.num_experts):
            start = e * rows_per_expert + offset
            rows, base = (start, start + num_rows), f"experts.{e}.{name}"
            if not on_disk_packed:
                plan.add(parameter, (plan.source(f"{base}.weight", shape),), rows, _first)
                continue
            packed = plan.source(f"{base}.weight_packed", packed_shape, BYTES)
            scale = plan.source(f"{base}.weight_scale", scale_shape, BYTES)
            if keep_packed:
                plan.add(f"{parameter}_packed", (packed,), rows, _first)
                plan.add(f"{parameter}_scale", (scale,), rows, _checked_scale)
            else:
                plan.add(parameter, (packed, scale), rows, _decode)


def _moe(plan: _Plan, config: KimiK3Config, moe: MoeConfig, *, on_disk_packed: bool, keep_packed: bool) -> None:
    width, shared = config.hidden_size, moe.shared_intermediate_size
    plan.whole("gate.weight", "gate.weight", (moe.num_experts, width))
    plan.whole("correction_bias.weight", "gate.e_score_correction_bias", (moe.num_experts,), plan.fp32)
    parts = [] if moe.latent_size is None else [("routed_expert_down_proj", moe.latent_size)]
    if shared:
        parts += [("shared_experts.gate_proj", shared), ("shared_experts.up_proj", shared)]
        plan.whole("shared_down", "shared_experts.down_proj.weight", (width, shared))
    if parts:
        plan.joined("in_proj", width, parts)
    if moe.latent_size is not None:
        plan.whole("up_proj", "routed_expert_up_proj.weight", (width, moe.latent_size))
        if moe.latent_norm:
            plan.whole("routed_norm", "routed_expert_norm.weight", (moe.latent_size,))
    in_size = width if moe.latent_size is None else moe.latent_size
    _experts(plan, moe, in_size, on_disk_packed=on_disk_packed, keep_packed=keep_packed)


def _mix(plan: _Plan, config: KimiK3Config, parameter: str, name: str) -> None:
    """Norm and projection of one attention-residual mix, fused; absent on a plain residual stream."""
    if config.attn_res_block_size is None:
        return
    width = config.hidden_size
    sources = (plan.source(f"{name}_norm.weight", (width,)), plan.source(f"{name}_proj.weight", (1, width)))
    plan.add(f"{parameter}.weight.weight", sources, None, _score_vector)


def assignments(
    config: KimiK3Config,
    reader: CheckpointReader | None,
    *,
    on_disk_packed: bool,
    keep_packed: bool,
) -> Iterator[Assignment]:
    """Every text tensor of the checkpoint and its place in ``KimiK3Model``, in layer order.

    An iterator, because the release has half a million of them.

    Args:
        config: Parsed config.
        reader: Open checkpoint, asked only for the stored form of ``A_log``; None for the release form.
        on_disk_packed: The experts are stored as MXFP4 pairs (``holds_packed_experts``).
        keep_packed: The model keeps them packed; needs ``on_disk_packed``.

    Raises:
        CheckpointError: packed experts asked of an unquantised checkpoint.
    """
    if keep_packed and not on_disk_packed:
        raise CheckpointError("packed experts need weight_packed tensors, this checkpoint is not quantised")
    width, vocab = config.hidden_size, config.vocab_size
    plan = _Plan(config)
    plan.whole("embedding", "model.embed_tokens.weight", (vocab, width))
    plan.whole("lm_head", "lm_head.weight", (vocab, width))
    plan.whole("norm", "model.norm.weight", (width,))
    _mix(plan, config, "output_mix", "model.output_attn_res")
    for i, kind in enumerate(config.layer_kinds):
        layer, names = f"layers.{i}.", f"model.layers.{i}."
        plan.scope(names, layer)
        plan.whole("attention_norm", "input_layernorm.weight", (width,))
        plan.whole("ffn_norm", "post_attention_layernorm.weight", (width,))
        _mix(plan, config, "attention_mix", "self_attention_res")
        _mix(plan, config, "ffn_mix", "mlp_res")
        plan.scope(f"{names}self_attn.", f"{layer}attention.")
        if kind == "kda":
            _kda(plan, config, reader)
        else:
            _mla(plan, config)
        if config.moe is not None and config.moe_layers[i]:
            plan.scope(f"{names}block_sparse_moe.", f"{layer}ffn.")
            _moe(plan, config, config.moe, on_disk_packed=on_disk_packed, keep_packed=keep_packed)
        else:
            inner = config.intermediate_size
            plan.scope(f"{names}mlp.", f"{layer}ffn.")
            plan.joined("gate_up", width, (("gate_proj", inner), ("up_proj", inner)))
            plan.whole("down", "down_proj.weight", (width, inner))
        yield from plan.take()


def text_tensors(config: KimiK3Config, *, packed: bool) -> Iterator[SourceTensor]:
    """Names, shapes and dtypes of all text tensors in the release form, from the config alone."""
    for item in assignments(config, None, on_disk_packed=packed, keep_packed=False):
        yield from item.sources
