"""Markov and confidence heads: what turns independent block rows into a chain of drafts.

Formulas: dspark.md 1.6 (Markov), 1.7 (confidence), 1.8 (the loop).

Dims: S sequences, G drafts kept, D model width, V draft vocabulary, r Markov rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from outrider.ops.invariant import island_dtype, sigmoid, tanh
from outrider.ops.linear import LinearFunction, embedding
from outrider.ops.select import first_maximum

__all__ = [
    "Chain",
    "ConfidenceHead",
    "DraftChoice",
    "GatedMarkovHead",
    "MarkovHead",
    "RnnMarkovHead",
    "draft_chain",
    "greedy_draft",
]

DraftChoice = Callable[[torch.Tensor, int], torch.Tensor]  # (logits [S, V], draft position) -> draft ids [S]


class MarkovHead(nn.Module):
    """Vanilla head: logits of a row gain ``W2 W1[previous token]``."""

    def __init__(self, *, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.hidden_size = hidden_size
        self.markov_w1 = nn.Embedding(vocab_size, rank)  # indexed by target ids
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def initial_state(self, num_sequences: int) -> torch.Tensor:
        """State before the first row, [S, r] of zeros; only the recurrent head changes it."""
        return self.markov_w1.weight.new_zeros((num_sequences, self.rank))

    def features(
        self, hidden_SD: torch.Tensor, previous_Sr: torch.Tensor, state_Sr: torch.Tensor, linear: LinearFunction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What W2 multiplies for this row, and the state of the next row."""
        return previous_Sr, state_Sr


class GatedMarkovHead(MarkovHead):
    """``sigmoid(gate_proj [hidden ; W1[prev]]) * W1[prev]`` before W2."""

    def __init__(self, *, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, rank=rank, hidden_size=hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def features(
        self, hidden_SD: torch.Tensor, previous_Sr: torch.Tensor, state_Sr: torch.Tensor, linear: LinearFunction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See MarkovHead."""
        joined = torch.cat((hidden_SD, previous_Sr), dim=-1)
        gate_Sr = _sigmoid(linear(joined, self.gate_proj.weight) + self.gate_proj.bias)
        return gate_Sr * previous_Sr, state_Sr


class RnnMarkovHead(MarkovHead):
    """A small gated recurrence over the drafts; the row's output reads the old state."""

    def __init__(self, *, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, rank=rank, hidden_size=hidden_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def features(
        self, hidden_SD: torch.Tensor, previous_Sr: torch.Tensor, state_Sr: torch.Tensor, linear: LinearFunction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See MarkovHead."""
        joined = torch.cat((state_Sr, previous_Sr, hidden_SD), dim=-1)
        projected = linear(joined, self.joint_proj.weight) + self.joint_proj.bias
        gate_Sr, candidate_Sr, output_Sr = projected.chunk(3, dim=-1)
        keep_Sr = _sigmoid(gate_Sr)
        return _tanh(output_Sr), keep_Sr * state_Sr + (1 - keep_Sr) * _tanh(candidate_Sr)


class ConfidenceHead(nn.Module):
    """P(draft accepted | all earlier drafts accepted), from the row and the previous token."""

    def __init__(self, num_features: int, *, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(num_features, 1, bias=bias)

    def probability(self, features_SGF: torch.Tensor, linear: LinearFunction) -> torch.Tensor:
        """Confidence of each draft, [S, G]; the whole head in the island dtype.

        A bf16 dot product over thousands of features would decide a threshold by its rounding.
        """
        island = island_dtype(features_SGF.dtype)
        logits_SG1 = linear(features_SGF.to(island), self.proj.weight.to(island))
        if self.proj.bias is not None:
            logits_SG1 = logits_SG1 + self.proj.bias.to(island)
        return sigmoid(logits_SG1.squeeze(-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Drafts of all sequences and what they were chosen from."""

    token_ids_SG: torch.Tensor  # int64, target ids
    logits: tuple[torch.Tensor, ...]  # per draft [S, V], Markov bias included
    previous_GSr: tuple[torch.Tensor, ...]  # W1[token before each draft]; empty without a Markov head


def greedy_draft(logits_SV: torch.Tensor, index: int) -> torch.Tensor:
    """The most likely draft, whatever its position."""
    return first_maximum(logits_SV)


def draft_chain(
    markov: MarkovHead | None,
    *,
    anchor_ids_S: torch.Tensor,
    hidden_GSD: torch.Tensor,
    logits_GSV: torch.Tensor,
    target_ids_V: torch.Tensor | None,
    linear: LinearFunction,
    choose: DraftChoice = greedy_draft,
) -> Chain:
    """Drafts, left to right, without re-running the backbone; stays on the device.

    Args:
        markov: head that adds the previous token's bias; None leaves the rows independent.
        anchor_ids_S: int64, token before the first draft.
        hidden_GSD: post-norm block rows of the kept drafts, one [S, D] per draft.
        logits_GSV: their logits without bias, over the draft vocabulary.
        target_ids_V: int64, target id of each draft id; None when they are the same.
        linear: row-invariant product.
        choose: picks a draft id from the logits, Markov bias included, of each position.
    """
    state_Sr = None if markov is None else markov.initial_state(anchor_ids_S.shape[0])
    previous_ids_S, drafts, chained, embedded = anchor_ids_S, [], [], []
    for index, (hidden_SD, unbiased_SV) in enumerate(zip(hidden_GSD, logits_GSV, strict=True)):
        logits_SV = unbiased_SV
        if markov is not None and state_Sr is not None:
            previous_Sr = embedding(previous_ids_S, markov.markov_w1.weight)
            features_Sr, state_Sr = markov.features(hidden_SD, previous_Sr, state_Sr, linear)
            logits_SV = unbiased_SV + linear(features_Sr, markov.markov_w2.weight)
            embedded.append(previous_Sr)
        draft_S = choose(logits_SV, index)
        # The chain always continues with a target id: W1 is indexed by target ids.
        previous_ids_S = draft_S if target_ids_V is None else target_ids_V[draft_S]
        drafts.append(previous_ids_S)
        chained.append(logits_SV)
    return Chain(
        token_ids_SG=torch.stack(drafts, dim=1),
        logits=tuple(chained),
        previous_GSr=tuple(embedded),
    )


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Computed in the island dtype, rounded once."""
    return sigmoid(x.to(island_dtype(x.dtype))).to(x.dtype)


def _tanh(x: torch.Tensor) -> torch.Tensor:
    """Computed in the island dtype, rounded once."""
    return tanh(x.to(island_dtype(x.dtype))).to(x.dtype)
