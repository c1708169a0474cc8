"""Draft logits go through what the target's go through, also where the draft vocabulary is smaller."""

import math

import pytest
import torch

from outrider.batch import DraftShaping, Penalties
from outrider.models.dspark.shaping import DraftShaper

VOCAB = 9
KEPT = torch.tensor([1, 2, 5, 8])  # target ids of a reduced draft vocabulary
ROWS = (0, 2)  # of three sequences, the second asks for nothing
REPETITION, PRESENCE, FREQUENCY, MASKED = (1.5, 0.8), (0.3, -0.2), (0.4, 0.7), (2, 0)
BIAS = ({5: 2.0, 8: -100.0}, {1: 1.5})
PROMPTS, OUTPUTS = ((1, 3), (2,)), ((5, 5), (8, 1, 1))
STOPS = ((2, 7), (5,))


def table(rows: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> torch.Tensor:
    counted = torch.zeros(len(rows), VOCAB, dtype=torch.int32)
    for q, ids in enumerate(rows):
        for token_id in ids:
            counted[q, token_id] += 1
    return counted.to(dtype)


def shaping() -> DraftShaping:
    bias = torch.zeros(2, VOCAB, dtype=torch.float64)
    for q, values in enumerate(BIAS):
        for token_id, value in values.items():
            bias[q, token_id] = value
    seen = table(PROMPTS, torch.bool) | table(OUTPUTS, torch.bool)
    nothing = torch.zeros(0, dtype=torch.int64)
    return DraftShaping(
        rows_Q=torch.tensor(ROWS),
        bias_QV=bias,
        penalties=Penalties(
            repetition_Q=torch.tensor(REPETITION, dtype=torch.float64),
            presence_Q=torch.tensor(PRESENCE, dtype=torch.float64),
            frequency_Q=torch.tensor(FREQUENCY, dtype=torch.float64),
            counts_QV=table(OUTPUTS, torch.int32),
            seen_QV=seen,
            later_rows_B=nothing,
            earlier_ids_B=nothing,
        ),
        stop_QV=table(STOPS, torch.bool),
        num_masked_Q=torch.tensor(MASKED),
    )


def literal(q: int, logits: list[float], output: list[int], index: int) -> list[float]:
    """The definition over target ids, in Python numbers."""
    shaped = []
    for token_id, logit in enumerate(logits):
        value = logit + BIAS[q].get(token_id, 0.0)
        if token_id in (*PROMPTS[q], *output):
            value = value / REPETITION[q] if value > 0 else value * REPETITION[q]
        value -= PRESENCE[q] * (token_id in output) + FREQUENCY[q] * output.count(token_id)
        shaped.append(-math.inf if token_id in STOPS[q] and index < MASKED[q] else value)
    return shaped


@pytest.mark.parametrize("kept", [None, KEPT], ids=["full", "reduced"])
def test_every_draft_is_judged_after_the_ones_before_it(kept: torch.Tensor | None) -> None:
    columns = torch.arange(VOCAB) if kept is None else kept
    shaper = DraftShaper(shaping(), kept)
    outputs = [list(output) for output in OUTPUTS]
    dice = torch.Generator().manual_seed(1)
    for index in range(4):
        logits = torch.randn(3, VOCAB, generator=dice, dtype=torch.float64)
        shaped = shaper.shape(logits[:, columns], index)
        assert torch.equal(shaped[1], logits[1, columns]), "a row that asks for nothing keeps its bits"
        for q, row in enumerate(ROWS):
            expected = torch.tensor(literal(q, logits[row].tolist(), outputs[q], index), dtype=torch.float64)
            torch.testing.assert_close(shaped[row], expected[columns], rtol=1e-12, atol=1e-12)
        drafts = shaped.argmax(1)
        shaper.count(drafts)
        for q, row in enumerate(ROWS):
            outputs[q].append(int(columns[drafts[row]]))


def test_the_parameters_of_a_block_are_left_as_they_are() -> None:
    asked = shaping()
    for _ in range(2):
        shaper = DraftShaper(asked, None)
        shaper.count(torch.tensor([5, 0, 8]))
    assert asked.penalties is not None
    assert torch.equal(asked.penalties.counts_QV, table(OUTPUTS, torch.int32))


def test_where_every_draft_is_masked_none_is() -> None:
    """A reduced vocabulary may hold stop ids only."""
    asked = DraftShaping(
        rows_Q=torch.tensor([0]),
        bias_QV=None,
        penalties=None,
        stop_QV=torch.ones(1, VOCAB, dtype=torch.bool),
        num_masked_Q=torch.tensor([1]),
    )
    logits = torch.randn(1, 4, dtype=torch.float64)
    assert torch.equal(DraftShaper(asked, KEPT).shape(logits, 0), logits)
