"""The drafter's weights as a module tree; names are those of a DeepSpec flat checkpoint.

The module only holds parameters: inference runs on ``block.BlockPredictor``, training applies the
same submodules (they are ordinary ``nn`` layers) with gradients. Embedding and, unless the output
vocabulary is reduced, the head are the target's and are not held here.

Dims: D model width, A tapped layers, H query heads, J key/value heads, K head width,
V vocabulary, r Markov rank.
"""

import torch
from torch import nn

from outrider.models.dspark.config import DSparkConfig, MarkovKind
from outrider.models.dspark.heads import ConfidenceHead, GatedMarkovHead, MarkovHead, RnnMarkovHead

__all__ = ["DSparkModel", "DraftLayer"]


class DraftAttention(nn.Module):
    """Projections and per-head norms of one draft layer; keys and values also serve the context."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, width, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)


class DraftMlp(nn.Module):
    """SwiGLU projections of one draft layer."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class DraftLayer(nn.Module):
    """One pre-norm draft layer."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DraftMlp(config)


class DSparkModel(nn.Module):
    """All trained parameters of a drafter.

    Optional members, present only when the config says so: ``fc_norm`` (a list of norms),
    ``markov_head``, ``confidence_head``, and for a reduced vocabulary ``lm_head`` and the buffer
    ``d2t`` (int64 [draft_vocab]: target id = draft id + d2t[draft id]).
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        num_taps = len(config.aux_layer_ids)
        self.fc = nn.Linear(num_taps * config.target_hidden_size, width, bias=False)
        self.fc_norm = (
            nn.ModuleList(nn.RMSNorm(config.target_hidden_size, eps=config.rms_norm_eps) for _ in range(num_taps))
            if config.aux_norm
            else None
        )
        self.hidden_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.markov_head = _markov_head(config)
        self.confidence_head = (
            None
            if config.confidence is None
            else ConfidenceHead(
                width + (config.markov_rank if config.confidence.with_markov else 0), bias=config.confidence.bias
            )
        )
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if config.reduced_vocabulary else None
        self.d2t: torch.Tensor | None
        self.register_buffer(
            "d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64) if config.reduced_vocabulary else None
        )

    def draft_layers(self) -> list[DraftLayer]:
        """The layers with their type, which ModuleList forgets."""
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def num_parameters(self) -> int:
        """Trained values, the target's embedding and head not counted."""
        return sum(parameter.numel() for parameter in self.parameters())


def _markov_head(config: DSparkConfig) -> MarkovHead | None:
    match config.markov:
        case MarkovKind.NONE:
            return None
        case MarkovKind.VANILLA:
            head = MarkovHead
        case MarkovKind.GATED:
            head = GatedMarkovHead
        case MarkovKind.RNN:
            head = RnnMarkovHead
    return head(
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        rank=config.markov_rank,
        hidden_size=config.hidden_size,
    )
