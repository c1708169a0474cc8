"""What a drafter proposes at every anchor of known texts, against how the texts go on.

The text is given and all anchors of it are drafted in a few batched calls, so a reading of a checkpoint is measured
without decoding. On a greedy text an anchor accepts what a round of the engine would accept there.

Dims: S anchors, G drafts, T tokens, A tapped layers, D model width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.bench.pair_texts import PairText
from outrider.models.dspark.block import BlockAnchors, BlockPredictor, ContextCache

__all__ = ["Calibration", "Difference", "Outcomes", "TextOutcome", "Walk", "draft_texts", "gain_of"]

PAGE_SIZE = 64
MAX_ANCHORS = 32  # of one call: logits of all their drafts are in memory
NUM_RESAMPLES = 4000
INTERVAL_PERCENT = (0.1, 99.9)  # wide: some forty readings are compared with the given one
NUM_BINS = 10

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOutcome:
    """All anchors of one text."""

    is_greedy: bool
    accepted_S: torch.Tensor  # int64, drafts that stand
    known_S: torch.Tensor  # int64, drafts that the text is long enough to judge
    confidence_SG: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Confidence of drafts that were reached, against whether they stood."""

    mean_confidence: tuple[float, ...]  # by draft position
    acceptance: tuple[float, ...]
    expected_error: float  # ECE over equal bins, all positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Rounds as the engine would take them through the greedy texts."""

    tokens_per_round: float
    low: float
    high: float
    num_rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """All texts under one reading."""

    texts: tuple[TextOutcome, ...]
    num_drafts: int

    @property
    def num_anchors(self) -> int:
        """Anchors of all texts."""
        return sum(text.accepted_S.numel() for text in self.texts)

    @property
    def mean_accepted(self) -> float:
        """Drafts that stand, per anchor of any text."""
        return float(sum(int(text.accepted_S.sum()) for text in self.texts)) / max(self.num_anchors, 1)

    def survival(self) -> tuple[float, ...]:
        """Share of greedy anchors at which drafts 1..k all stand, by k."""
        accepted, known = self._greedy()
        return tuple(_share(accepted[known > k] > k) for k in range(self.num_drafts))

    def conditional(self) -> tuple[float, ...]:
        """Share of greedy anchors at which draft k stands, of those at which all before it do."""
        accepted, known = self._greedy()
        return tuple(_share(accepted[(known > k) & (accepted >= k)] > k) for k in range(self.num_drafts))

    def calibration(self) -> Calibration | None:
        """Of greedy texts; None without a confidence head."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        confidences = [text.confidence_SG for text in self.texts if text.is_greedy]
        if not confidences or any(confidence is None for confidence in confidences):
            return None
        accepted, known = self._greedy()
        confidence_SG = torch.cat([each for each in confidences if each is not None])
        for k in range(self.num_drafts):
            reached = (known > k) & (accepted >= k)
            pairs.append((confidence_SG[reached, k], (accepted[reached] > k).double()))
        return Calibration(
            mean_confidence=tuple(_mean(confidence) for confidence, _ in pairs),
            acceptance=tuple(_mean(stood) for _, stood in pairs),
            expected_error=_expected_error(*(torch.cat(parts) for parts in zip(*pairs, strict=True))),
        )

    def walk(self) -> Walk:
        """Tokens per round, the target's own included, over rounds whose whole block the text can judge."""
        tokens, rounds = [], []
        for text in self.texts:
            if not text.is_greedy:
                continue
            position, total, count = 0, 0, 0
            accepted, known = text.accepted_S.tolist(), text.known_S.tolist()
            while position < len(accepted) and known[position] == self.num_drafts:
                total, count = total + 1 + accepted[position], count + 1
                position += 1 + accepted[position]
            tokens.append(total)
            rounds.append(count)
        mean, low, high = _ratio_interval(np.array(tokens, float), np.array(rounds, float), (2.5, 97.5))
        return Walk(tokens_per_round=mean, low=low, high=high, num_rounds=sum(rounds))

    def _greedy(self) -> tuple[torch.Tensor, torch.Tensor]:
        empty = torch.zeros(0, dtype=torch.int64)
        chosen = [text for text in self.texts if text.is_greedy]
        return (
            torch.cat([empty, *(text.accepted_S for text in chosen)]),
            torch.cat([empty, *(text.known_S for text in chosen)]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Accepted drafts per anchor of one reading less those of another, on the same anchors."""

    mean: float
    low: float
    high: float


def gain_of(reading: Outcomes, given: Outcomes) -> Difference:
    """The paired difference over the texts that both have; texts are what is drawn, their anchors belong together."""
    pairs = list(zip(reading.texts, given.texts, strict=False))
    differences = np.array([float((a.accepted_S - b.accepted_S).sum()) for a, b in pairs])
    counts = np.array([float(a.accepted_S.numel()) for a, _ in pairs])
    mean, low, high = _ratio_interval(differences, counts, INTERVAL_PERCENT)
    return Difference(mean=mean, low=low, high=high)


@torch.inference_mode()
def draft_texts(
    predictor: BlockPredictor,
    texts: Sequence[PairText],
    tap_columns: Sequence[int],
    progress: Callable[[int], None] | None = None,
) -> Outcomes:
    """Draft at every anchor of every text.

    Args:
        predictor: the drafter under one reading.
        texts: with taps.
        tap_columns: which of their taps the reading means, in the drafter's order.
        progress: gets the number of anchors done.
    """
    longest = max(len(text.token_ids) for text in texts)
    num_pages = -(-longest // PAGE_SIZE)
    cache = predictor.allocate_context(num_pages * PAGE_SIZE)
    columns_A = torch.tensor(list(tap_columns))
    outcomes = []
    for text in texts:
        outcomes.append(_draft_text(predictor, cache, text, columns_A, num_pages))
        if progress is not None:
            progress(text.num_anchors)
    return Outcomes(texts=tuple(outcomes), num_drafts=predictor.num_draft_tokens)


def _draft_text(
    predictor: BlockPredictor, cache: ContextCache, text: PairText, columns_A: torch.Tensor, num_pages: int
) -> TextOutcome:
    device, num_drafts = cache.rows_2LRJK.device, predictor.num_draft_tokens
    taps_TAD = text.taps_TAD.index_select(1, columns_A.to(text.taps_TAD.device)).to(device)
    rows_T = torch.arange(taps_TAD.shape[0], device=device)
    predictor.store_context(cache, taps_TAD, rows_T, rows_T, max_position=taps_TAD.shape[0] - 1)
    ids_T = torch.tensor(text.token_ids)
    positions_S = torch.arange(text.num_prompt, len(text.token_ids) - 1)
    pages_P = torch.arange(num_pages, device=device)
    drafts, confidence = [], []
    for chosen_S in torch.split(positions_S, MAX_ANCHORS):
        block = predictor.predict(
            cache,
            BlockAnchors(
                token_ids_S=ids_T[chosen_S].to(device),
                positions_S=chosen_S.to(device),
                page_table_SP=pages_P.expand(chosen_S.numel(), -1).contiguous(),
                page_size=PAGE_SIZE,
                max_position=int(chosen_S[-1]),
            ),
        ).block
        drafts.append(block.token_ids_SG.cpu())
        if block.confidence_SG is not None:
            confidence.append(block.confidence_SG.double().cpu())
    known_S = (len(text.token_ids) - 1 - positions_S).clamp_max(num_drafts)
    where_SG = (positions_S[:, None] + torch.arange(1, num_drafts + 1)).clamp_max(len(text.token_ids) - 1)
    inside_SG = torch.arange(num_drafts) < known_S[:, None]
    stands_SG = ((torch.cat(drafts) == ids_T[where_SG]) & inside_SG).long().cumprod(1)
    return TextOutcome(
        is_greedy=text.is_greedy,
        accepted_S=stands_SG.sum(1),
        known_S=known_S,
        confidence_SG=torch.cat(confidence) if confidence else None,
    )


def _ratio_interval(sums: Array, counts: Array, percent: tuple[float, float]) -> tuple[float, float, float]:
    """Ratio of totals and its bootstrap interval over texts; the draws are always the same ones."""
    if not counts.sum():
        return 0.0, 0.0, 0.0
    draws = np.random.default_rng(0).integers(len(sums), size=(NUM_RESAMPLES, len(sums)))
    totals = counts[draws].sum(1)
    ratios = sums[draws].sum(1)[totals > 0] / totals[totals > 0]
    low, high = np.percentile(ratios, percent)
    return float(sums.sum() / counts.sum()), float(low), float(high)


def _expected_error(confidence: torch.Tensor, stood: torch.Tensor) -> float:
    """Mean of |confidence - acceptance| over equal bins, weighted by their drafts (dspark.md section 3.5)."""
    bins = (confidence * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    gaps = [(confidence[bins == b] - stood[bins == b]).sum().abs() for b in range(NUM_BINS)]
    return float(sum(gaps)) / max(confidence.numel(), 1)


def _share(stood: torch.Tensor) -> float:
    return _mean(stood.double())


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0
