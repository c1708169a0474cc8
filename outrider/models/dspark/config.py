"""The numbers of one DSpark drafter, normalised from every supported checkpoint family.

After loading, every convention is explicit: aux layer ids are always "output of layer t", the
block layout says which row predicts which position, and each layer states its own mask.
"""

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from outrider.errors import CheckpointError, ConfigError
from outrider.ops.paged import KEY_TILE

__all__ = [
    "AuxStream",
    "BlockLayout",
    "ConfidenceConfig",
    "DSparkConfig",
    "DraftLayerMask",
    "MarkovKind",
    "RopeConfig",
    "TapConvention",
    "WindowOrigin",
    "YarnConfig",
    "check_target",
]


class BlockLayout(Enum):
    """Which position a block row predicts (row 0 holds the anchor at position p)."""

    ANCHOR_FIRST = "anchor_first"  # row k predicts p + k + 1: every row is a draft
    ANCHOR_DROP = "anchor_drop"  # row k predicts p + k: row 0 is unused


class MarkovKind(Enum):
    """How the previous token biases the next row's logits."""

    NONE = "none"
    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


class AuxStream(Enum):
    """Which tensor of a target with attention residuals is tapped; plain targets have only one.

    The values are the stream names of ``TargetModel.set_aux_layers``.
    """

    PREFIX = "prefix"  # the running residual alone
    MIXTURE = "mixture"  # what the next layer consumes before its norm; checkpoints say "attn_res"


class TapConvention(Enum):
    """What a layer id of a tap means in a config file. Loaded ids always mean OUTPUT, t.

    Ids one off cost a token per round and raise no error, so the config may say which it is
    (``aux_layer_convention``); a family's own meaning is the default.
    """

    OUTPUT = "output"  # t: what leaves layer t
    INPUT = "input"  # a: what enters layer a = what leaves layer a - 1
    HIDDEN_STATES = "hidden_states"  # index into Hugging Face's tuple: 0 the embedding, i what leaves layer i - 1

    @property
    def offset(self) -> int:
        """What is added to an id of the file to get "output of layer t"."""
        return 0 if self is TapConvention.OUTPUT else -1


