"""Margins: by how much a logit must move before another token is chosen."""

import pytest
import torch

from outrider.batch import TokenChoices, Truncation
from outrider.speculative.choose import choose_tokens
from outrider.testing.recording import draw_margins, top_margins

NUM_ROWS, VOCAB_SIZE, SEED = 40, 50, 11


def chosen(logits_NV: torch.Tensor, positions_N: torch.Tensor, temperature: float) -> torch.Tensor:
    """What the engine draws."""
    sequence_N = torch.arange(logits_NV.shape[0])
    choices = TokenChoices(
        rows_R=sequence_N,
        sequence_R=sequence_N,
        positions_R=positions_N,
        seed_Q=torch.full_like(sequence_N, SEED),
        sample_Q=torch.zeros_like(sequence_N),
        temperature_Q=torch.full((logits_NV.shape[0],), temperature, dtype=torch.float64),
        greedy_Q=torch.zeros_like(sequence_N, dtype=torch.bool),
        truncation=Truncation(top_k_S=None, largest_k=0, top_p_S=None, min_p_S=None),
        bias_QV=None,
        penalties=None,
        stop_mask=None,
        coins=(),
    )
    return choose_tokens(logits_NV, choices).token_ids_R


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 4.0])
def test_the_draw_changes_just_beyond_its_margin(temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits_NV = torch.randn((NUM_ROWS, VOCAB_SIZE), generator=generator, dtype=torch.float64)
    positions_N = torch.arange(100, 100 + NUM_ROWS)
    margins = draw_margins(logits_NV, positions_N, temperature=temperature, seed=SEED)
    tokens_N = chosen(logits_NV, positions_N, temperature)
    rows_N = torch.arange(NUM_ROWS)
    assert (tokens_N != logits_NV.argmax(-1)).any(), "noise that changes nothing would be no draw"
    for share, same in ((0.999, True), (1.001, False)):
        moved_NV = logits_NV.clone()
        moved_NV[rows_N, tokens_N] -= share * torch.tensor(margins, dtype=torch.float64)
        assert ((chosen(moved_NV, positions_N, temperature) == tokens_N) == same).all()


def test_a_greedy_margin_is_that_of_the_two_best_logits() -> None:
    logits_NV = torch.tensor([[1.0, 5.0, 4.5], [2.0, 2.0, 0.0]], dtype=torch.bfloat16)
    assert top_margins(logits_NV) == [0.5, 0.0]
