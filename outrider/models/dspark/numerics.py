"""What the start-up probe checks of a drafter besides its products, norms and activation.

A row whose bits depend on its company changes drafts, hence acceptance, and under the rules with coins the tokens.

Dims: S sequences, G drafts, D model width, V target vocabulary, U draft vocabulary, r Markov rank, F features of a
sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from outrider.models.dspark.config import DSparkConfig, MarkovKind
from outrider.models.dspark.heads import MarkovHead, draft_chain
from outrider.models.dspark.joined import block_mask
from outrider.models.layers import shapes_only
from outrider.ops.block_attention import BlockMask
from outrider.ops.invariant import island_dtype, sigmoid, tanh
from outrider.ops.linear import linear_in_tiles, tile_candidates
from outrider.ops.native.library import Library, library_for
from outrider.ops.native.markov import NativeMarkov, chain_weights
from outrider.ops.probe import FEW_CASES, FIXED, NUM_ROWS, OpCheck, company_violation, fixed_check, random_rows
from outrider.ops.probe_block import (
    BlockSizes,
    block_attention_check,
    block_attention_name,
    context_rows_check,
    context_rows_name,
    row_numbers,
)
from outrider.ops.probe_ops import PROBE_COLUMNS

__all__ = ["BlockCheckNames", "block_checks", "check_names", "suits_native_chain"]

LABEL = "drafter"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCheckNames:
    """Names of the checks of what exists in several forms."""

    attention: Mapping[BlockMask, str]
    context_rows: str
    chain: str | None  # None where the Markov head has a torch form only


def check_names(config: DSparkConfig) -> BlockCheckNames:
    """Names of a drafter's checks; all begin with "drafter"."""
    sizes = _block_sizes(config)
    return BlockCheckNames(
        attention={mask: f"{LABEL} {block_attention_name(sizes, mask)}" for mask in _masks(config)},
        context_rows=f"{LABEL} {context_rows_name(sizes)}",
        chain=f"{LABEL} {_chain_name(config)}" if suits_native_chain(config) else None,
    )


def block_checks(config: DSparkConfig, dtype: torch.dtype, device: torch.device) -> tuple[OpCheck, ...]:
    """Block attention under each mask of the layers, context rows, and the Markov chain or its gates.

    Candidates are the native form, where there is one, and the torch form.
    """
    sizes, native = _block_sizes(config), library_for(dtype, device)
    checks = [block_attention_check(sizes, mask, dtype, device, native) for mask in _masks(config)]
    checks.append(context_rows_check(sizes, dtype, device, native))
    if native is not None and suits_native_chain(config):
        checks.append(_chain_check(config, native))
    if config.markov in (MarkovKind.GATED, MarkovKind.RNN):
        checks.append(_gates_check(config.markov_rank, dtype, device))
    return tuple(replace(check, name=f"{LABEL} {check.name}") for check in checks)


def suits_native_chain(config: DSparkConfig) -> bool:
    """Whether the native chain takes this Markov head: it multiplies pairs of values."""
    return config.markov is MarkovKind.VANILLA and config.markov_rank % 2 == 0