class WindowOrigin(Enum):
    """From which row a context window is measured."""

    QUERY = "query"  # visible from the query's position - (window - 1), itself included
    ANCHOR = "anchor"  # visible from the anchor's position - window, the same for all block rows


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnConfig:
    """YaRN stretch of the rotary frequencies; lengths in tokens."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float  # multiplies cos and sin, so scores gain its square


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding, half-split pairing; ``yarn`` is None for plain frequencies."""

    theta: float
    yarn: YarnConfig | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayerMask:
    """What a row of one draft layer may see besides its own causal-free block."""

    causal_block: bool  # True: row k sees block rows 0..k only
    window: int | None  # tokens of visible context; None is unlimited
    window_origin: WindowOrigin


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceConfig:
    """Shape of the confidence head."""

    with_markov: bool  # reads [hidden ; W1[prev]] instead of hidden alone
    bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig:
    """One drafter; see the field comments for units and conventions.

    Raises ConfigError on construction when two values contradict each other.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    vocab_size: int  # the target's, padded as in its embedding
    draft_vocab_size: int  # rows of the drafter's logits; < vocab_size for a reduced head
    num_block_rows: int  # rows of one block, the anchor's included
    layout: BlockLayout
    mask_token_id: int
    target_hidden_size: int
    num_target_layers: int | None  # None where the family does not record it
    aux_layer_ids: tuple[int, ...]  # ascending t, "output of target layer t"
    aux_layer_convention: TapConvention  # of the ids in the file, which messages speak of
    aux_hidden_stream: AuxStream
    aux_norm: bool  # one RMSNorm per tap before the projection
    markov: MarkovKind
    markov_rank: int  # 0 without a Markov head
    confidence: ConfidenceConfig | None
    layer_masks: tuple[DraftLayerMask, ...]
    max_context: int | None = None  # positions that it was trained for; None where the family does not record it

    def __post_init__(self) -> None:
        _check_geometry(self)
        _check_vocabulary(self)
        _check_aux_layers(self)
        _check_heads(self)

    @property
    def first_draft_row(self) -> int:
        """Block row whose logits belong to the first draft."""
        return 0 if self.layout is BlockLayout.ANCHOR_FIRST else 1

    @property
    def num_draft_tokens(self) -> int:
        """Drafts of one full block: every row, or every row but the anchor's."""
        return self.num_block_rows - self.first_draft_row

    @property
    def context_row_size(self) -> int:
        """Values cached for one context token: keys and values of every draft layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def reduced_vocabulary(self) -> bool:
        """Whether the drafter has its own, smaller output vocabulary."""
        return self.draft_vocab_size != self.vocab_size

    def written_tap(self, layer_id: int) -> str:
        """A tap as the config file has it, for a message."""
        convention = self.aux_layer_convention
        return f"aux layer id {layer_id - convention.offset} ({convention.value} convention)"


def check_target(config: DSparkConfig, *, vocab_size: int, hidden_size: int, num_layers: int) -> None:
    """Refuse a drafter that was trained for another target.

    Raises:
        CheckpointError: vocabulary, width or depth of the target do not match the drafter.
    """
    if config.vocab_size != vocab_size:
        raise CheckpointError(
            f"drafter vocab_size={config.vocab_size} but the target has {vocab_size} rows; "
            "use the drafter trained for this target"
        )
    if config.target_hidden_size != hidden_size:
        raise CheckpointError(
            f"drafter expects target hidden size {config.target_hidden_size}, the target has "
            f"{hidden_size}; use the drafter trained for this target"
        )
    if config.hidden_size != hidden_size:
        raise CheckpointError(
            f"drafter hidden_size={config.hidden_size}, but it reads the target's embedding of width "
            f"{hidden_size}; use the drafter trained for this target"
        )
    if config.num_target_layers is not None and config.num_target_layers != num_layers:
        raise CheckpointError(
            f"drafter num_target_layers={config.num_target_layers}, the target has {num_layers} "
            "layers; use the drafter trained for this target"
        )
    if config.aux_layer_ids[-1] >= num_layers:
        raise CheckpointError(
            f"{config.written_tap(config.aux_layer_ids[-1])} means the output of layer {config.aux_layer_ids[-1]}, "
            f"but the target has {num_layers} layers; state the right aux_layer_convention"
        )
    if config.aux_layer_convention is TapConvention.HIDDEN_STATES and config.aux_layer_ids[-1] == num_layers - 1:
        raise CheckpointError(
            f"{config.written_tap(config.aux_layer_ids[-1])} of a target of {num_layers} layers is the stream behind "
            f"its last norm, which is not tapped; use ids up to {num_layers - 1}"
        )


def _check_geometry(config: DSparkConfig) -> None:
    for name, value in (
        ("num_layers", config.num_layers),
        ("hidden_size", config.hidden_size),
        ("num_heads", config.num_heads),
        ("num_kv_heads", config.num_kv_heads),
        ("head_dim", config.head_dim),
        ("intermediate_size", config.intermediate_size),
        ("target_hidden_size", config.target_hidden_size),
    ):
        if value < 1:
            raise ConfigError(f"drafter {name}={value} must be at least 1")
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(f"drafter num_heads={config.num_heads} is no multiple of num_kv_heads={config.num_kv_heads}")
    if config.head_dim % 2:
        raise ConfigError(f"drafter head_dim={config.head_dim} must be even for rotary pairs")
    if config.num_block_rows > KEY_TILE:
        raise ConfigError(
            f"drafter block_size={config.num_block_rows} is not offered; the attention takes blocks of up to {KEY_TILE}"
        )
    if len(config.layer_masks) != config.num_layers:
        raise ConfigError(
            f"{len(config.layer_masks)} layer_types for {config.num_layers} drafter layers; list one per layer"
        )
    for mask in config.layer_masks:
        if mask.window is not None and mask.window < 1:
            raise ConfigError(f"drafter sliding window {mask.window} must be at least 1 token")


def _check_vocabulary(config: DSparkConfig) -> None:
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise ConfigError(f"mask_token_id={config.mask_token_id} is outside the vocabulary of {config.vocab_size}")
    if not 1 <= config.draft_vocab_size <= config.vocab_size:
        raise ConfigError(f"draft_vocab_size={config.draft_vocab_size} is outside 1..{config.vocab_size}")
    if config.num_draft_tokens < 1:
        raise ConfigError(
            f"a block of {config.num_block_rows} rows ({config.layout.value}) predicts no token; "
            "block_size must be larger"
        )


def _check_aux_layers(config: DSparkConfig) -> None:
    ids = config.aux_layer_ids
    if not ids:
        raise ConfigError("the drafter taps no target layer; target_layer_ids must not be empty")
    if any(later <= earlier for earlier, later in pairwise(ids)):
        raise ConfigError(
            f"aux layer ids {[t - config.aux_layer_convention.offset for t in ids]} must ascend without duplicates: "
            "the projection's columns follow them"
        )
    if ids[0] < 0:
        raise ConfigError(
            f"{config.written_tap(ids[0])} means the output of layer {ids[0]}, which is no decoder layer; state the "
            "right aux_layer_convention"
        )
    if config.num_target_layers is not None and ids[-1] >= config.num_target_layers:
        raise ConfigError(
            f"{config.written_tap(ids[-1])} means the output of layer {ids[-1]}, but num_target_layers="
            f"{config.num_target_layers}; state the right aux_layer_convention"
        )


def _check_heads(config: DSparkConfig) -> None:
    if (config.markov is MarkovKind.NONE) != (config.markov_rank == 0):
        raise ConfigError(f"markov_rank={config.markov_rank} contradicts markov head {config.markov.value!r}")
    if config.markov_rank < 0:
        raise ConfigError(f"markov_rank={config.markov_rank} must not be negative")
    if config.confidence is not None and config.confidence.with_markov and config.markov_rank == 0:
        raise ConfigError("confidence_head_with_markov needs a Markov head, but markov_rank=0; set it to false")
