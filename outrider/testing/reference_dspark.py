"""A literal DSpark drafter in float64: one sequence, one row and one head at a time.

Slow and obviously right. It shares no code with ``outrider.models.dspark`` or ``outrider.ops``, so
that the two can be compared; every number it needs is stated in ``ReferenceShape``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

__all__ = ["ReferenceContext", "ReferenceDSpark", "ReferenceDraft", "ReferenceShape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceShape:
    """Numbers of the drafter, written out by the test that uses them."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    block_rows: int
    first_row: int  # block row that predicts the token after the anchor
    mask_token_id: int
    rope_theta: float
    yarn_factor: float | None = None
    yarn_original: int = 0
    markov: str = "vanilla"  # "none", "vanilla", "gated", "rnn"
    confidence: str = "markov"  # "none", "hidden", "markov"
    causal_layers: tuple[int, ...] = ()
    query_window: int | None = None  # of the causal layers: position differences below it are seen
    anchor_window: int | None = None  # of the causal layers: positions from anchor - window on are seen
    tap_norm: bool = False


@dataclass(slots=True)
class ReferenceContext:
    """Cached keys and values: per layer, per position, a list of head vectors."""

    keys: list[list[list[torch.Tensor]]] = field(default_factory=list)
    values: list[list[list[torch.Tensor]]] = field(default_factory=list)
    length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceDraft:
    """Drafts of one block with everything they came from."""

    token_ids: list[int]
    logits: list[torch.Tensor]
    confidence: list[float]