def _block_sizes(config: DSparkConfig) -> BlockSizes:
    return BlockSizes(
        num_rows=config.num_block_rows,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def _masks(config: DSparkConfig) -> tuple[BlockMask, ...]:
    return tuple(dict.fromkeys(block_mask(mask) for mask in config.layer_masks))


def _chain_name(config: DSparkConfig) -> str:
    confidence = config.confidence
    features = (
        "" if confidence is None else f", confidence from {config.hidden_size}{' and rank' * confidence.with_markov}"
    )
    vocabulary = min(config.draft_vocab_size, PROBE_COLUMNS)
    return f"Markov chain of {config.num_draft_tokens} over {vocabulary} of rank {config.markov_rank}{features}"


def _chain_check(config: DSparkConfig, native: Library) -> OpCheck:
    """Greedy drafts of a sequence, the logits that they were chosen from and, natively, the confidence; bfloat16, CPU.

    The products of the torch form have checks of their own and run row by row here.
    """
    dtype, device = torch.bfloat16, torch.device("cpu")
    num_drafts, width, rank = config.num_draft_tokens, config.hidden_size, config.markov_rank
    vocab, draft_vocab = (min(size, PROBE_COLUMNS) for size in (config.vocab_size, config.draft_vocab_size))
    target_ids_U = torch.arange(vocab - draft_vocab, vocab) if config.reduced_vocabulary else None
    single_rows = tile_candidates(dtype)[-1]

    def find(geometry: str) -> str | None:
        w1_Vr = random_rows(vocab, rank, dtype=dtype, device=device)
        w2_Ur = random_rows(draft_vocab, rank, dtype=dtype, device=device, seed=2) * 0.2
        head = _markov_head(w1_Vr, w2_Ur, hidden_size=width)
        confidence_F = None
        if config.confidence is not None:
            num_features = width + rank * config.confidence.with_markov
            confidence_F = random_rows(num_features, dtype=dtype, device=device, seed=3) * 0.05
        weights = chain_weights(
            w1_Vr,
            w2_Ur,
            target_ids_U=target_ids_U,
            confidence_F=confidence_F,
            confidence_bias=0.5,
            hidden_size=width,
        )
        markov = NativeMarkov(native)

        def chain(x_SF: torch.Tensor) -> torch.Tensor:
            """Drafts, confidence and logits side by side ``[S, ...]``; float32 holds each of them exactly."""
            anchor_ids_S = row_numbers(x_SF, vocab)
            hidden_SGD, logits_SGU = (
                part_SF.unflatten(1, (num_drafts, -1)).clone(memory_format=torch.contiguous_format)
                for part_SF in x_SF.split([num_drafts * width, num_drafts * draft_vocab], dim=1)
            )
            confidence_SG = None
            if geometry == FIXED:
                drafts = draft_chain(
                    head,
                    anchor_ids_S=anchor_ids_S,
                    hidden_GSD=hidden_SGD.transpose(0, 1).contiguous(),
                    logits_GSV=logits_SGU.transpose(0, 1).contiguous(),
                    target_ids_V=target_ids_U,
                    linear=lambda x, weight_OI: linear_in_tiles(x, weight_OI, single_rows),
                )
                token_ids_SG, logits_SGU = drafts.token_ids_SG, torch.stack(drafts.logits, dim=1)
            else:
                token_ids_SG, confidence_SG = markov.chain(
                    weights, anchor_ids_S, hidden_SGD, logits_SGU, keep_logits=True
                )
            parts = [token_ids_SG.float(), logits_SGU.flatten(1).float()]
            return torch.cat(parts if confidence_SG is None else [*parts, confidence_SG], dim=1)

        rows_3F = random_rows(NUM_ROWS, num_drafts * (width + draft_vocab), dtype=dtype, device=device, seed=4)
        return company_violation(chain, rows_3F, cases=FEW_CASES)

    return OpCheck(name=_chain_name(config), geometries=(native.geometry, FIXED), find_violation=find)


def _markov_head(w1_Vr: torch.Tensor, w2_Ur: torch.Tensor, *, hidden_size: int) -> MarkovHead:
    """A vanilla head of these weights, made without drawing others first."""
    (vocab, rank), draft_vocab = w1_Vr.shape, w2_Ur.shape[0]
    with shapes_only():
        head = MarkovHead(vocab_size=vocab, draft_vocab_size=draft_vocab, rank=rank, hidden_size=hidden_size)
    head.markov_w1.weight = nn.Parameter(w1_Vr, requires_grad=False)
    head.markov_w2.weight = nn.Parameter(w2_Ur, requires_grad=False)
    return head


def _gates_check(rank: int, dtype: torch.dtype, device: torch.device) -> OpCheck:
    """Sigmoid and tanh of a Markov head's gates."""

    def find() -> str | None:
        rows = random_rows(NUM_ROWS, rank, dtype=island_dtype(dtype), device=device, seed=2)
        return company_violation(sigmoid, rows) or company_violation(tanh, rows)

    return fixed_check(f"Markov gates of {rank}", find)