class ReferenceDSpark:
    """One sequence, float64, from weights under their DeepSpec flat names.

    Args:
        weights: tensors by name, without embedding; ``lm_head.weight`` and ``d2t`` when reduced.
        shape: the drafter's numbers.
        embedding_VD: target embedding.
        head_VD: target head; ignored when the weights hold their own.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        shape: ReferenceShape,
        embedding_VD: torch.Tensor,
        head_VD: torch.Tensor,
    ) -> None:
        self.weights = {name: tensor.double() for name, tensor in weights.items() if name != "d2t"}
        self.d2t = weights.get("d2t")
        self.shape = shape
        self.embedding_VD = embedding_VD.double()
        self.head_VD = self.weights.get("lm_head.weight", head_VD.double())

    def new_context(self) -> ReferenceContext:
        """Empty cache."""
        layers = range(self.shape.num_layers)
        return ReferenceContext(keys=[[] for _ in layers], values=[[] for _ in layers])

    def observe(self, context: ReferenceContext, taps: list[list[torch.Tensor]]) -> None:
        """Append rows; ``taps[row][tap]`` is a vector of the target's width."""
        for row in taps:
            feature = self._feature(row)
            for layer in range(self.shape.num_layers):
                key, value = self._key_value(layer, feature, context.length)
                context.keys[layer].append(key)
                context.values[layer].append(value)
            context.length += 1

    def draft(self, context: ReferenceContext, anchor: int) -> ReferenceDraft:
        """Draft one block after ``anchor``, which sits at position ``context.length``."""
        hidden = self._backbone(context, anchor)
        shape, weights = self.shape, self.weights
        previous, state = anchor, torch.zeros(0)
        if shape.markov == "rnn":
            state = torch.zeros(weights["markov_head.markov_w1.weight"].shape[1], dtype=torch.float64)
        token_ids: list[int] = []
        logits: list[torch.Tensor] = []
        confidence: list[float] = []
        for row in range(shape.first_row, shape.block_rows):
            scores = self.head_VD @ hidden[row]
            if shape.markov != "none":
                features, state = self._markov(hidden[row], previous, state)
                scores = scores + weights["markov_head.markov_w2.weight"] @ features
            if shape.confidence != "none":
                confidence.append(self._confidence(hidden[row], previous))
            draft = int(torch.argmax(scores))
            previous = draft if self.d2t is None else draft + int(self.d2t[draft])
            token_ids.append(previous)
            logits.append(scores)
        return ReferenceDraft(token_ids=token_ids, logits=logits, confidence=confidence)

    def _feature(self, row: list[torch.Tensor]) -> torch.Tensor:
        taps = [tap.double() for tap in row]
        if self.shape.tap_norm:
            taps = [self._norm(tap, f"fc_norm.{index}.weight") for index, tap in enumerate(taps)]
        return self._norm(self.weights["fc.weight"] @ torch.cat(taps), "hidden_norm.weight")

    def _key_value(
        self, layer: int, normed: torch.Tensor, position: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        prefix = f"layers.{layer}.self_attn."
        keys, values = [], []
        for head in range(self.shape.num_kv_heads):
            rows = slice(head * self.shape.head_dim, (head + 1) * self.shape.head_dim)
            key = self._norm(self.weights[prefix + "k_proj.weight"][rows] @ normed, prefix + "k_norm.weight")
            keys.append(self._rotate(key, position))
            values.append(self.weights[prefix + "v_proj.weight"][rows] @ normed)
        return keys, values

    def _backbone(self, context: ReferenceContext, anchor: int) -> list[torch.Tensor]:
        shape = self.shape
        token_ids = [anchor] + [shape.mask_token_id] * (shape.block_rows - 1)
        rows = [self.embedding_VD[token] for token in token_ids]
        for layer in range(shape.num_layers):
            prefix = f"layers.{layer}."
            normed = [self._norm(x, prefix + "input_layernorm.weight") for x in rows]
            pairs = [self._key_value(layer, n, context.length + k) for k, n in enumerate(normed)]
            keys = context.keys[layer] + [key for key, _ in pairs]
            values = context.values[layer] + [value for _, value in pairs]
            for k, n in enumerate(normed):
                attended = self._attend(layer, n, context.length + k, keys, values)
                rows[k] = rows[k] + self.weights[prefix + "self_attn.o_proj.weight"] @ attended
            for k, x in enumerate(rows):
                m = self._norm(x, prefix + "post_attention_layernorm.weight")
                gate = self.weights[prefix + "mlp.gate_proj.weight"] @ m
                up = self.weights[prefix + "mlp.up_proj.weight"] @ m
                rows[k] = x + self.weights[prefix + "mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
        return [self._norm(x, "norm.weight") for x in rows]

    def _attend(
        self,
        layer: int,
        normed: torch.Tensor,
        position: int,
        keys: list[list[torch.Tensor]],
        values: list[list[torch.Tensor]],
    ) -> torch.Tensor:
        shape = self.shape
        prefix = f"layers.{layer}.self_attn."
        outputs = []
        for head in range(shape.num_heads):
            rows = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
            query = self._norm(self.weights[prefix + "q_proj.weight"][rows] @ normed, prefix + "q_norm.weight")
            query = self._rotate(query, position)
            shared = head // (shape.num_heads // shape.num_kv_heads)
            seen = [p for p in range(len(keys)) if self._visible(layer, position, p, len(keys) - shape.block_rows)]
            scores = torch.stack([query @ keys[p][shared] for p in seen]) / math.sqrt(shape.head_dim)
            weights = torch.exp(scores - scores.max())
            weights = weights / weights.sum()
            mixed = torch.zeros(shape.head_dim, dtype=torch.float64)
            for weight, p in zip(weights, seen, strict=True):
                mixed = mixed + weight * values[p][shared]
            outputs.append(mixed)
        return torch.cat(outputs)

    def _visible(self, layer: int, query: int, key: int, anchor: int) -> bool:
        shape = self.shape
        if layer not in shape.causal_layers:
            return True
        from_query = shape.query_window is None or query - key < shape.query_window
        from_anchor = shape.anchor_window is None or key >= anchor - shape.anchor_window
        return key <= query and from_query and from_anchor

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + self.shape.eps) * self.weights[name]

    def _rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = self.shape.head_dim // 2
        rotated = torch.zeros_like(x)
        for i in range(half):
            frequency, gain = self._frequency(i)
            cos, sin = gain * math.cos(position * frequency), gain * math.sin(position * frequency)
            rotated[i] = x[i] * cos - x[i + half] * sin
            rotated[i + half] = x[i + half] * cos + x[i] * sin
        return rotated

    def _frequency(self, pair: int) -> tuple[float, float]:
        """Angle per position of one pair, and the gain on cos and sin (dspark.md 1.11)."""
        shape = self.shape
        plain = shape.rope_theta ** (-2 * pair / shape.head_dim)
        if shape.yarn_factor is None:
            return plain, 1.0

        def dim_of(rotations: float) -> float:
            span = math.log(shape.yarn_original / (rotations * 2 * math.pi))
            return shape.head_dim * span / (2 * math.log(shape.rope_theta))

        low = max(math.floor(dim_of(32.0)), 0)
        high = min(math.ceil(dim_of(1.0)), shape.head_dim - 1)
        ramp = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
        mixed = plain * (1 - ramp) + plain / shape.yarn_factor * ramp
        return mixed, 0.1 * math.log(shape.yarn_factor) + 1.0

    def _markov(self, hidden: torch.Tensor, previous: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.weights["markov_head.markov_w1.weight"][previous]
        if self.shape.markov == "vanilla":
            return embedded, state
        if self.shape.markov == "gated":
            joined = torch.cat([hidden, embedded])
            gate = self.weights["markov_head.gate_proj.weight"] @ joined
            return torch.sigmoid(gate + self.weights["markov_head.gate_proj.bias"]) * embedded, state
        joined = torch.cat([state, embedded, hidden])
        mixed = self.weights["markov_head.joint_proj.weight"] @ joined + self.weights["markov_head.joint_proj.bias"]
        rank = embedded.shape[0]
        gate, candidate, output = mixed[:rank], mixed[rank : 2 * rank], mixed[2 * rank :]
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)

    def _confidence(self, hidden: torch.Tensor, previous: int) -> float:
        features = hidden
        if self.shape.confidence == "markov":
            features = torch.cat([hidden, self.weights["markov_head.markov_w1.weight"][previous]])
        logit = self.weights["confidence_head.proj.weight"][0] @ features
        if "confidence_head.proj.bias" in self.weights:
            logit = logit + self.weights["confidence_head.proj.bias"][0]
        return float(torch.sigmoid(logit))
